"""Hugging Face Accelerate: launch YAML for FSDP2 or DDP, and trainer arguments."""

from __future__ import annotations

import json

from planner.errors import PlannerError
from planner.export.base import Export, Facts, Gap, present
from planner.plan import Plan

#: Keys of Accelerate 1.15's ClusterConfig, its fsdp_config and parallelism_config
#: (accelerate/commands/config/config_args.py, commands/launch.py) that may be written.
KEYS = frozenset(
    """
    compute_environment distributed_type num_machines num_processes machine_rank
    mixed_precision fsdp_config parallelism_config debug use_cpu
    """.split()  # noqa: SIM905
)
FSDP_KEYS = frozenset(
    """
    fsdp_version fsdp_reshard_after_forward fsdp_auto_wrap_policy
    fsdp_activation_checkpointing fsdp_state_dict_type
    fsdp_cpu_ram_efficient_loading
    """.split()  # noqa: SIM905
)
PARALLELISM_KEYS = frozenset(
    f"parallelism_config_{name}_size"
    for name in ("dp_replicate", "dp_shard", "tp", "cp")
)


def accelerate(plan: Plan) -> Export:
    """``accelerate.yaml`` and ``training_arguments.json`` (the transformers Trainer's
    batch arguments, which the YAML has no place for)."""
    facts = Facts.of(plan)
    refuse_stages(facts, "Accelerate")
    p, f, gaps = facts.p, facts.figures, list[Gap]()
    divided = p.dp_shard * p.cp > 1
    mesh = divided or p.tp > 1
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP" if mesh else "MULTI_GPU",
        "num_machines": facts.nodes,
        "num_processes": f.world,
        "machine_rank": 0,
        "mixed_precision": _precision(facts, gaps),
        "use_cpu": False,
    }
    if mesh:
        config["fsdp_config"] = _fsdp(facts, gaps)
        sizes = (
            ("dp_replicate", p.dp_replicate),
            ("dp_shard", p.dp_shard),
            ("tp", p.tp),
            ("cp", p.cp),
        )
        config["parallelism_config"] = {
            f"parallelism_config_{name}_size": size for name, size in sizes
        }
    elif _recomputed(facts):
        gaps.append(
            Gap("recompute in the YAML without FSDP", "gradient_checkpointing is set")
        )
    if p.tp > 1:
        gaps.append(
            Gap("the placement of each tensor", "the model's own tp_plan divides it")
        )
    if p.ep > 1:
        gaps.append(Gap(f"ep {p.ep}", "experts are divided like other parameters"))
    arguments: dict[str, object] = {
        "per_device_train_batch_size": f.micro_batch,
        "gradient_accumulation_steps": f.accumulation,
        "gradient_checkpointing": not mesh and _recomputed(facts),
        "bf16": facts.training.precision in ("bf16", "fp8"),
        "fp16": facts.training.precision == "fp16",
        "torch_compile": facts.training.compile,
    }
    header = "".join(f"# {gap}\n" for gap in gaps)
    return Export(
        "accelerate",
        (
            ("accelerate.yaml", header + yaml_text(config)),
            ("training_arguments.json", json.dumps(arguments, indent=2) + "\n"),
        ),
        f,
        tuple(gaps),
        ("machine_rank is 0: set each node's own",),
        "accelerate launch --config_file accelerate.yaml train.py",
    )


def refuse_stages(facts: Facts, name: str) -> None:
    """Raises PlannerError for pipeline stages, which ``name`` does not have."""
    if facts.p.pp > 1:
        raise PlannerError(
            f"{name} has no pipeline parallelism",
            f"pp={facts.p.pp}: not expressible",
            "plan again with --pin pp=1, or export to megatron, torchtitan or dtensor",
        )


def yaml_text(config: dict[str, object]) -> str:
    """YAML of scalars and one level of tables; strings are quoted as JSON does."""
    lines: list[str] = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {k}: {json.dumps(v)}" for k, v in value.items()]  # pyright: ignore[reportUnknownVariableType]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _recomputed(facts: Facts) -> bool:
    return any(mode != "none" for mode in facts.modes())


def _precision(facts: Facts, gaps: list[Gap]) -> str:
    precision = facts.training.precision
    if precision in ("bf16", "fp16", "fp8"):
        return precision
    if precision == "tf32":
        gaps.append(
            Gap("tf32 in the YAML", "call torch.set_float32_matmul_precision('high')")
        )
    return "no"


def _fsdp(facts: Facts, gaps: list[Gap]) -> dict[str, object]:
    p, modes, total = facts.p, facts.modes(), len(facts.layers)
    full, selective = modes.get("full", 0), modes.get("selective", 0)
    if selective or 0 < full < total:
        gaps.append(
            Gap(
                f"recompute in {full + selective} of {total} layers as planned "
                f"({full} full, {selective} selective)",
                "every layer recomputes in full",
            )
        )
    if p.zero < 3 and p.dp_shard * p.cp > 1:
        gaps += present(
            facts.state_gap(
                3, "FSDP2 without resharding runs: all state is divided, parameters "
                "are gathered every forward and stay whole until backward",
            )
        )  # fmt: skip
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": p.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": bool(full or selective),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
