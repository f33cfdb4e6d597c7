"""Stage cuts equal brute force; the bounds never exceed the optimum."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.stages import (
    MODES,
    Run,
    StageProblem,
    bottleneck_bound,
    combine,
    ideal_seconds,
    solve_stages,
)

seconds = st.integers(1, 40).map(lambda n: n / 10)


@st.composite
def problems(draw: st.DrawFn) -> StageProblem:
    runs: list[Run] = []
    for kind in range(draw(st.integers(1, 3))):
        base = draw(seconds)
        kept = draw(st.integers(1, 9))
        runs.append(
            Run(
                kind,
                draw(st.integers(1, 3)),
                (base, base * 1.1, base * 1.4),
                (float(kept), kept * 0.6, kept * 0.1),
                float(draw(st.integers(0, 5))),
            )
        )
    ranks = draw(st.integers(1, 3))
    return StageProblem(
        tuple(runs),
        ranks,
        draw(st.integers(1, 6)),
        1,
        tuple(float(ranks - k) for k in range(ranks)),
        (0.5,) * ranks,
        float(draw(st.integers(3, 60))),
    )


def brute_force(p: StageProblem) -> float:
    """Every cut and, per rank, every mode of each block."""
    chain = [run for run in p.runs for _ in range(run.count)]
    best = float("inf")
    for cut in combinations(range(1, len(chain)), p.ranks - 1):
        edges = (0, *cut, len(chain))
        times: list[float] = []
        for k in range(p.ranks):
            held = chain[edges[k] : edges[k + 1]]
            fits: list[float] = []
            for modes in product(range(3), repeat=len(held)):
                if not _one_mode_outside_the_main_run(held, modes):
                    continue
                kept = sum(
                    r.activation_bytes[q] for r, q in zip(held, modes, strict=True)
                )
                used = sum(r.static_bytes for r in held) + p.in_flight[k] * kept
                if used + p.constant_bytes[k] <= p.limit_bytes + 1e-9:
                    fits.append(
                        sum(r.seconds[q] for r, q in zip(held, modes, strict=True))
                    )
            times.append(min(fits, default=float("inf")))
        if len(times) == p.ranks and max(times) < float("inf"):
            best = min(
                best, combine(p.micro_batches, p.virtual, max(times), sum(times))
            )
    return best


def _one_mode_outside_the_main_run(held: list[Run], modes: tuple[int, ...]) -> bool:
    """The stated restriction: only the run with most blocks mixes modes."""
    counts = {r.kind: sum(h.kind == r.kind for h in held) for r in held}
    main = max(counts, key=lambda kind: (counts[kind], -kind))
    others = {q for r, q in zip(held, modes, strict=True) if r.kind != main}
    return len(others) <= 1


@settings(max_examples=150, deadline=None)
@given(problems())
def test_cuts_equal_brute_force(problem: StageProblem) -> None:
    found = solve_stages(problem)
    if problem.blocks < problem.ranks:
        assert found.status == "infeasible"
        return
    best = brute_force(problem)
    if best == float("inf"):
        assert found.status == "infeasible"
        assert bottleneck_bound(problem) <= float("inf")
        return
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best, rel=1e-5)
    assert ideal_seconds(problem) <= best * (1 + 1e-9)
    assert bottleneck_bound(problem) <= best * (1 + 1e-9)
    assert found.bound_s <= best * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_solution_holds_every_block_once_and_fits(problem: StageProblem) -> None:
    found = solve_stages(problem)
    if not found.counts:
        return
    for run_index, run in enumerate(problem.runs):
        assert sum(sum(rank[run_index]) for rank in found.counts) == run.count
    for k, rank in enumerate(found.counts):
        used = problem.constant_bytes[k]
        for run, row in zip(problem.runs, rank, strict=True):
            used += sum(row) * run.static_bytes
            used += problem.in_flight[k] * sum(
                n * a for n, a in zip(row, run.activation_bytes, strict=True)
            )
        assert used <= problem.limit_bytes + 1e-6


def test_recompute_only_as_much_as_memory_asks_for() -> None:
    """Ten blocks of 10 bytes in 64 bytes: recomputing one saves 9, four are enough."""
    run = Run(0, 10, (1.0, 1.0, 1.3), (10.0, 10.0, 1.0), 0.0)
    problem = StageProblem((run,), 1, 1, 1, (1.0,), (0.0,), 64.0, ("none", "full"))
    found = solve_stages(problem)
    assert found.counts[0][0] == (6, 0, 4)
    assert found.objective_s == pytest.approx(6 + 4 * 1.3)


def test_pinned_counts_and_an_impossible_limit() -> None:
    run = Run(0, 8, (1.0, 1.0, 1.3), (1.0, 1.0, 0.5), 1.0)
    fixed = StageProblem(
        (run,), 2, 4, 1, (2.0, 1.0), (0.0, 0.0), 100.0, MODES, fixed_counts=(5, 3)
    )
    found = solve_stages(fixed)
    assert [sum(sum(r) for r in rank) for rank in found.counts] == [5, 3]
    tight = StageProblem((run,), 2, 4, 1, (2.0, 1.0), (0.0, 0.0), 3.0)
    assert solve_stages(tight).status == "infeasible"
    assert bottleneck_bound(tight) == float("inf")
