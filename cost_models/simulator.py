"""Discrete-event simulation of a pipeline schedule: when every piece of work runs.

Each rank runs its work in the schedule's fixed order, one piece at a time. F of virtual
stage s waits for F of stage s - 1 and its message, B for B of stage s + 1, W for its
own B. A message takes ``p2p_s`` between different ranks and occupies neither of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.errors import SpecError
from cost_models.schedules import (
    Kind,
    Schedule,
    Work,
    order,
    peak_pieces,
    rank_of,
    stage_of,
)


class Event(NamedTuple):
    """``kind`` of ``micro`` on ``chunk`` of ``rank`` runs from start_s to end_s."""

    rank: int
    kind: Kind
    micro: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """``events`` rank by rank in the order run. ``bubble_s``: mean idle time of a rank.

    ``in_flight_peak``: per rank, in micro-batches of all its chunks.
    """

    events: tuple[Event, ...]
    total_s: float
    busy_s: tuple[float, ...]
    bubble_s: float
    in_flight_peak: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds per virtual stage for one micro-batch, and per hop between ranks."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # the input part where weight_s is split off
    weight_s: tuple[float, ...]  # zeros: not split
    hop_s: tuple[float, ...]  # stage s to s + 1; 0 within a rank
    ranks: int
    virtual: int


def stage_times(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float],
    virtual: int = 1,
    backward_weight_s: Sequence[float] | None = None,
    per_chunk: bool = False,
) -> StageTimes:
    """Spread per-rank times over the chunks.

    ``forward_s``, ``backward_s``: one value per rank (its chunks share it equally), or
    with ``per_chunk`` one per virtual stage in model order. ``backward_weight_s``: the
    part of ``backward_s`` that is weight gradients; None: half. ``p2p_s``: one value,
    or one per hop between rank k and k + 1 (S - 1 of them; a last one closes the ring
    of the interleaved schedule, else its largest).
    """
    split = schedule is Schedule.ZERO_BUBBLE
    forward, backward = list(forward_s), list(backward_s)
    weight = [b / 2 for b in backward] if backward_weight_s is None else None
    weight = list(backward_weight_s or ()) if weight is None else weight
    if not forward or len({len(forward), len(backward), len(weight)}) != 1:
        raise SpecError(
            "stage times differ in length",
            f"{len(forward)} forward, {len(backward)} backward, {len(weight)} weight",
        )
    if per_chunk and len(forward) % virtual:
        raise SpecError(
            "chunk times do not divide over the chunks per rank",
            f"{len(forward)} times, {virtual} chunks",
        )
    ranks = len(forward) // virtual if per_chunk else len(forward)
    stages = range(ranks * virtual)

    def spread(values: list[float]) -> tuple[float, ...]:
        if per_chunk or virtual == 1:
            return tuple(values)
        return tuple(values[rank_of(schedule, s, ranks)] / virtual for s in stages)

    if not split:
        weight = [0.0] * len(weight)
    return StageTimes(
        spread(forward),
        spread([b - w for b, w in zip(backward, weight, strict=True)]),
        spread(weight),
        _hops(schedule, p2p_s, ranks, virtual),
        ranks,
        virtual,
    )


def _hops(
    schedule: Schedule, p2p_s: float | Sequence[float], ranks: int, virtual: int
) -> tuple[float, ...]:
    if isinstance(p2p_s, (int, float)):
        links = [float(p2p_s)] * ranks
    else:
        links = [float(x) for x in p2p_s]
        if len(links) not in (ranks - 1, ranks):
            raise SpecError("one p2p time per hop", f"{len(links)} for {ranks} ranks")
        if len(links) == ranks - 1:
            links.append(max(links, default=0.0))
    hops: list[float] = []
    for s in range(ranks * virtual - 1):
        a, b = rank_of(schedule, s, ranks), rank_of(schedule, s + 1, ranks)
        hops.append(0.0 if a == b else links[min(a, b) if abs(a - b) == 1 else -1])
    return tuple(hops)


def simulate(
    schedule: Schedule | str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float] = 0.0,
    micro_batches: int = 1,
    virtual: int = 1,
    *,
    backward_weight_s: Sequence[float] | None = None,
    per_chunk: bool = False,
) -> Timeline:
    """Run the schedule; arguments as in :func:`stage_times`. Times in seconds."""
    schedule = Schedule(schedule)
    times = stage_times(
        schedule, forward_s, backward_s, p2p_s, virtual, backward_weight_s, per_chunk
    )
    orders = [
        order(schedule, rank, times.ranks, micro_batches, virtual)
        for rank in range(times.ranks)
    ]
    events = _run(schedule, times, orders, micro_batches)
    total = max((line[-1].end_s for line in events), default=0.0)
    busy = tuple(sum(e.end_s - e.start_s for e in line) for line in events)
    return Timeline(
        events=tuple(event for line in events for event in line),
        total_s=total,
        busy_s=busy,
        bubble_s=total - sum(busy) / len(busy),
        in_flight_peak=tuple(peak_pieces(works) / virtual for works in orders),
    )


def _run(
    schedule: Schedule,
    times: StageTimes,
    orders: list[tuple[Work, ...]],
    micro_batches: int,
) -> list[list[Event]]:
    """Longest path through the fixed orders: each rank advances until it must wait."""
    ranks, last = times.ranks, times.ranks * times.virtual - 1
    duration = (times.forward_s, times.backward_s, times.weight_s)
    done: dict[tuple[int, int, int], float] = {}  # (kind, stage, micro) -> end
    events: list[list[Event]] = [[] for _ in range(ranks)]
    position, clock = [0] * ranks, [0.0] * ranks
    stages = [
        [stage_of(schedule, rank, chunk, ranks) for chunk in range(times.virtual)]
        for rank in range(ranks)
    ]
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            works, at, now = orders[rank], position[rank], clock[rank]
            while at < len(works):
                kind, micro, chunk = works[at]
                stage = stages[rank][chunk]
                ready = _ready(kind, stage, micro, last, done, times.hop_s)
                if ready is None:
                    break
                start = now if now > ready else ready
                now = start + duration[kind][stage]
                done[kind, stage, micro] = now
                events[rank].append(Event(rank, kind, micro, chunk, start, now))
                at += 1
            moved = moved or at != position[rank]
            position[rank], clock[rank] = at, now
    assert all(at == len(works) for at, works in zip(position, orders, strict=True)), (
        f"{schedule} deadlocks with {ranks} ranks and {micro_batches} micro-batches"
    )
    return events


def _ready(
    kind: Kind,
    stage: int,
    micro: int,
    last: int,
    done: dict[tuple[int, int, int], float],
    hop_s: tuple[float, ...],
) -> float | None:
    """When the inputs of a piece of work are there; None if not known yet."""
    if kind is Kind.F:
        if stage == 0:
            return 0.0
        end = done.get((Kind.F, stage - 1, micro))
        return None if end is None else end + hop_s[stage - 1]
    if kind is Kind.W:
        return done.get((Kind.B, stage, micro))
    if stage == last:
        return done.get((Kind.F, stage, micro))
    end = done.get((Kind.B, stage + 1, micro))
    if end is None or (Kind.F, stage, micro) not in done:
        return None
    return end + hop_s[stage]
