"""torchtitan's TOML job file (releases 0.1 and 0.2; 0.3 configures in Python).

torchtitan divides data-parallel state as FSDP2 does: parameters, gradients and
optimizer (ZeRO-3), or with ``fsdp_reshard_after_forward = "never"`` parameters stay
whole between forward and backward. ZeRO-1 has no equivalent.
"""

from __future__ import annotations

import json

from planner.export.base import (
    Backend,
    Export,
    Facts,
    Gap,
    check_schedule,
    present,
)
from planner.export.megatron import expert_tensor
from planner.plan import Plan

#: Preset to torchtitan's (model.name, model.flavor).
MODELS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
SCHEDULES = {
    ("gpipe", 1): "GPipe",
    ("1f1b", 1): "1F1B",
    ("zero_bubble", 1): "InterleavedZeroBubble",
    ("zero_bubble", 2): "ZBVZeroBubble",
}
#: Keys of torchtitan 0.2.2's torchtitan/config/job_config.py that this file may write.
KEYS = {
    "model": {"name", "flavor"},
    "optimizer": {"name"},
    "training": {
        "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param",
    },
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree",
        "fsdp_reshard_after_forward", "tensor_parallel_degree",
        "pipeline_parallel_degree", "module_fqns_per_model_part",
        "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
        "context_parallel_degree", "expert_parallel_degree",
        "expert_tensor_parallel_degree",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable"},
}  # fmt: skip


def torchtitan(plan: Plan) -> Export:
    """``job.toml``."""
    facts = Facts.of(plan)
    check_schedule(facts, Backend.TORCH, "torchtitan")
    p, f, gaps = facts.p, facts.figures, list[Gap]()
    tables: dict[str, dict[str, object]] = {}
    known = MODELS.get(plan.model.source)
    if known is None:
        gaps.append(
            Gap(
                f"the model {plan.model.name}",
                "torchtitan has no such flavor: register yours and fill in [model]",
            )
        )
        known = (plan.model.name, "yours")
    tables["model"] = {"name": known[0], "flavor": known[1]}
    tables["optimizer"] = _optimizer(facts, gaps)
    # with stages the schedule cuts local_batch_size into micro-batches; without, the
    # trainer accumulates global / (local x dp) times
    local = f.micro_batch * (f.accumulation if p.pp > 1 else 1)
    training: dict[str, object] = {
        "local_batch_size": local,
        "global_batch_size": f.global_batch,
    }
    if plan.model.seq_len:
        training["seq_len"] = plan.model.seq_len
    training["mixed_precision_param"] = _precision(facts, gaps)
    tables["training"] = training
    tables["parallelism"] = _parallelism(facts, gaps)
    tables["activation_checkpoint"] = _recompute(facts, gaps)
    tables["compile"] = {"enable": facts.training.compile}
    assert all(KEYS[name] >= table.keys() for name, table in tables.items())
    header = [f"# {gap}" for gap in gaps]
    text = "\n".join([*header, *([""] if header else []), toml(tables)])
    return Export(
        "torchtitan",
        (("job.toml", text),),
        f,
        tuple(gaps),
        ("for torchtitan 0.1 and 0.2; later releases take Python configs",),
        facts.torchrun("-m torchtitan.train --job.config_file job.toml"),
    )


def toml(tables: dict[str, dict[str, object]]) -> str:
    """TOML text of tables of strings, numbers, booleans and lists of strings."""
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _optimizer(facts: Facts, gaps: list[Gap]) -> dict[str, object]:
    name = {"adamw": "AdamW", "adam": "Adam"}.get(facts.training.optimizer)
    if name is None:
        gaps.append(
            Gap(f"the optimizer {facts.training.optimizer}", "AdamW is written")
        )
    return {"name": name or "AdamW"}


def _precision(facts: Facts, gaps: list[Gap]) -> str:
    precision = facts.training.precision
    if precision == "bf16":
        return "bfloat16"
    if precision in ("fp32", "tf32"):
        return "float32"
    gaps.append(Gap(f"precision {precision} in the TOML's core", "bfloat16 is written"))
    return "bfloat16"


def _parallelism(facts: Facts, gaps: list[Gap]) -> dict[str, object]:
    p = facts.p
    table: dict[str, object] = {
        "data_parallel_replicate_degree": p.dp_replicate,
        "data_parallel_shard_degree": p.dp_shard,
        "tensor_parallel_degree": p.tp,
        "context_parallel_degree": p.cp,
        "pipeline_parallel_degree": p.pp,
    }
    divided = p.dp_shard * p.cp > 1
    if divided:
        table["fsdp_reshard_after_forward"] = "always" if p.zero == 3 else "never"
    if divided and p.zero < 3:
        gaps += present(
            facts.state_gap(
                3,
                'FSDP2 with reshard "never" runs: gradients and parameters are divided '
                "too and gathered every forward; parameters stay whole until backward",
            )
        )
    if not divided and p.dp_replicate > 1 and p.tp * p.pp > 1:
        gaps.append(
            Gap(
                f"{p.dp_replicate} plain replicas (DDP) together with tp or pp",
                f"data_parallel_shard_degree = {p.dp_replicate} divides them (FSDP2)",
            )
        )
        table["data_parallel_replicate_degree"] = 1
        table["data_parallel_shard_degree"] = p.dp_replicate
        table["fsdp_reshard_after_forward"] = "never"
    if p.tp > 1 and not p.sequence_parallel:
        gaps.append(
            Gap("tensor parallelism without sequence parallelism", "it comes with it")
        )
    if p.ep > 1:
        table["expert_parallel_degree"] = p.ep
        table["expert_tensor_parallel_degree"] = expert_tensor(facts.plan)
        if (p.dp_shard * p.cp * p.tp) % p.ep or p.ep < p.cp:
            gaps.append(
                Gap(f"ep {p.ep} over these ranks", "torchtitan may refuse the mesh")
            )
    if p.pp > 1:
        name = SCHEDULES.get((p.schedule, p.vpp), "Interleaved1F1B")
        table["pipeline_parallel_schedule"] = name
        table["pipeline_parallel_microbatch_size"] = p.micro_batch_size
        table["module_fqns_per_model_part"] = model_parts(facts)
    return table


def model_parts(facts: Facts) -> list[list[str]]:
    """Modules of each virtual stage in torchtitan's names."""
    index = {name: i for i, name in enumerate(facts.layers)}
    parts = [
        [f"layers.{index[name]}" for name in part if name in index]
        for part in facts.chunks
    ]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(facts: Facts, gaps: list[Gap]) -> dict[str, object]:
    modes, total = facts.modes(), len(facts.layers)
    full, selective = modes.get("full", 0), modes.get("selective", 0)
    if not full and not selective:
        return {"mode": "none"}
    if full == total:
        return {"mode": "full"}
    if selective:
        gaps.append(
            Gap(
                f"recompute of the attention's inside in {selective} of {total} layers",
                "torchtitan's per-operator selective mode runs",
            )
        )
        return {"mode": "selective", "selective_ac_option": "op"}
    every = max(1, round(total / full))
    if every == 1:
        gaps.append(
            Gap(f"full recompute in {full} of {total} layers", "all layers recompute")
        )
        return {"mode": "full"}
    gaps.append(
        Gap(
            f"full recompute in exactly these {full} of {total} layers",
            f"every {every}th layer recomputes",
        )
    )
    return {"mode": "selective", "selective_ac_option": str(every)}
