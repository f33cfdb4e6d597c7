"""Megatron-LM / Megatron-Core command-line arguments.

Ranks: Megatron's world is tp x pp x cp x dp; expert parallelism lies inside dp x cp (x
tp), so it is no factor. The distributed optimizer (ZeRO-1) divides over dp x cp.
"""

from __future__ import annotations

from planner.export.base import (
    Backend,
    Export,
    Facts,
    Gap,
    check_schedule,
    present,
)
from planner.plan import Plan

#: Options of Megatron-LM's megatron/training/arguments.py and megatron_core's configs
#: (main branch, 2025-11; github.com/NVIDIA/Megatron-LM) that this file may write.
OPTIONS = frozenset(
    """
    --tensor-model-parallel-size --pipeline-model-parallel-size
    --context-parallel-size --expert-model-parallel-size
    --expert-tensor-parallel-size --num-virtual-stages-per-pipeline-rank
    --pipeline-model-parallel-layout --sequence-parallel --micro-batch-size
    --global-batch-size --seq-length --use-distributed-optimizer
    --num-distributed-optimizer-instances --overlap-grad-reduce
    --overlap-param-gather --use-megatron-fsdp --data-parallel-sharding-strategy
    --no-gradient-accumulation-fusion --ckpt-format --recompute-granularity
    --recompute-method --recompute-num-layers --bf16 --fp16 --fp8-format
    --grad-reduce-in-bf16 --optimizer --num-layers
    """.split()  # noqa: SIM905
)
STRATEGY = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(plan: Plan) -> Export:
    """``arguments.txt``, one option a line, for pretrain_gpt.py and its relatives."""
    facts = Facts.of(plan)
    check_schedule(facts, Backend.MEGATRON, "Megatron")
    p, gaps = facts.p, list[Gap]()
    args: list[tuple[str, object]] = [
        ("--num-layers", len(facts.layers)),
        ("--tensor-model-parallel-size", p.tp),
        ("--pipeline-model-parallel-size", p.pp),
        ("--context-parallel-size", p.cp),
    ]
    if p.tp > 1 and p.sequence_parallel:
        args.append(("--sequence-parallel", ""))
    if p.ep > 1:
        args.append(("--expert-model-parallel-size", p.ep))
        args.append(("--expert-tensor-parallel-size", expert_tensor(plan)))
    args += _stages(facts, gaps)
    args += [
        ("--micro-batch-size", p.micro_batch_size),
        ("--global-batch-size", facts.figures.global_batch),
    ]
    if plan.model.seq_len:
        args.append(("--seq-length", plan.model.seq_len))
    args += _sharding(facts, gaps)
    args += recompute(facts, gaps)
    args += _numerics(facts, gaps)
    lines = [f"{name} {value}".strip() for name, value in args]
    assert all(name in OPTIONS for name, _ in args), args
    notes = [
        "arguments of the parallelism only: add the model's sizes, data and schedule "
        "of the learning rate",
    ]
    if p.tp > 1:
        notes.append("export CUDA_DEVICE_MAX_CONNECTIONS=1 before the launch")
    command = facts.torchrun("pretrain_gpt.py $(cat arguments.txt) ...")
    return Export(
        "megatron",
        (("arguments.txt", "\n".join(lines) + "\n"),),
        facts.figures,
        tuple(gaps),
        tuple(notes),
        command,
    )


def expert_tensor(plan: Plan) -> int:
    """Tensor-parallel degree of the experts: 1 where tp leaves their weights whole."""
    for record in plan.placements.values():
        if record.what == "parameter" and "ep" in record.outputs[0].placement:
            divided = record.outputs[0].placement.get("tp", "R") != "R"
            return plan.parallelism.tp if divided else 1
    return 1


def layout(facts: Facts) -> str:
    """Megatron's own notation: E the embedding, t a layer, L the loss, | a cut."""
    counts = facts.layers_per_chunk
    parts = ["t" if n == 1 else f"t*{n}" if n else "" for n in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def _stages(facts: Facts, gaps: list[Gap]) -> list[tuple[str, object]]:
    p = facts.p
    if p.pp == 1:
        return []
    args: list[tuple[str, object]] = []
    if p.schedule == "zero_bubble":
        gaps.append(
            Gap("the zero-bubble schedule", "1F1B runs in its place, with its bubble")
        )
    elif p.schedule == "gpipe":
        gaps.append(Gap("the GPipe schedule", "1F1B runs in its place, in less memory"))
    folded = p.schedule == "zero_bubble" and p.vpp == 2
    if folded:
        gaps.append(
            Gap(
                "a V-shaped order of stages",
                "layers are cut evenly over the ranks, one chunk each",
            )
        )
        return args
    if facts.even:
        if p.vpp > 1:
            args.append(("--num-virtual-stages-per-pipeline-rank", p.vpp))
    else:  # the layout says how many chunks there are
        args.append(("--pipeline-model-parallel-layout", layout(facts)))
    ends = [facts.chunks[0][0], facts.chunks[-1][-1]]
    middle = [
        name
        for k, part in enumerate(facts.chunks)
        for name in part
        if not facts.is_layer(name) and 0 < k < len(facts.chunks) - 1
    ]
    if middle:
        gaps.append(
            Gap(
                f"blocks {', '.join(middle[:3])} away from the first and last stage",
                f"they go with {ends[0]} or {ends[1]}",
            )
        )
    return args


def _sharding(facts: Facts, gaps: list[Gap]) -> list[tuple[str, object]]:
    p = facts.p
    shard = p.dp_shard * p.cp
    args: list[tuple[str, object]] = []
    level = p.zero if shard > 1 else 0
    if level == 0:
        if facts.figures.data_parallel * p.cp > 1:
            args.append(("--overlap-grad-reduce", ""))
        return args
    args += [("--use-distributed-optimizer", ""), ("--overlap-grad-reduce", "")]
    args.append(("--overlap-param-gather", ""))
    if level >= 2 and p.pp == 1:
        args += [
            ("--use-megatron-fsdp", ""),
            ("--data-parallel-sharding-strategy", STRATEGY[level]),
            ("--no-gradient-accumulation-fusion", ""),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    elif level >= 2:
        gaps += present(
            facts.state_gap(1, "with pipeline stages the distributed optimizer runs")
        )
    if p.dp_replicate > 1:
        args.append(("--num-distributed-optimizer-instances", p.dp_replicate))
    return args


def recompute(facts: Facts, gaps: list[Gap]) -> list[tuple[str, object]]:
    """Full recompute counts layers per chunk, the same on every chunk."""
    modes = facts.modes()
    full, selective = modes.get("full", 0), modes.get("selective", 0)
    total = len(facts.layers)
    if not full and not selective:
        return []
    if selective == total:
        return [("--recompute-granularity", "selective")]
    if full == total:
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", 1),
        ]
    if full == 0:
        gaps.append(
            Gap(
                f"selective recompute in {selective} of {total} layers",
                "all layers recompute selectively",
            )
        )
        return [("--recompute-granularity", "selective")]
    counts = facts.recomputed_per_chunk("full")
    most = max(counts)
    if len(set(counts)) > 1 or selective:
        more = most * len(counts) - full
        what = f"full recompute in {full} of {total} layers, unequal between chunks"
        if selective:
            what += f", and selective in {selective}"
        gaps.append(
            Gap(what, f"{most} of every chunk recompute, up to {more} layers more")
        )
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", "block"),
        ("--recompute-num-layers", most),
    ]


def _numerics(facts: Facts, gaps: list[Gap]) -> list[tuple[str, object]]:
    precision, args = facts.training.precision, list[tuple[str, object]]()
    if precision in ("bf16", "fp8"):
        args.append(("--bf16", ""))
        if facts.training.gradient_dtype != "fp32":
            args.append(("--grad-reduce-in-bf16", ""))
    elif precision == "fp16":
        args.append(("--fp16", ""))
    if precision == "fp8":
        args.append(("--fp8-format", "hybrid"))
    optimizer = facts.training.optimizer
    if optimizer in ("adam", "adamw"):
        args.append(("--optimizer", "adam"))  # decoupled weight decay is its default
    elif optimizer in ("sgd", "momentum"):
        args.append(("--optimizer", "sgd"))
    else:
        gaps.append(Gap(f"the optimizer {optimizer}", "set it in your own script"))
    return args
