"""Chooses one strategy per node: exact where time allows, with a bound always.

Order of work: exact reductions (:mod:`.intra.reductions`); elimination, which alone
proves problems of low width whose limit does not bind; then CP-SAT with rows added
lazily. :func:`solve` is the whole interface.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from planner.search.intra.core import Core, core_of
from planner.search.intra.cp_sat import CpModel
from planner.search.intra.elimination import decode, eliminate, make_plan
from planner.search.intra.evaluate import Evaluation, evaluate
from planner.search.intra.problem import IntArray, Problem, Solution
from planner.search.intra.reductions import reduce
from planner.search.intra.usage import Infeasible

__all__ = ["Evaluation", "Problem", "Solution", "evaluate", "solve"]

_TABLE_LIMIT = 2e6  # entries of one elimination table


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    *,
    deterministic: bool = True,
    workers: int = 2,
    seed: int = 0,
) -> Solution:
    """Solves ``problem`` within ``time_limit_s``.

    With ``deterministic`` the limit counts CP-SAT's deterministic seconds and fixed
    iteration counts, so that equal inputs give equal outputs on any machine; without
    it, wall-clock seconds.
    """
    start = time.perf_counter()
    try:
        graph = reduce(problem)
        core, live = core_of(graph)
        stats: dict[str, Any] = {"nodes": core.count, "rows": core.capacity.size}
        choice, bound = _minimise(core, time_limit_s, deterministic, workers, seed)
    except Infeasible:
        return Solution(None, np.inf, np.inf, "infeasible", 0.0)
    stats["wall_s"] = time.perf_counter() - start
    bound += graph.constant
    if choice is None:
        return Solution(None, np.inf, bound, "unknown", np.inf, stats)
    full = graph.lift(dict(zip(live.tolist(), choice.tolist(), strict=True)))
    found = evaluate(problem, full)
    assert found.valid
    bound = min(bound, found.cost)
    gap = (found.cost - bound) / max(abs(found.cost), 1e-300)
    optimal = gap <= 1e-9
    return Solution(
        full,
        found.cost,
        bound,
        "optimal" if optimal else "feasible",
        0.0 if optimal else gap,
        stats,
    )


def _minimise(
    core: Core, time_limit_s: float, deterministic: bool, workers: int, seed: int
) -> tuple[IntArray | None, float]:
    plan = make_plan(core, _TABLE_LIMIT)
    if not plan.held:
        tables = eliminate(core, plan, core.cost)
        if tables.value == np.inf:
            raise Infeasible
        choice = np.zeros(core.count, dtype=np.int64)
        decode(plan, tables, choice)
        if core.fits(choice):
            return choice, tables.value
    model = CpModel(core)
    hint: IntArray | None = None
    bound = -np.inf
    left = time_limit_s
    while left > 0:
        answer = model.solve(
            left,
            hint=hint,
            deterministic=deterministic,
            workers=workers,
            seed=seed,
        )
        left -= answer.time_s
        if answer.closed and answer.choice is None:
            raise Infeasible
        bound = max(bound, answer.bound)
        hint = answer.choice
        if hint is None or not model.add_violated(hint):
            return hint, bound
    return None, bound
