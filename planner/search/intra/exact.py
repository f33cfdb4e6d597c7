"""Proof without CP-SAT for cores of low width: exact Lagrangian, then enumeration.

For prices l >= 0 elimination gives the exact minimum of the relaxation,

    L(l) = min_x cost(x) + l (load(x) - capacity) <= optimum,

and its tables give, while decoding, how far each decision moves L. Depth-first search
over decisions whose L stays below the best known cost is therefore complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.intra.core import Core
from planner.search.intra.elimination import Plan, Tables, decode, eliminate
from planner.search.intra.pricing import Pricer
from planner.search.intra.problem import FloatArray, IntArray, ints
from planner.search.intra.usage import Infeasible

_TOLERANCE = 1e-12


@dataclass(slots=True)
class Progress:
    """The best choice so far, its cost, a bound, and the prices that gave it."""

    choice: IntArray | None
    cost: float
    bound: float
    prices: FloatArray

    @property
    def closed(self) -> bool:
        return self.bound >= self.cost - _TOLERANCE * abs(self.cost)


def lagrange(core: Core, plan: Plan, most: int = 25) -> Progress:
    """Subgradient ascent on the prices with exact minima (``plan`` holds no node)."""
    pricer = Pricer(core)
    prices = np.zeros(core.capacity.size)
    state = Progress(None, np.inf, -np.inf, prices)
    unit = max(float(core.capacity.max(initial=0.0)), 1e-300)
    choice = np.zeros(core.count, dtype=np.int64)
    share, level = 1.0, -np.inf
    for _ in range(most):
        tables = eliminate(core, plan, pricer.theta(prices))
        if tables.value == np.inf:
            raise Infeasible
        level = tables.value - float(prices @ core.capacity)
        if level > state.bound:
            state.bound, state.prices = level, prices
        else:
            share *= 0.7
        decode(plan, tables, choice)
        over = (core.load(choice) - core.capacity) / unit
        if core.fits(choice):
            cost = pricer.price(choice)
            if cost < state.cost:
                state.choice, state.cost = np.array(choice), cost
        if state.closed:
            break
        slope = np.where((prices > 0) | (over > 0), over, 0.0)
        length = float(slope @ slope)
        if length == 0.0:
            break
        top = state.cost if state.choice is not None else level + abs(level) + 1e-9
        size = share * max(top - level, 1e-3 * abs(level)) / length
        prices = np.maximum(0.0, prices + size / unit * slope)
    return state


def enumerate_below(
    core: Core, plan: Plan, state: Progress, most: int = 10_000
) -> Progress:
    """Searches every choice that the relaxation does not rule out; when it gives up
    after ``most`` decisions the bound stays as it was."""
    pricer = Pricer(core)
    tables = eliminate(core, plan, pricer.theta(state.prices))
    search = _Enumeration(core, plan, tables, pricer, state, most)
    start = tables.value - float(state.prices @ core.capacity)
    done = search.descend(0, start, np.zeros(core.capacity.size))
    if done:
        if state.choice is None:
            raise Infeasible
        state.bound = state.cost
    return state


class _Enumeration:
    def __init__(
        self,
        core: Core,
        plan: Plan,
        tables: Tables,
        pricer: Pricer,
        state: Progress,
        most: int,
    ) -> None:
        self.core, self.tables, self.pricer = core, tables, pricer
        self.order = tuple(reversed(plan.order))
        self.scope = plan.scope
        self.state, self.left = state, most
        self.choice = np.zeros(core.count, dtype=np.int64)
        self.limit = core.capacity + 1e-12 * np.maximum(1.0, core.capacity)
        self.use: list[FloatArray | None] = [None] * core.count
        for q, v in enumerate(ints(core.item_node)):
            size, at = core.cost[v].size, int(core.item_offset[q])
            table = self.use[v]
            if table is None:
                table = self.use[v] = np.zeros((size, core.capacity.size))
            span = slice(int(core.item_start[q]), int(core.item_end[q]))
            table[:, span] += core.values[at : at + size, None]

    def descend(self, depth: int, level: float, load: FloatArray) -> bool:
        """False when the budget ran out."""
        state = self.state
        if depth == len(self.order):
            cost = self.pricer.price(self.choice)
            if cost < state.cost:
                state.choice, state.cost = np.array(self.choice), cost
            return True
        v = self.order[depth]
        row = self.tables.bucket[v][tuple([self.choice[j] for j in self.scope[v]])]
        rise = row - row.min()
        use = self.use[v]
        for k in rise.argsort(kind="stable").tolist():
            at = level + float(rise[k])
            if at >= state.cost - _TOLERANCE * abs(state.cost) or at == np.inf:
                break
            self.left -= 1
            if self.left < 0:
                return False
            grown = load if use is None else load + use[k]
            if use is not None and (grown > self.limit).any():
                continue
            self.choice[v] = k
            if not self.descend(depth + 1, at, grown):
                return False
        return True
