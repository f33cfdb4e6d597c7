"""Chooses one strategy per node: exact where time allows, with a bound always.

Order of work: exact reductions (:mod:`.intra.reductions`); for cores of low width
elimination, alone where the limit does not bind, else with prices and enumeration
(:mod:`.intra.exact`); prices and large moves for a first choice
(:mod:`.intra.descent`); CP-SAT with rows added lazily where the core is small enough
to prove (:mod:`.intra.cp_sat`); and what time is left goes to more moves.
:func:`solve` is the whole interface.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from planner.search.intra.clock import Clock
from planner.search.intra.core import Core, components, core_of, narrow, restrict
from planner.search.intra.descent import Descent
from planner.search.intra.elimination import Plan, decode, eliminate, make_plan
from planner.search.intra.evaluate import Evaluation, evaluate
from planner.search.intra.exact import Progress, enumerate_below, lagrange
from planner.search.intra.problem import IntArray, Problem, Solution, ints
from planner.search.intra.reductions import Graph, reduce
from planner.search.intra.usage import Infeasible

__all__ = ["Evaluation", "Problem", "Solution", "evaluate", "solve"]

_TABLE_LIMIT = 1e6  # entries of one table where a core is eliminated exactly
_TABLES_LIMIT = 2e7  # entries of all of them
_MARGINALS_LIMIT = 150_000  # edge entries up to which CP-SAT is worth its time
_FEW_NODES = 60  # CP-SAT needs no help below
_PROOF_TURNS = 100  # of learning before CP-SAT
_FEW_ROWS = 60  # rows that CP-SAT may have from the start
_TOLERANCE = 1e-9  # relative gap that counts as proved


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    *,
    deterministic: bool = True,
    workers: int = 2,
    seed: int = 0,
) -> Solution:
    """Solves ``problem`` within ``time_limit_s``.

    With ``deterministic`` the limit counts estimated work and CP-SAT's deterministic
    seconds, so equal inputs give equal outputs on any machine; without it, wall-clock
    seconds. ``workers`` are CP-SAT's threads.
    """
    start = time.perf_counter()
    clock = Clock(time_limit_s, deterministic)
    try:
        graph = reduce(problem)
        core, live = core_of(graph)
        search = _Search(clock, workers, seed)
        choice, bound = search.run(core)
    except Infeasible:
        return Solution(None, np.inf, np.inf, "infeasible", 0.0)
    stats: dict[str, Any] = {
        "nodes": core.count,
        "edges": len(core.edges),
        "rows": int(core.capacity.size),
        "stages": tuple(search.stages),
        "wall_s": time.perf_counter() - start,
    }
    return _conclude(problem, graph, live, choice, bound, stats)


def _conclude(
    problem: Problem,
    graph: Graph,
    live: IntArray,
    choice: IntArray | None,
    bound: float,
    stats: dict[str, Any],
) -> Solution:
    bound += graph.constant
    if choice is None:
        return Solution(None, np.inf, bound, "unknown", np.inf, stats)
    full = graph.lift(dict(zip(live.tolist(), choice.tolist(), strict=True)))
    found = evaluate(problem, full)
    assert found.valid
    gap = max(found.cost - bound, 0.0) / max(abs(found.cost), 1e-300)
    bound = min(bound, found.cost)
    if gap <= _TOLERANCE:
        return Solution(full, found.cost, bound, "optimal", 0.0, stats)
    return Solution(full, found.cost, bound, "feasible", gap, stats)


class _Search:
    """The stages after the reductions, on one core at a time."""

    def __init__(self, clock: Clock, workers: int, seed: int) -> None:
        self.clock, self.workers, self.seed = clock, workers, seed
        self.stages: list[str] = []

    def run(self, core: Core) -> tuple[IntArray | None, float]:
        """A choice (None where none was found) and a bound."""
        if core.capacity.size or core.count == 0:
            return self.connected(core)
        whole = np.zeros(core.count, dtype=np.int64)
        bound = 0.0
        for nodes in components(core):
            domains = [np.arange(core.cost[v].size) for v in ints(nodes)]
            choice, level = self.connected(restrict(core, whole, nodes, domains))
            if choice is None:
                return None, -np.inf
            whole[nodes] = choice
            bound += level
        return whole, bound

    def connected(self, core: Core) -> tuple[IntArray | None, float]:
        state = Progress(None, np.inf, -np.inf, np.zeros(core.capacity.size))
        plan = make_plan(core, _TABLE_LIMIT)
        if not plan.held and _entries(core, plan) <= _TABLES_LIMIT:
            state = self.low_width(core, plan)
            if state.closed:
                return state.choice, state.bound
        descent = Descent(core, self.clock, self.seed)
        descent.resume(state)
        small = self.small(core)
        if not small or descent.best is None or core.count > _FEW_NODES:
            self.stages.append("descent")
            stop = (0.8 if small else 0.5) * self.clock.left()
            descent.learn(stop, most=_PROOF_TURNS if small else 10**9)
        if small and not descent.closed:
            self.cp_sat(core, descent)
        if not descent.closed:
            self.improve(descent)
        return descent.best, descent.bound

    def low_width(self, core: Core, plan: Plan) -> Progress:
        self.stages.append("elimination")
        tables = eliminate(core, plan, core.cost)
        if tables.value == np.inf:
            raise Infeasible
        choice = np.zeros(core.count, dtype=np.int64)
        decode(plan, tables, choice)
        if core.fits(choice):
            free = np.zeros(core.capacity.size)
            return Progress(choice, tables.value, tables.value, free)
        state = lagrange(core, plan)
        dense = float(core.sizes.sum()) * core.capacity.size
        if not state.closed and core.count <= 300 and dense <= _TABLES_LIMIT:
            self.stages.append("enumeration")
            enumerate_below(core, plan, state)
        return state

    def small(self, core: Core) -> bool:
        return sum(m.size for _, _, m in core.edges) <= _MARGINALS_LIMIT

    def cp_sat(self, core: Core, descent: Descent) -> None:
        """Drops the strategies that the bound rules out, solves with few rows, adds
        those that the answer overflows, and repeats."""
        from planner.search.intra.cp_sat import CpModel

        self.stages.append("cp-sat")
        domains = [np.arange(c.size) for c in core.cost]
        hint: IntArray | None = None
        if descent.best is not None:
            domains = descent.surviving()
            if descent.closed:
                return
            picks = zip(domains, ints(descent.best), strict=True)
            hint = np.array([int(np.searchsorted(d, k)) for d, k in picks])
        model = CpModel(narrow(core, domains))
        dearest = np.argsort(-descent.prices, kind="stable")[:_FEW_ROWS]
        for t in ints(dearest):
            if core.capacity.size <= _FEW_ROWS or descent.prices[t] > 0:
                model.add_row(t)
        stop = 0.2 * self.clock.left()
        while self.clock.left() > stop and not descent.closed:
            answer = model.solve(
                self.clock.left() - stop,
                hint=hint,
                deterministic=self.clock.deterministic,
                workers=self.workers,
                seed=self.seed,
            )
            self.clock.charge(answer.work_s)
            if answer.closed and answer.choice is None:
                if descent.best is None:
                    raise Infeasible
                descent.bound = descent.best_cost
                return
            descent.bound = max(descent.bound, answer.bound)
            if answer.choice is None:
                return
            hint = answer.choice
            picked = zip(domains, ints(hint), strict=True)
            descent.offer(np.array([d[k] for d, k in picked], dtype=np.int64))
            if not model.add_violated(hint) and (not answer.closed or descent.closed):
                return

    def improve(self, descent: Descent) -> None:
        """Spends what is left on finding, then bettering, a choice that fits."""
        if descent.best is None:
            descent.repair(0.0)
        chunk = max(self.clock.left() / 8, 0.0)
        while descent.best is not None and self.clock.left() > 0:
            descent.roam(max(self.clock.left() - 1.5 * chunk, 0.0))
            descent.polish(max(self.clock.left() - 0.5 * chunk, 0.0))


def _entries(core: Core, plan: Plan) -> float:
    sizes = core.sizes.astype(float)
    return float(sum(sizes[[*s, v]].prod() for v, s in plan.scope.items()))
