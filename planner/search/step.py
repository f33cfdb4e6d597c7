"""From block solutions to the time of a whole step, term by term.

A *configuration* is a mesh, a micro-batch, a schedule, a ZeRO level and, per pipeline
rank, how many blocks of each run it holds in each recompute mode. Its price:

    rank k:  F_k = sum of block forwards,  B_k = sum of block backwards (+ recompute)
    step   = pipeline(F, B, p2p, m, v)  +  exposed gradient sums  +  optimizer

The same function prices what the search chose and what a user asks about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.overlap import exposed
from cost_models.pipeline import step_time
from cost_models.stacks import StackProfile
from planner.search.blocks import BlockSolution
from planner.search.mesh import MeshComm
from planner.search.stages import Counts


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """One block, one micro-batch, one rank: exposed seconds by cause."""

    compute_forward: float
    compute_backward: float
    tp_forward: float
    tp_backward: float
    cp: float
    ep: float
    launch_forward: float
    launch_backward: float
    gather_forward: float  # ZeRO-3 parameter gathers that computation does not hide
    gather_backward: float
    core_forward: float
    selective_share: float = 0.0  # of the forward, that selective recompute repeats

    @property
    def forward(self) -> float:
        return (
            self.compute_forward
            + self.tp_forward
            + (self.cp + self.ep) / 3
            + self.launch_forward
            + self.gather_forward
        )

    @property
    def replay(self) -> float:
        """A forward again, its parameters gathered already."""
        return self.forward - self.gather_forward

    @property
    def plain_backward(self) -> float:
        return (
            self.compute_backward
            + self.tp_backward
            + 2 * (self.cp + self.ep) / 3
            + self.launch_backward
            + self.gather_backward
        )

    def extra(self, mode: int) -> float:
        """Recomputation of mode none, selective, full."""
        selective = self.selective_share * self.replay or self.core_forward
        return (0.0, selective, self.replay)[mode]

    def seconds(self, mode: int) -> float:
        return self.forward + self.plain_backward + self.extra(mode)


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the data axes do to one configuration's parameters and gradients."""

    zero: int
    gradient_bytes: float  # per element, as reduced
    parameter_bytes: float  # per element, as gathered
    training: bool = True
    accumulate_s: float = 0.0  # per element and micro-batch: adding up gradients
    micro_batches: int = 1

    @property
    def scatters_each_micro_batch(self) -> bool:
        """ZeRO-2 keeps only its shard of the gradients between micro-batches."""
        return self.training and self.zero == 2 and self.micro_batches > 1


def block_times(
    solution: BlockSolution,
    comm: MeshComm,
    stack: StackProfile,
    sharding: Sharding,
    *,
    launch_s: float,
) -> BlockTimes:
    """Exposed times of one block for one micro-batch."""
    cp_bytes = solution.attention_kv_bytes * comm.mesh.cp if comm.mesh.cp > 1 else 0.0
    ep_bytes = solution.expert_tokens_bytes if comm.mesh.ep > 1 else 0.0
    hidden = 1.0 - stack.tp_overlap
    tp_f = solution.comm_forward_s * hidden / stack.tp_rate
    tp_b = solution.comm_backward_s * hidden / stack.tp_rate
    issue_s = stack.collective_host_s
    if comm.mesh.pp > 1 and comm.mesh.size > comm.cluster.gpus_per_node:
        issue_s += stack.staged_collective_host_s * comm.mesh.tp
    issued = sum(c.phase == "forward" for c in solution.comms)
    host_f = solution.forward_kernels * launch_s + issued * issue_s
    issued = len(solution.comms) - issued
    host_b = solution.backward_kernels * launch_s + issued * issue_s
    busy_f = solution.forward_s + tp_f
    accumulate = 0.0
    if sharding.training and sharding.zero < 3:
        numel = sum(p.numel for p in solution.parameters if p.trainable)
        accumulate = numel * sharding.accumulate_s
    busy_b = solution.backward_s + accumulate + tp_b
    gather_f = gather_b = 0.0
    if sharding.zero >= 3:
        numel = sum(p.numel for p in solution.parameters)
        gather = comm.seconds(
            "dp_shard", "all_gather", numel * sharding.parameter_bytes
        )
        scatter = comm.seconds(
            "dp_shard", "reduce_scatter", numel * sharding.gradient_bytes
        )
        under = (gather, max(busy_f, host_f)), (gather + scatter, max(busy_b, host_b))
        gather_f, gather_b = (
            exposed(
                comm_s / stack.dp_rate, work_s, stack.dp_overlap, stack.overlap_slowdown
            ).exposed_s
            for comm_s, work_s in under
        )
        if not sharding.training:
            gather_b = 0.0
    elif sharding.scatters_each_micro_batch:
        numel = sum(p.numel for p in solution.parameters if p.trainable)
        scatter = comm.seconds(
            "dp_shard", "reduce_scatter", numel * sharding.gradient_bytes
        )
        gather_b = exposed(
            scatter / stack.dp_rate,
            max(busy_b, host_b),
            stack.dp_overlap,
            stack.overlap_slowdown,
        ).exposed_s
    cp = 0.0
    if cp_bytes:
        cp = comm.seconds("cp", "all_gather", cp_bytes) * 2
        cp += comm.seconds("cp", "reduce_scatter", cp_bytes)
        cp = max(0.0, cp - stack.cp_overlap * solution.core_forward_s * 3)
    ep = 0.0
    if ep_bytes:
        ep = 4 * comm.seconds("ep", "all_to_all", ep_bytes) / stack.ep_rate
        ep = ep * (1 - stack.ep_overlap) + 3 * stack.expert_host_s
    if not sharding.training:
        ep /= 2
    return BlockTimes(
        compute_forward=solution.forward_s,
        compute_backward=solution.backward_s + accumulate,
        tp_forward=tp_f,
        tp_backward=tp_b,
        cp=cp,
        ep=ep,
        launch_forward=max(0.0, host_f - busy_f),
        launch_backward=max(0.0, host_b - busy_b),
        gather_forward=gather_f,
        gather_backward=gather_b,
        core_forward=solution.core_forward_s,
        selective_share=stack.selective_share,
    )


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A step's seconds by cause; they add up to ``total_s``."""

    total_s: float
    after_pipeline_s: float
    compute: float
    tp_comm: float
    cp_comm: float
    ep_comm: float
    dp_comm_exposed: float
    pp_p2p: float
    pp_bubble: float
    recompute: float
    optimizer: float
    launch: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: float


@dataclass(frozen=True, slots=True)
class Ending:
    """Seconds of one rank after its last backward: exposed gradient sums over the data
    axes, gradients of what the tensor axis replicates, gradients of tensors that first
    and last stage share, and the parameter update."""

    gradient_s: float = 0.0
    tp_s: float = 0.0
    tied_s: float = 0.0
    optimizer_s: float = 0.0
    host_s: float = 0.0  # data loading and bookkeeping that the device waits for

    @property
    def total_s(self) -> float:
        sums = self.gradient_s + self.tp_s + self.tied_s
        return sums + self.optimizer_s + self.host_s


def rank_times(counts: Counts, times: Sequence[BlockTimes]) -> tuple[float, float]:
    """(forward, backward with recompute) of one rank for one micro-batch."""
    forward = backward = 0.0
    for row, block in zip(counts, times, strict=True):
        n = sum(row)
        forward += n * block.forward
        backward += n * block.plain_backward
        backward += sum(c * block.extra(q) for q, c in enumerate(row))
    return forward, backward


def assemble(
    layout: Sequence[Counts],
    times: Sequence[BlockTimes],
    *,
    schedule: str,
    micro_batches: int,
    virtual: int,
    send_s: float,
    endings: Sequence[Ending],
    blocking_s: float = 0.0,
) -> StepTerms:
    """The step of a layout. ``endings``: per rank, what follows its last backward.
    ``blocking_s``: the part of a message that a rank waits for; interleaving sends one
    per chunk and pass, so chunks divide the bubble but not for nothing."""
    ranks = [rank_times(counts, times) for counts in layout]
    waits = virtual * blocking_s if virtual > 1 else 0.0
    forward = [f + waits for f, _ in ranks]
    backward = [b + waits for _, b in ranks]
    pipe = step_time(schedule, forward, backward, send_s, micro_batches, virtual)
    busiest = max(range(len(ranks)), key=lambda k: (forward[k] + backward[k], -k))
    m = micro_batches
    causes = _causes(layout[busiest], times)
    busy = m * (forward[busiest] + backward[busiest])
    idle = max(0.0, pipe.total_s - busy)
    p2p = min(idle, pipe.p2p_exposed_s)
    last = max(endings, key=lambda e: e.total_s)
    return StepTerms(
        total_s=pipe.total_s + last.total_s,
        after_pipeline_s=last.total_s,
        compute=m * causes["compute"],
        tp_comm=m * causes["tp"] + last.tp_s,
        cp_comm=m * causes["cp"],
        ep_comm=m * causes["ep"],
        dp_comm_exposed=m * causes["gather"] + last.gradient_s,
        pp_p2p=p2p + last.tied_s + 2 * m * waits,
        pp_bubble=idle - p2p,
        recompute=m * causes["recompute"],
        optimizer=last.optimizer_s,
        launch=m * causes["launch"] + last.host_s,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        send_s=send_s,
    )


def _causes(counts: Counts, times: Sequence[BlockTimes]) -> dict[str, float]:
    names = ("compute", "tp", "cp", "ep", "launch", "gather", "recompute")
    total: dict[str, float] = dict.fromkeys(names, 0.0)
    for row, block in zip(counts, times, strict=True):
        n = sum(row)
        total["compute"] += n * (block.compute_forward + block.compute_backward)
        total["tp"] += n * (block.tp_forward + block.tp_backward)
        total["cp"] += n * block.cp
        total["ep"] += n * block.ep
        total["launch"] += n * (block.launch_forward + block.launch_backward)
        total["gather"] += n * (block.gather_forward + block.gather_backward)
        total["recompute"] += sum(c * block.extra(q) for q, c in enumerate(row))
    return total
