"""Step time and live micro-batches of pipeline schedules, in closed form.

With t_k = f_k + b_k the time of stage k for one micro-batch, p_k the time of a message
from stage k to k + 1, S ranks, m micro-batches and v chunks per rank:

=============  ======================================================================
GPipe          sum t + 2 sum p + (m - 1) (max f + max b)
1F1B           sum t + 2 sum p + (m - 1) P, P = max_k max(t_k, L_k / (S - k))
               with the loop L_k = sum_{j>=k} t_j + 2 sum_{j>=k} p_j
interleaved    m max t + (sum t - max t) / v + 2 (sum of the v S - 1 hops)
zero-bubble    max(m max t + sum f + sum b - sum w', fill + (m - 1) max(f + b) + w)
               with sums over all stages but the largest, b the input part of backward,
               w the weight part and w' = min(w, f, b)
=============  ======================================================================

Against the simulator: GPipe is exact always. 1F1B is exact for equal stages without
p2p, an upper bound for unequal ones with b_k proportional to f_k. Interleaved is
exact for
equal stages without p2p, and with p <= f / (2 v) where S divides m.
Zero-bubble (one chunk) is exact for equal stages with w <= min(f, b) without p2p. How
far the others are off is measured in ``tests/property/test_pipeline_closed_forms.py``.
The V-shaped zero-bubble schedule (two chunks) has no closed form here: simulated.

``simulate`` gives the exact time of any schedule; see :mod:`cost_models.simulator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.errors import SpecError
from cost_models.schedules import (
    Backend,
    Schedule,
    check_legal,
    in_flight,
    legal,
)
from cost_models.simulator import Event, Timeline, simulate

__all__ = [
    "Backend",
    "Event",
    "PipelineTime",
    "Schedule",
    "Timeline",
    "check_legal",
    "in_flight",
    "legal",
    "simulate",
    "step_time",
]


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """``total_s`` from the first forward to the last backward.

    ``p2p_exposed_s``: what messages add to the total; ``bubble_s``: the mean idle time
    of a rank beside that (fill, drain and imbalance); the rest is work.
    """

    total_s: float
    bubble_s: float
    p2p_exposed_s: float


def step_time(
    schedule: Schedule | str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float] = 0.0,
    micro_batches: int = 1,
    virtual: int = 1,
    *,
    backward_weight_s: Sequence[float] | None = None,
) -> PipelineTime:
    """Seconds of forward and backward of all micro-batches.

    ``forward_s``, ``backward_s``: per rank (all its chunks), for one micro-batch.
    ``p2p_s``: one message between neighbours, or one value per hop (S - 1, or S with
    the one that closes the ring). ``backward_weight_s``: the part of ``backward_s``
    that zero-bubble may postpone; None: half. Raises SpecError on bad lengths.
    """
    schedule, m = Schedule(schedule), micro_batches
    forward, backward = list(forward_s), list(backward_s)
    ranks = len(forward)
    if not forward or len(backward) != ranks or m < 1 or virtual < 1:
        raise SpecError(
            "one forward and one backward time per rank, micro-batches and chunks >= 1",
            f"{ranks} and {len(backward)}, {m} micro-batches, {virtual} chunks",
        )
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    busy = m * sum(work) / ranks
    if ranks == 1:
        return PipelineTime(busy, 0.0, 0.0)
    hops = _hops(p2p_s, ranks)
    if schedule is Schedule.ZERO_BUBBLE and virtual == 2:
        return _simulated(schedule, forward, backward, hops, m, virtual, busy)
    if schedule is Schedule.GPIPE:
        free = sum(work) + (m - 1) * (max(forward) + max(backward))
        total = free + 2 * sum(hops[:-1])
    elif schedule is Schedule.ONE_F_ONE_B:
        free = sum(work) + (m - 1) * max(work)
        total = _one_f_one_b(work, hops, m)
    elif schedule is Schedule.INTERLEAVED:
        free = _interleaved(work, m, virtual)
        total = free + 2 * (virtual * sum(hops) - hops[-1])
    else:
        weight = list(backward_weight_s or [b / 2 for b in backward])
        free = _zero_bubble(forward, backward, weight, m)
        fill = sum(forward) + sum(backward) - sum(weight) + 2 * sum(hops[:-1])
        loops = (m - 1) * fill / ranks + fill + weight[0]
        total = max(free + 2 * sum(hops[:-1]), loops)
    return PipelineTime(total, max(0.0, free - busy), total - free)


def _hops(p2p_s: float | Sequence[float], ranks: int) -> list[float]:
    """Seconds from rank k to k + 1, the last one back to rank 0."""
    if isinstance(p2p_s, (int, float)):
        return [float(p2p_s)] * ranks
    hops = [float(x) for x in p2p_s]
    if len(hops) == ranks - 1:
        hops.append(max(hops))
    if len(hops) != ranks:
        raise SpecError("one p2p time per hop", f"{len(hops)} for {ranks} ranks")
    return hops


def _one_f_one_b(work: list[float], hops: list[float], m: int) -> float:
    """Stage k holds S - k micro-batches, so a loop L_k yields S - k of them."""
    ranks, loop, period = len(work), 0.0, 0.0
    for k in range(ranks - 1, -1, -1):
        loop += work[k] + (2 * hops[k] if k < ranks - 1 else 0.0)
        period = max(period, work[k], loop / (ranks - k))
    return loop + (m - 1) * period


def _interleaved(work: list[float], m: int, virtual: int) -> float:
    """m micro-batches at the slowest rank; fill and drain in chunks."""
    slow, ranks = max(work), len(work)
    steady = m * slow + (sum(work) - slow) / virtual
    fill = sum(work) + (m - 1) * slow / virtual
    return max(steady, fill) if m < ranks else steady


def _zero_bubble(
    forward: list[float], backward: list[float], weight: list[float], m: int
) -> float:
    stages = [
        (f + b, f, b - w, w) for f, b, w in zip(forward, backward, weight, strict=True)
    ]
    slow = max(total for total, *_ in stages)
    drain = [f + b - min(w, f, b) for _, f, b, w in stages]
    steady = m * slow + sum(drain) - max(drain)
    passes = [f + b for _, f, b, _ in stages]
    return max(steady, sum(passes) + (m - 1) * max(passes) + max(weight))


def _simulated(
    schedule: Schedule,
    forward: list[float],
    backward: list[float],
    hops: list[float],
    m: int,
    virtual: int,
    busy: float,
) -> PipelineTime:
    total = simulate(schedule, forward, backward, hops, m, virtual).total_s
    free = simulate(schedule, forward, backward, 0.0, m, virtual).total_s
    return PipelineTime(total, max(0.0, free - busy), max(0.0, total - free))
