"""Pipeline schedules: the order of work on every rank, what is legal, what is live.

A *rank* holds ``virtual`` model chunks. Virtual stage ``s`` is chunk ``s // S`` of rank
``s % S`` (Narayanan et al. 2021); the zero-bubble schedule with two chunks folds back
(the V shape of Qi et al. 2024): the second chunk of rank ``r`` is stage ``2S - 1 - r``.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from cost_models._compat import StrEnum
from cost_models.errors import SpecError


class Schedule(StrEnum):
    GPIPE = "gpipe"  # all forwards, then all backwards
    ONE_F_ONE_B = "1f1b"  # one forward, one backward
    INTERLEAVED = "interleaved"  # 1F1B over several chunks per rank
    ZERO_BUBBLE = "zero_bubble"  # backward split in input (B) and weight (W) parts


class Backend(StrEnum):
    TORCH = "torch"  # torch.distributed.pipelining
    MEGATRON = "megatron"


class Kind(IntEnum):
    """What a piece of work does. ``B`` is the whole backward unless ``W`` is split."""

    F = 0
    B = 1
    W = 2


class Work(NamedTuple):
    """One piece of work of one rank: ``kind`` of ``micro`` on the rank's ``chunk``."""

    kind: Kind
    micro: int
    chunk: int


def rank_of(schedule: Schedule, stage: int, ranks: int) -> int:
    """The rank that holds virtual stage ``stage``."""
    if schedule is Schedule.ZERO_BUBBLE and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def stage_of(schedule: Schedule, rank: int, chunk: int, ranks: int) -> int:
    """The virtual stage of ``chunk`` on ``rank``."""
    if schedule is Schedule.ZERO_BUBBLE and chunk == 1:
        return 2 * ranks - 1 - rank
    return chunk * ranks + rank


def round_size(ranks: int, micro_batches: int) -> int:
    """Micro-batches that the interleaved schedule runs per chunk before it switches.

    torch: ``rounds = max(1, m // S)``, ``m // rounds`` each; equal to S where S divides
    m, which is Megatron's only case.
    """
    return micro_batches // max(1, micro_batches // ranks)


def legal(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    backend: Backend = Backend.TORCH,
) -> str | None:
    """None if ``backend`` runs the schedule with this many micro-batches, else why not.

    Rules: interleaved needs, in torch, ``m % max(1, m // S) == 0`` and, in Megatron,
    ``m % S == 0``; torch's 1F1B needs ``m >= S``; the V-shaped zero-bubble schedule
    needs exactly two chunks per rank. Megatron has no zero-bubble schedule.
    """
    m, s = micro_batches, ranks
    if m < 1 or s < 1 or virtual < 1:
        return f"{m} micro-batches on {s} ranks with {virtual} chunks: all must be >= 1"
    if s == 1:
        return None
    if schedule is Schedule.INTERLEAVED:
        return _legal_interleaved(s, m, virtual, backend)
    if schedule is Schedule.ZERO_BUBBLE:
        if backend is Backend.MEGATRON:
            return "Megatron has no zero-bubble schedule"
        if virtual > 2:
            return f"zero-bubble runs 1 or 2 chunks per rank, not {virtual}"
        return None
    if virtual != 1:
        return f"{schedule} runs one chunk per rank, not {virtual}"
    if schedule is Schedule.ONE_F_ONE_B and backend is Backend.TORCH and m < s:
        return f"1f1b in torch needs at least {s} micro-batches for {s} stages, not {m}"
    return None


def _legal_interleaved(s: int, m: int, virtual: int, backend: Backend) -> str | None:
    if virtual < 2:
        return "interleaved needs at least 2 chunks per rank"
    if backend is Backend.MEGATRON and m % s:
        return f"interleaved in Megatron needs a multiple of {s} micro-batches, not {m}"
    rounds = max(1, m // s)
    if m % rounds:
        return (
            f"interleaved in torch needs micro-batches divisible by its {rounds} "
            f"rounds (m // {s}), not {m}"
        )
    return None


def check_legal(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    virtual: int = 1,
    backend: Backend = Backend.TORCH,
) -> None:
    """Raises SpecError where :func:`legal` says why not."""
    why = legal(schedule, ranks, micro_batches, virtual, backend)
    if why is not None:
        raise SpecError(f"illegal {schedule} schedule", why, "change micro-batches")


def warmup(schedule: Schedule, rank: int, ranks: int, m: int, virtual: int = 1) -> int:
    """Forward pieces (of one chunk each) that ``rank`` runs before its first backward.

    1F1B: S - k - 1 before the steady state. Interleaved: 2 (S - k - 1) + (v - 1) S.
    """
    if schedule is Schedule.GPIPE:
        return m * virtual
    if schedule is Schedule.INTERLEAVED:
        pieces = 2 * (ranks - rank - 1) + (virtual - 1) * round_size(ranks, m)
        return min(pieces, m * virtual)
    return min(ranks - rank - 1, m)


def in_flight(
    schedule: Schedule | str,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual: int = 1,
) -> float:
    """Micro-batches' worth of a rank's activations that are live at its peak.

    1F1B: min(S - k, m). GPipe: m. Interleaved: min(warm-up + 1, m v) / v, in units of
    the rank's activations for one micro-batch (all chunks). Zero-bubble: activations
    live until their W; one chunk: min(S, m) at every rank, two: counted on the order.
    """
    schedule, m = Schedule(schedule), micro_batches
    if not 0 <= stage < stages:
        raise SpecError("no such pipeline stage", f"{stage} of {stages}")
    if schedule is Schedule.GPIPE:
        return float(m)
    if schedule is Schedule.INTERLEAVED:
        pieces = warmup(schedule, stage, stages, m, virtual) + 1
        return min(pieces, m * virtual) / virtual
    if schedule is Schedule.ZERO_BUBBLE:
        return peak_pieces(order(schedule, stage, stages, m, virtual)) / virtual
    return float(min(stages - stage, m))


def peak_pieces(works: tuple[Work, ...]) -> int:
    """Most (micro-batch, chunk) pieces between their F and their last backward part."""
    split = any(w.kind is Kind.W for w in works)
    last = Kind.W if split else Kind.B
    live = peak = 0
    for work in works:
        if work.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        elif work.kind is last:
            live -= 1
    return peak


@lru_cache(maxsize=4096)
def order(
    schedule: Schedule, rank: int, ranks: int, micro_batches: int, virtual: int = 1
) -> tuple[Work, ...]:
    """What ``rank`` runs, in order."""
    m = micro_batches
    if schedule is Schedule.GPIPE:
        return tuple(Work(Kind.F, i, 0) for i in range(m)) + tuple(
            Work(Kind.B, i, 0) for i in range(m)
        )
    if schedule is Schedule.ZERO_BUBBLE:
        if virtual == 2:
            return _fold_order(rank, ranks, m)
        return _zero_bubble_order(rank, ranks, m)
    return tuple(_one_f_one_b(schedule, rank, ranks, m, virtual))


def _one_f_one_b(
    schedule: Schedule, rank: int, ranks: int, m: int, virtual: int
) -> Iterator[Work]:
    """Warm-up forwards, then pairs, then the backwards that are left."""
    total, size = m * virtual, round_size(ranks, m)
    ahead = warmup(schedule, rank, ranks, m, virtual)

    def piece(kind: Kind, index: int) -> Work:
        group, inside = divmod(index, size * virtual)
        chunk, micro = divmod(inside, size)
        if kind is Kind.B:
            chunk = virtual - 1 - chunk
        return Work(kind, group * size + micro, chunk)

    for i in range(ahead):
        yield piece(Kind.F, i)
    for i in range(total - ahead):
        yield piece(Kind.F, ahead + i)
        yield piece(Kind.B, i)
    for i in range(total - ahead, total):
        yield piece(Kind.B, i)


def _zero_bubble_order(rank: int, ranks: int, m: int) -> tuple[Work, ...]:
    """ZB-H1 (Qi et al. 2023): 1F1B whose rank k runs each W k micro-batches late.

    Every rank then holds at most S micro-batches and the late W's fill the drain.
    """
    works = [Work(Kind.F, i, 0) for i in range(min(ranks - rank, m))]
    ahead, done = len(works), 0
    for i in range(m):
        works.append(Work(Kind.B, i, 0))
        if i >= rank:
            works.append(Work(Kind.W, done, 0))
            done += 1
        if i + ahead < m:
            works.append(Work(Kind.F, i + ahead, 0))
    works += [Work(Kind.W, i, 0) for i in range(done, m)]
    return tuple(works)


class _Fold:
    """Builds one rank's order of the V schedule; counts F, B and W per chunk."""

    def __init__(self, micro_batches: int) -> None:
        self.m = micro_batches
        self.works: list[Work] = []
        self.next = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}

    def run(self, kind: Kind, chunk: int) -> None:
        """The next ``kind`` of ``chunk``; nothing once all m are done."""
        micro = self.next[kind, chunk]
        if micro < self.m:
            self.works.append(Work(kind, micro, chunk))
            self.next[kind, chunk] += 1


def _fold_order(rank: int, ranks: int, m: int) -> tuple[Work, ...]:
    """The V schedule (Qi et al. 2024): two chunks, so that no rank waits at the end."""
    fold, back = _Fold(m), ranks - rank
    for _ in range(2 * back - 1):
        fold.run(Kind.F, 0)
    for _ in range(rank):
        fold.run(Kind.F, 1)
        fold.run(Kind.F, 0)
    for _ in range(back):
        fold.run(Kind.F, 1)
        fold.run(Kind.B, 1)
        fold.run(Kind.W, 1)
    while fold.next[Kind.F, 0] < m or fold.next[Kind.F, 1] < m:
        fold.run(Kind.F, 0)
        fold.run(Kind.B, 0)
        fold.run(Kind.W, 0)
        fold.run(Kind.F, 1)
        fold.run(Kind.B, 1)
        fold.run(Kind.W, 1)
    for _ in range(rank):
        fold.run(Kind.B, 0)
        fold.run(Kind.B, 1)
    for _ in range(m):
        fold.run(Kind.B, 0)
        fold.run(Kind.W, 0)
    for _ in range(m):
        fold.run(Kind.B, 1)
        fold.run(Kind.W, 1)
    return tuple(fold.works)
