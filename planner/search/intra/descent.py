"""Prices on the limit and large moves: good choices for cores too big to prove.

*Moves.* A random elimination order holds the nodes whose tables would be too large at
their present choice and minimises exactly over all others at once. Orders that hold
hubs and orders that hold the hubs' neighbours take turns.

*Learning.* Message passing gives a bound and a first choice at given prices; prices
rise on rows that overflow and fall on rows with room (a subgradient with Polyak's
step), so the best bound seen is a Lagrangian bound of the whole problem.

*Polishing.* From the best choice that fits, a move is repeated at higher or lower
prices until it fits and costs less.
"""

from __future__ import annotations

import random

import numpy as np

from planner.search.intra.bounds import Messages
from planner.search.intra.clock import Clock
from planner.search.intra.core import Core, make_core
from planner.search.intra.elimination import (
    Plan,
    decode,
    eliminate,
    held_theta,
    make_plan,
)
from planner.search.intra.exact import Progress
from planner.search.intra.pricing import Pricer
from planner.search.intra.problem import FloatArray, IntArray, ints
from planner.search.intra.usage import Items

_MOVE_TABLE = 3e4  # entries of one table of a move
_LEANINGS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # power of the degree in choosing whom to hold
_STEP = 0.1  # share of Polyak's step
_FADE = 0.7  # how fast the longest recent subgradient is forgotten
_WARM_SWEEPS = 10
_PROOF_SWEEPS = 40
_FIT_EVERY = 5  # turns of learning between tries to fit
_FIT_TRIES = 5
_SECONDS_PER_NODE = 4e-5  # measured on one core: planning, tables and decoding
_SECONDS_PER_EDGE = 1.2e-5  # measured on one core: one message each way


class Descent:
    """Search state over one core. ``best`` fits; ``bound`` is below the optimum."""

    def __init__(self, core: Core, clock: Clock, seed: int) -> None:
        self.core = core
        self.clock = clock
        self.rng = random.Random(seed)
        self.soft = _soften(core)
        self.pricer = Pricer(self.soft)
        self.messages = Messages(core)
        self.prices = np.zeros(core.capacity.size)
        self.bound = -np.inf
        self.best: IntArray | None = None
        self.best_cost = np.inf
        self.forbidden = _forbidden(core)
        self.last = np.array([c.argmin() for c in core.cost], dtype=np.int64)
        self.walk = self.prices  # where roaming has brought the prices
        self._length = 0.0

    @property
    def closed(self) -> bool:
        """Whether the best choice is proved optimal (to rounding)."""
        return self.bound >= self.best_cost - 1e-12 * abs(self.best_cost)

    def resume(self, state: Progress) -> None:
        """Starts from what an earlier stage found."""
        self.prices, self.bound = state.prices, state.bound
        if state.choice is not None:
            self.offer(state.choice)

    # -- shared -------------------------------------------------------------------
    def offer(self, choice: IntArray) -> bool:
        """Keeps ``choice`` if it fits, is allowed and costs less."""
        cost = self.pricer.price(choice)
        if cost >= self.best_cost or cost >= self.forbidden or not self.fits(choice):
            return False
        self.best, self.best_cost = np.array(choice), cost
        return True

    def fits(self, choice: IntArray) -> bool:
        return self.core.fits(choice)

    def plan(self) -> Plan:
        self.clock.charge(_SECONDS_PER_NODE * self.core.count)
        return make_plan(
            self.soft, _MOVE_TABLE, rng=self.rng, leaning=self.rng.choice(_LEANINGS)
        )

    def move(self, plan: Plan, theta: list[FloatArray], choice: IntArray) -> IntArray:
        """The exact minimiser over the plan's nodes, the held ones at ``choice``."""
        out = np.array(choice)
        held = held_theta(self.soft, plan, theta, choice)
        decode(plan, eliminate(self.soft, plan, held), out)
        self.clock.charge(_SECONDS_PER_NODE * self.core.count)
        return out

    def priced(self, choice: IntArray, prices: FloatArray) -> float:
        """Cost plus charged use, less the capacity at the prices."""
        over = self.core.load(choice) - self.core.capacity
        return self.pricer.price(choice) + float(prices @ over)

    # -- learning prices ------------------------------------------------------------
    def learn(self, stop_left_s: float, most: int = 10**9) -> None:
        """Alternates messages, moves and prices until ``stop_left_s`` remain."""
        messages, prices = self.messages, self.prices
        theta = self.pricer.theta(prices)
        for _ in range(_WARM_SWEEPS):
            self._sweep(messages, theta, prices)
        self.last = messages.decode(theta)
        self.offer(self.last)
        for turn in range(most):
            if self.clock.left() <= stop_left_s or self.closed:
                return
            theta = self.pricer.theta(prices)
            self._sweep(messages, theta, prices)
            starts = [self.last]
            if turn < 4 or turn % 4 == 0:
                starts.append(messages.decode(theta))
            plan = self.plan()
            moved = [self.move(plan, theta, start) for start in starts]
            self.last = min(moved, key=lambda x: self.priced(x, prices))
            self.offer(self.last)
            if prices.size and turn % _FIT_EVERY == _FIT_EVERY - 1:
                self._fit(plan, prices, self.last)
            if prices.size:
                prices = self.walk = self._step(prices, self.last, self.bound, _FADE)

    def surviving(self) -> list[IntArray]:
        """Per node the strategies that a choice as cheap as the best may take."""
        theta, level = self.pricer.theta(self.prices), -np.inf
        for _ in range(_PROOF_SWEEPS):
            level = self._sweep(self.messages, theta, self.prices)
        room = self.best_cost + 1e-9 * abs(self.best_cost) - level
        slack = self.messages.slack(theta)
        return [np.flatnonzero(rise <= room) for rise in slack]

    def _sweep(
        self, messages: Messages, theta: list[FloatArray], prices: FloatArray
    ) -> float:
        level = messages.sweep(theta) - float(prices @ self.core.capacity)
        self.clock.charge(_SECONDS_PER_EDGE * 2 * len(self.core.edges))
        if level > self.bound:
            self.bound, self.prices = level, prices
        return level

    def _step(
        self, prices: FloatArray, choice: IntArray, level: float, fade: float
    ) -> FloatArray:
        """Polyak's step towards the best cost; ``fade`` slows steps after long ones,
        which the bound wants and a search for choices does not."""
        unit = float(self.core.capacity.max())
        over = (self.core.load(choice) - self.core.capacity) / unit
        slope = np.where((prices > 0) | (over > 0), over, 0.0)
        floor = 1e-2 if fade else 1e-4
        self._length = max(fade * self._length, float(slope @ slope), floor)
        scale = abs(level)
        gap = max(min(self.best_cost, 3 * scale) - level, 0.01 * scale)
        return np.maximum(0.0, prices + _STEP * gap / self._length / unit * slope)

    def _raise(self, prices: FloatArray, choice: IntArray, share: float) -> FloatArray:
        """Prices up where ``choice`` overflows: by ``share`` of the cost for a node
        that lives throughout and uses the highest capacity."""
        over = np.maximum(self.core.load(choice) - self.core.capacity, 0.0)
        scale = abs(self.best_cost) if self.best is not None else abs(self.bound)
        unit = float(self.core.capacity.max()) * max(float(over.sum()), 1e-300)
        return prices + share * max(scale, 1e-9) / unit * over

    def _fit(self, plan: Plan, prices: FloatArray, choice: IntArray) -> None:
        """Offers what the same nodes do at prices that rise until the choice fits."""
        share = 0.01
        for _ in range(_FIT_TRIES):
            if self.fits(choice):
                return
            prices = self._raise(prices, choice, share)
            choice = self.move(plan, self.pricer.theta(prices), choice)
            self.offer(choice)
            share *= 2

    def repair(self, stop_left_s: float, most: int = 10**9) -> None:
        """From the last choice, raises prices where it overflows until one fits."""
        prices, share = self.prices, 0.01
        for _ in range(most):
            if self.clock.left() <= stop_left_s:
                return
            self.last = self.move(self.plan(), self.pricer.theta(prices), self.last)
            if self.offer(self.last):
                return
            if prices.size:
                prices = self._raise(prices, self.last, share)
                share *= 1.1

    # -- polishing --------------------------------------------------------------------
    def roam(self, stop_left_s: float, most: int = 10**9) -> None:
        """Moves while prices follow the overflow of the present choice."""
        choice, prices = self.last, self.walk
        for _ in range(most):
            if self.clock.left() <= stop_left_s:
                break
            choice = self.move(self.plan(), self.pricer.theta(prices), choice)
            self.offer(choice)
            if prices.size:
                prices = self._step(prices, choice, self.priced(choice, prices), 0.0)
        self.last, self.walk = choice, prices

    def polish(self, stop_left_s: float, most: int = 10**9, tries: int = 5) -> None:
        """Moves from the best choice, priced until they fit and pay."""
        assert self.best is not None
        prices = self.prices
        for _ in range(most):
            if self.clock.left() <= stop_left_s:
                break
            plan, here = self.plan(), prices
            for _ in range(tries):
                choice = self.move(plan, self.pricer.theta(here), self.best)
                if self.offer(choice):
                    prices = here
                    break
                if not self.fits(choice):
                    here = self._raise(here, choice, 0.02)
                elif here.any():
                    here = here * 0.7
                else:
                    break


def _forbidden(core: Core) -> float:
    """More than any allowed choice costs."""
    total = 1.0
    for v in [*core.cost, *(m for _, _, m in core.edges)]:
        finite = v[np.isfinite(v)]
        if finite.size:
            total += float(np.abs(finite).max())
    return total


def _soften(core: Core) -> Core:
    """Infinite costs become large ones, so that moves can leave forbidden pairs."""
    large = 2 * _forbidden(core)
    use: dict[int, Items] = {}
    for q, v in enumerate(ints(core.item_node)):
        at = int(core.item_offset[q])
        span = (int(core.item_start[q]), int(core.item_end[q]))
        use.setdefault(v, {})[span] = core.values[at : at + core.cost[v].size]
    return make_core(
        [np.where(np.isinf(c), large, c) for c in core.cost],
        [(i, j, np.where(np.isinf(m), large, m)) for i, j, m in core.edges],
        use,
        core.capacity,
    )
