"""The solver equals brute force on random small problems."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.intra_op import Problem, evaluate, solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 7 nodes of up to 4 strategies; infinite costs, limits, parallel edges."""
    n = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = rng.integers(1, 5, n)
    forbid = draw(st.sampled_from([0.0, 0.1, 0.4, 0.7]))
    whole = draw(st.booleans())

    def values(*shape: int) -> np.ndarray:
        out = rng.integers(0, 20, shape).astype(float)
        if not whole:
            out = out + rng.random(shape)
        out[rng.random(shape) < 0.2] = 0.0
        out[rng.random(shape) < forbid] = np.inf
        return out

    costs = [values(s) for s in sizes]
    costs = [np.where(rng.random(c.shape) < 0.5, np.minimum(c, 30.0), c) for c in costs]
    usages = [rng.integers(0, 10, s).astype(float) for s in sizes]
    begin = rng.integers(0, 6, n)
    intervals = np.stack([begin, begin + rng.integers(0, 5, n)], axis=1)
    edges = []
    for _ in range(int(rng.integers(0, 2 * n + 1)) if n > 1 else 0):
        i, j = rng.choice(n, 2, replace=False)
        shape = (int(sizes[i]), int(sizes[j]))
        if rng.random() < 0.3:
            matrix = np.full(shape, np.inf)
            matrix[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = 0.0
        else:
            matrix = values(*shape)
        edges.append((int(i), int(j), matrix))
    limit = draw(st.sampled_from([None, 5.0, 10.0, 15.0, 25.0, 1000.0]))
    return Problem.make(costs, usages, intervals, edges, limit)


def brute_force(problem: Problem) -> float:
    best = np.inf
    for choice in itertools.product(*(range(c.size) for c in problem.costs)):
        found = evaluate(problem, np.array(choice))
        if found.valid:
            best = min(best, found.cost)
    return best


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    solution = solve(problem, time_limit_s=20.0)
    if best == np.inf:
        assert solution.status == "infeasible"
        assert solution.choice is None
        return
    assert solution.status == "optimal"
    assert np.isclose(solution.cost, best, rtol=1e-9, atol=1e-9)
    assert solution.lower_bound <= best * (1 + 1e-9) + 1e-9
    assert solution.choice is not None
    found = evaluate(problem, solution.choice)
    assert found.valid
    assert found.cost == solution.cost
