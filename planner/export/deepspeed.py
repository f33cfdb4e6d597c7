"""DeepSpeed's JSON config. Its data-parallel world is ranks / (tp x pp x cp)."""

from __future__ import annotations

import json

from planner.errors import PlannerError
from planner.export.base import Export, Facts, Gap, present
from planner.plan import Plan

#: Top-level keys of DeepSpeed's config (deepspeed/runtime/constants.py and
#: runtime/config.py, release 0.19) that this file may write.
KEYS = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    zero_optimization bf16 fp16 optimizer tensor_parallel sequence_parallel_size
    pipeline data_types
    """.split()  # noqa: SIM905
)
OPTIMIZERS = {
    "adamw": "AdamW",
    "adam": "Adam",
    "lion": "Lion",
    "sgd": "SGD",
    "momentum": "SGD",
}


def deepspeed(plan: Plan) -> Export:
    """``ds_config.json``."""
    facts = Facts.of(plan)
    p, f, gaps = facts.p, facts.figures, list[Gap]()
    level = p.zero if p.dp_shard * p.cp > 1 else 0
    if p.pp > 1 and level >= 2:
        gaps += present(
            facts.state_gap(1, "DeepSpeed's pipeline engine takes ZeRO up to 1")
        )
        level = 1
    config: dict[str, object] = {
        "train_batch_size": f.global_batch,
        "train_micro_batch_size_per_gpu": f.micro_batch,
        "gradient_accumulation_steps": f.accumulation,
        "optimizer": {"type": OPTIMIZERS[facts.training.optimizer], "params": {}},
        "zero_optimization": _zero(facts, level, gaps),
    }
    if facts.training.precision in ("bf16", "fp8"):
        config["bf16"] = {"enabled": True}
        if facts.training.gradient_dtype == "fp32":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif facts.training.precision == "fp16":
        config["fp16"] = {"enabled": True}
    if facts.training.precision == "fp8":
        gaps.append(Gap("fp8 matrix products", "use Transformer Engine's layers"))
    if p.tp > 1:
        config["tensor_parallel"] = {"autotp_size": p.tp}
        if level == 3:
            raise PlannerError(
                "DeepSpeed has no tensor parallelism under ZeRO-3",
                f"tp={p.tp}, zero=3",
                "plan again with --pin tp=1 or --pin zero=2",
            )
        gaps.append(
            Gap(
                "the placement of each tensor",
                "AutoTP chooses by layer names; sequence parallelism stays off",
            )
        )
    if p.cp > 1:
        config["sequence_parallel_size"] = p.cp
        gaps.append(
            Gap(
                "context parallelism by gathered keys",
                f"Ulysses runs over {p.cp} ranks: heads must divide by it",
            )
        )
    _code(facts, gaps)
    assert config.keys() <= KEYS
    return Export(
        "deepspeed",
        (("ds_config.json", json.dumps(config, indent=2) + "\n"),),
        f,
        tuple(gaps),
        ("learning rate and betas of the optimizer are yours",),
        f"deepspeed --num_gpus {facts.gpus_per_node} --num_nodes {facts.nodes} "
        "train.py --deepspeed --deepspeed_config ds_config.json",
    )


def _zero(facts: Facts, level: int, gaps: list[Gap]) -> dict[str, object]:
    p = facts.p
    zero: dict[str, object] = {"stage": level}
    if level:
        zero["overlap_comm"] = True
    if level and p.dp_replicate > 1:
        if level == 3:
            zero["zero_hpz_partition_size"] = p.dp_shard
        gaps.append(
            Gap(
                f"{p.dp_replicate} replicas of {p.dp_shard} shards",
                f"state is divided over all {facts.figures.data_parallel} replicas' "
                "ranks: less memory, more traffic between nodes"
                + ("; hpZ keeps a second copy in each shard group" * (level == 3)),
            )
        )
    return zero


def _code(facts: Facts, gaps: list[Gap]) -> None:
    """What DeepSpeed takes in code, not in its JSON."""
    p, recompute = facts.p, facts.modes()
    if p.pp > 1:
        cuts = ", ".join(map(str, facts.layers_per_chunk))
        gaps.append(
            Gap(
                f"pp {p.pp} in the JSON",
                f"wrap the model in PipelineModule(num_stages={p.pp}); layers by "
                f"stage: {cuts}",
            )
        )
        if p.schedule != "1f1b":
            gaps.append(
                Gap(f"the {p.schedule} schedule", "DeepSpeed's 1F1B runs in its place")
            )
    if p.ep > 1:
        gaps.append(
            Gap(
                f"ep {p.ep} in the JSON", f"give deepspeed.moe.layer.MoE ep_size={p.ep}"
            )
        )
    done = {k: n for k, n in recompute.items() if k != "none"}
    if done:
        counts = ", ".join(f"{n} layers {k}" for k, n in sorted(done.items()))
        gaps.append(
            Gap(
                f"recompute ({counts}) in the JSON",
                "call the model's gradient_checkpointing_enable() or "
                "deepspeed.checkpointing.checkpoint in those layers",
            )
        )
