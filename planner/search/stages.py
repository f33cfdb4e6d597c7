"""Place pipeline cuts and recompute: CP-SAT over ranges of blocks.

The model's blocks form a chain of *runs* (equal consecutive blocks). A pipeline rank k
that holds blocks [i, j) takes

    T_k(i, j) = min over mode counts y of  sum y_rq t_rq
                s.t.  sum n_r s_r + w_k sum y_rq a_rq + c_k <= limit

(``s`` static bytes, ``a`` activation bytes of one micro-batch, ``w_k`` the rank's
in-flight factor, ``t`` seconds of forward and backward, recompute included), found by
enumeration: the run with most blocks in the range mixes modes, the others share one.
CP-SAT then picks one range per rank so that ranges are consecutive and

    (m - 1/v) max_k T_k + (1/v) sum_k T_k

is least: the 1F1B step, whose bubble v virtual chunks divide. A chain of one long run
with at most one block before and after it (every plain transformer) needs only counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, floor

from ortools.sat.python import cp_model

MODES = ("none", "selective", "full")
Counts = tuple[tuple[int, int, int], ...]  # per run: blocks in each mode


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal blocks. Per block: seconds and activation bytes by mode."""

    kind: int
    count: int
    seconds: tuple[float, float, float]
    activation_bytes: tuple[float, float, float]
    static_bytes: float


@dataclass(frozen=True, slots=True)
class StageProblem:
    """A chain of runs over ``ranks`` pipeline ranks (times s, sizes bytes)."""

    runs: tuple[Run, ...]
    ranks: int
    micro_batches: int
    virtual: int
    in_flight: tuple[float, ...]
    constant_bytes: tuple[float, ...]
    limit_bytes: float
    modes: tuple[str, ...] = MODES
    fixed_counts: tuple[int, ...] | None = None  # blocks per rank, pinned

    @property
    def blocks(self) -> int:
        return sum(r.count for r in self.runs)


@dataclass(frozen=True, slots=True)
class StageSolution:
    """``counts[k][r]``: blocks of run r on rank k in each mode. Objective and bound
    are seconds of the pipeline alone (no data-parallel or optimizer terms)."""

    counts: tuple[Counts, ...]
    objective_s: float
    bound_s: float
    status: str  # optimal | feasible | infeasible | unknown


INFEASIBLE = StageSolution((), float("inf"), float("inf"), "infeasible")


def combine(micro_batches: int, virtual: int, longest: float, total: float) -> float:
    """The pipeline time of rank times with this maximum and this sum (seconds)."""
    return (micro_batches - 1 / virtual) * longest + total / virtual


def ideal_seconds(problem: StageProblem) -> float:
    """A bound without memory: the fastest allowed mode, split perfectly."""
    allowed = _allowed(problem)
    best = [min(r.seconds[q] for q in allowed) for r in problem.runs]
    total = sum(t * r.count for t, r in zip(best, problem.runs, strict=True))
    return combine(
        problem.micro_batches,
        problem.virtual,
        max(max(best), total / problem.ranks),
        total,
    )


def _allowed(problem: StageProblem) -> tuple[int, ...]:
    return tuple(q for q, mode in enumerate(MODES) if mode in problem.modes)


@dataclass(slots=True)
class _Table:
    """T_k(i, j), by the counts of each run in the range; memoised."""

    problem: StageProblem
    _found: dict[tuple[float, float, tuple[int, ...]], tuple[float, Counts] | None] = (
        field(
            default_factory=dict[
                tuple[float, float, tuple[int, ...]], tuple[float, Counts] | None
            ]
        )
    )

    def __call__(self, rank: int, held: tuple[int, ...]) -> tuple[float, Counts] | None:
        """Least seconds and the mode counts; None if the range does not fit."""
        p = self.problem
        key = (p.in_flight[rank], p.constant_bytes[rank], held)
        if key not in self._found:
            self._found[key] = self._solve(rank, held)
        return self._found[key]

    def _solve(self, rank: int, held: tuple[int, ...]) -> tuple[float, Counts] | None:
        p = self.problem
        weight = p.in_flight[rank]
        room = p.limit_bytes - p.constant_bytes[rank]
        room -= sum(n * r.static_bytes for n, r in zip(held, p.runs, strict=True))
        if room < 0:
            return None
        allowed = _allowed(p)
        main = max(range(len(held)), key=lambda i: (held[i], -i))
        best: tuple[float, Counts] | None = None
        for other in allowed:
            seconds = left = 0.0
            for i, (n, run) in enumerate(zip(held, p.runs, strict=True)):
                if i != main:
                    seconds += n * run.seconds[other]
                    left += n * run.activation_bytes[other]
            for y in _mixtures(p.runs[main], held[main], allowed, weight, room, left):
                time = seconds + sum(
                    c * t for c, t in zip(y, p.runs[main].seconds, strict=True)
                )
                if best is None or time < best[0] - 1e-15:
                    counts = tuple(
                        y if i == main else _all_in(n, other)
                        for i, n in enumerate(held)
                    )
                    best = (time, counts)
        return best


def _all_in(n: int, mode: int) -> tuple[int, int, int]:
    return (n if mode == 0 else 0, n if mode == 1 else 0, n if mode == 2 else 0)


def _mixtures(
    run: Run,
    count: int,
    allowed: tuple[int, ...],
    weight: float,
    room: float,
    left: float,
) -> Iterator[tuple[int, int, int]]:
    """Mode counts of ``count`` blocks that fit, the useful ones of each family."""
    kept = run.activation_bytes

    def fits(y: tuple[int, int, int]) -> bool:
        used = left + sum(c * a for c, a in zip(y, kept, strict=True))
        return weight * used <= room * (1 + 1e-12)

    if len(allowed) == 1:
        y = _all_in(count, allowed[0])
        if fits(y):
            yield y
        return
    thrifty = min(allowed, key=lambda q: (kept[q], run.seconds[q]))
    faster = [q for q in allowed if q != thrifty]
    first, second = faster[0], faster[-1]
    budget = room / weight - left - count * kept[thrifty] if weight else float("inf")
    if budget < -1e-9 * max(1.0, room):
        return
    step_second = kept[second] - kept[thrifty]
    step_first = kept[first] - kept[thrifty]
    for n_first in range(count + 1):
        spare = budget - n_first * step_first
        if spare < -1e-9 * max(1.0, room):
            break
        rest = count - n_first
        n_second = 0
        if second != first:
            n_second = (
                rest
                if step_second <= 0
                else min(rest, floor(spare / step_second + 1e-9))
            )
        y = [0, 0, 0]
        y[first] += n_first
        y[second] += n_second
        y[thrifty] += rest - n_second
        found = (y[0], y[1], y[2])
        if fits(found):
            yield found


def solve_stages(
    problem: StageProblem, deterministic_limit: float = 4.0
) -> StageSolution:
    """Optimal cuts and recompute counts. Reproducible: one worker, no wall clock."""
    if problem.blocks < problem.ranks * problem.virtual:
        return INFEASIBLE
    table = _Table(problem)
    if problem.ranks == 1:
        found = table(0, tuple(r.count for r in problem.runs))
        if found is None:
            return INFEASIBLE
        time = combine(problem.micro_batches, problem.virtual, found[0], found[0])
        return StageSolution((found[1],), time, time, "optimal")
    return _solve_ranges(problem, table, deterministic_limit)


def _ends(problem: StageProblem) -> tuple[int, int, int] | None:
    """(blocks before, main run, blocks after) of a chain with one long run."""
    counts = [r.count for r in problem.runs]
    main = max(range(len(counts)), key=lambda i: counts[i])
    before, after = sum(counts[:main]), sum(counts[main + 1 :])
    return (before, main, after) if before <= 1 and after <= 1 else None


def _held(problem: StageProblem, start: int, stop: int) -> tuple[int, ...]:
    held: list[int] = []
    position = 0
    for run in problem.runs:
        low, high = max(start, position), min(stop, position + run.count)
        held.append(max(0, high - low))
        position += run.count
    return tuple(held)


@dataclass(frozen=True, slots=True)
class _Range:
    rank: int
    start: int
    stop: int
    seconds: float
    counts: Counts


def _solve_ranges(problem: StageProblem, table: _Table, limit: float) -> StageSolution:
    ranges = _useful_ranges(problem, table)
    if ranges is None:
        return INFEASIBLE
    by_counts = _ends(problem) is not None
    model = cp_model.CpModel()
    pick = [model.new_bool_var(f"r{r.rank}_{r.start}_{r.stop}") for r in ranges]
    scale = 1e7 / max(1e-30, sum(max(r.seconds) * r.count for r in problem.runs))
    of_rank: list[list[int]] = [[] for _ in range(problem.ranks)]
    for index, r in enumerate(ranges):
        of_rank[r.rank].append(index)
    longest = model.new_int_var(0, 1 << 40, "longest")
    times = [ceil(r.seconds * scale) for r in ranges]
    for members in of_rank:
        if not members:
            return INFEASIBLE
        model.add_exactly_one(pick[i] for i in members)
        model.add(longest >= sum(pick[i] * times[i] for i in members))
    if by_counts:
        model.add(
            sum(p * (r.stop - r.start) for p, r in zip(pick, ranges, strict=True))
            == problem.blocks
        )
    else:
        _consecutive(model, problem, ranges, pick, of_rank)
    total = sum(p * t for p, t in zip(pick, times, strict=True))
    m, v = problem.micro_batches, problem.virtual
    model.minimize((m * v - 1) * longest + total)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is the search's
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 7
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return INFEASIBLE
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return StageSolution((), float("inf"), ideal_seconds(problem), "unknown")
    chosen = [r for r, p in zip(ranges, pick, strict=True) if solver.value(p)]
    seconds = [r.seconds for r in chosen]
    objective = combine(
        problem.micro_batches, problem.virtual, max(seconds), sum(seconds)
    )
    # times were rounded up to integers: take that back from the proved bound
    rounding = (m * v - 1 + problem.ranks) / scale / v
    bound = solver.best_objective_bound / scale / v - rounding
    bound = min(objective, max(bound, ideal_seconds(problem)))
    proved = status == cp_model.OPTIMAL
    return StageSolution(
        tuple(r.counts for r in chosen),
        objective,
        bound,
        "optimal" if proved else "feasible",
    )


def _consecutive(
    model: cp_model.CpModel,
    problem: StageProblem,
    ranges: list[_Range],
    pick: list[cp_model.IntVar],
    of_rank: list[list[int]],
) -> None:
    """The range of rank k+1 starts where the range of rank k stops."""
    for k in range(problem.ranks - 1):
        points = {ranges[i].stop for i in of_rank[k]}
        points |= {ranges[i].start for i in of_rank[k + 1]}
        for point in sorted(points):
            model.add(
                sum(pick[i] for i in of_rank[k] if ranges[i].stop == point)
                == sum(pick[i] for i in of_rank[k + 1] if ranges[i].start == point)
            )


def _useful_ranges(problem: StageProblem, table: _Table) -> list[_Range] | None:
    """Ranges that can be part of a solution no worse than a greedy one."""
    ceiling = _reachable(problem, table)
    if ceiling is None:
        return None
    result: list[_Range] = []
    for k in range(problem.ranks):
        for start in _starts(problem, k):
            for size in _sizes(problem, k, start):
                begin = problem.blocks - size if start < 0 else start
                found = table(k, _held(problem, begin, begin + size))
                if found is None or found[0] > ceiling * (1 + 1e-9):
                    break
                result.append(_Range(k, begin, begin + size, found[0], found[1]))
    return result


def _starts(problem: StageProblem, k: int) -> Iterator[int]:
    """Where the range of rank k may start; -1: anywhere, it ends with the chain."""
    n, ranks, least = problem.blocks, problem.ranks, problem.virtual
    ends = _ends(problem)
    if k == 0:
        yield 0
    elif ends is not None:
        yield -1 if k == ranks - 1 else ends[0]  # only the count matters
    else:
        yield from range(k * least, n - (ranks - k) * least + 1)


def _sizes(problem: StageProblem, k: int, start: int) -> Iterator[int]:
    """How many blocks the range may hold, in increasing order."""
    n, ranks, least = problem.blocks, problem.ranks, problem.virtual
    if problem.fixed_counts is not None:
        yield problem.fixed_counts[k]
    elif k == ranks - 1 and start >= 0:
        yield n - start
    else:
        first = 0 if start < 0 else start
        after = 0 if start < 0 else (ranks - 1 - k) * least
        yield from range(least, n - first - after + 1)


def bottleneck_bound(problem: StageProblem) -> float:
    """A bound that knows memory: the least max_k T_k of any layout, found by filling
    ranks greedily (exact for the maximum), and the least sum. inf: nothing fits."""
    if problem.blocks < problem.ranks * problem.virtual:
        return float("inf")
    found = _bottleneck(problem, _Table(problem))
    if found is None:
        return float("inf")
    allowed = _allowed(problem)
    total = sum(min(r.seconds[q] for q in allowed) * r.count for r in problem.runs)
    return max(
        ideal_seconds(problem),
        combine(problem.micro_batches, problem.virtual, found[0], total),
    )


def _bottleneck(problem: StageProblem, table: _Table) -> tuple[float, float] | None:
    """(what max_k T_k can not go below, what it can reach); None: nothing fits."""
    per_block = [min(r.seconds[q] for q in _allowed(problem)) for r in problem.runs]
    total = sum(t * r.count for t, r in zip(per_block, problem.runs, strict=True))
    high = sum(max(r.seconds) * r.count for r in problem.runs)
    if problem.fixed_counts is not None:
        return total / problem.ranks, high
    if not _covers(problem, table, high):
        return None
    low = max(max(per_block), total / problem.ranks) * (1 - 1e-9)
    if _covers(problem, table, low * (1 + 2e-9)):
        return low, low * (1 + 2e-9)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if _covers(problem, table, middle):
            high = middle
        else:
            low = middle
    return low, high


def _reachable(problem: StageProblem, table: _Table) -> float | None:
    """A maximum of T_k above which no optimal layout lies: greedy's, and what a smaller
    sum could be worth."""
    found = _bottleneck(problem, table)
    if found is None:
        return None
    if problem.fixed_counts is not None:
        return found[1]
    allowed = _allowed(problem)
    least = sum(min(r.seconds[q] for q in allowed) * r.count for r in problem.runs)
    most = sum(max(r.seconds) * r.count for r in problem.runs)
    best = combine(
        problem.micro_batches,
        problem.virtual,
        found[1],
        min(problem.ranks * found[1], most),
    )
    v = problem.virtual
    weight = problem.micro_batches - 1 / v
    if weight <= 0:
        return float("inf")
    return max(found[1], (best - least / v) / weight)


def _covers(problem: StageProblem, table: _Table, longest: float) -> bool:
    """Whether filling each rank as far as ``longest`` allows covers every block."""
    n, position = problem.blocks, 0
    for k in range(problem.ranks):
        stop = position
        reserve = problem.virtual * (problem.ranks - 1 - k)
        while stop < n - reserve:
            found = table(k, _held(problem, position, stop + 1))
            if found is None or found[0] > longest * (1 + 1e-12):
                break
            stop += 1
        if stop - position < problem.virtual:
            return False
        position = stop
    return position == n
