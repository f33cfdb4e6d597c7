"""Hand-made recipes as shapes of the search; why one plan is slower than another."""

from __future__ import annotations

from collections.abc import Iterator

from planner.search.job import Configuration, Job
from planner.search.mesh import Mesh, divisors
from planner.search.step import StepTerms

TERMS = (
    ("compute", "computes longer"),
    ("tp_comm", "tensor-parallel communication"),
    ("cp_comm", "context-parallel communication"),
    ("ep_comm", "expert-parallel communication"),
    ("dp_comm_exposed", "gradient and parameter communication"),
    ("pp_p2p", "messages between stages"),
    ("pp_bubble", "pipeline bubble"),
    ("recompute", "recomputation"),
    ("optimizer", "optimizer step"),
    ("launch", "kernel launches"),
)


def why_slower(best: StepTerms, other: StepTerms) -> str:
    """The term that cost ``other`` most against ``best``, with its seconds."""
    worst = max(TERMS, key=lambda t: getattr(other, t[0]) - getattr(best, t[0]))
    extra = getattr(other, worst[0]) - getattr(best, worst[0])
    slower = other.total_s / best.total_s - 1
    return f"{slower:.1%} slower: {extra:.4g} s more of {worst[1]}"


def recipes(job: Job, global_batch: int) -> Iterator[tuple[str, Configuration]]:
    """DDP, FSDP and Megatron's TP x PP x DP for this cluster, where they are legal."""
    gpus = job.cluster.num_gpus
    node = min(gpus, job.cluster.gpus_per_node)
    if global_batch % gpus == 0:
        each = global_batch // gpus
        micro = max(d for d in divisors(each) if d <= 4)
        yield (
            "DDP",
            Configuration(Mesh(dp_replicate=gpus), micro, each // micro),
        )
        if gpus > 1:
            yield (
                "FSDP",
                Configuration(Mesh(dp_shard=gpus), micro, each // micro, zero=3),
            )
    for tp in (t for t in (8, 4, 2) if t <= node and gpus % t == 0):
        layers = max(n for _, n in job.chain)
        for pp in divisors(gpus // tp):
            dp = gpus // (tp * pp)
            if layers % pp or global_batch % dp or pp > layers:
                continue
            shards = dp if dp > 1 else 1
            yield (
                "Megatron",
                Configuration(
                    Mesh(pp=pp, dp_shard=shards, tp=tp),
                    1,
                    global_batch // dp,
                    zero=1 if dp > 1 else 0,
                    state="sequence",
                ),
            )
        break
