"""CP-SAT on a core: one Boolean per strategy, marginals per edge, rows added lazily.

For an edge (i, j) with matrix M the marginals are

    sum_q e(p, q) = s_i(p),   sum_p e(p, q) = s_j(q),   e >= 0,

after M is normalised: row minima and column minima move to the node costs, and equal
rows (columns) share their marginals, ``sum_q e(P, q) = sum_{p in P} s_i(p)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.search.intra.core import Core
from planner.search.intra.problem import FloatArray, IntArray

_LINEAR: Any = cp_model.LinearExpr  # its methods carry no types
_PRECISION = 2.0**44  # largest scaled cost or use


@dataclass(frozen=True, slots=True)
class Answer:
    """``choice`` over core nodes or None; ``bound`` below the core's optimum;
    ``closed`` when the search space is exhausted (optimal, or nothing fits)."""

    choice: IntArray | None
    bound: float
    closed: bool
    work_s: float


def _scale(vectors: Sequence[FloatArray]) -> float:
    """A factor that makes the finite entries whole: 1 where they already are."""
    peak, whole = 0.0, True
    for v in vectors:
        finite = v[np.isfinite(v)]
        if finite.size:
            peak = max(peak, float(np.abs(finite).max()))
            whole = whole and bool((finite == np.floor(finite)).all())
    if whole and peak < 2.0**52:
        return 1.0
    return 2.0 ** np.floor(np.log2(_PRECISION / max(peak, 1e-300)))


class CpModel:
    """A CP-SAT model of ``core``; costs are rounded down, so its bound is valid."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.model = cp_model.CpModel()
        self.scale = _scale([*core.cost, *(m for _, _, m in core.edges)])
        self.use_scale = _scale([core.values])
        self.strategies: list[list[Any]] = []
        self._objective: list[tuple[Any, int]] = []
        self._offset = 0
        self._added: set[int] = set()
        cost = [np.array(c) for c in core.cost]
        for c in core.cost:
            literals = [self.model.new_bool_var("") for _ in range(c.size)]
            self.model.add_exactly_one(literals)
            self.strategies.append(literals)
        for i, j, m in core.edges:
            self._add_edge(i, j, m, cost)
        for literals, c in zip(self.strategies, cost, strict=True):
            for literal, value in zip(literals, c.tolist(), strict=True):
                if value == np.inf:
                    self.model.add(literal == 0)
                else:
                    self._charge(literal, value)

    def _charge(self, variable: Any, value: float) -> None:
        coefficient = int(np.floor(value * self.scale))
        if coefficient:
            self._objective.append((variable, coefficient))

    def _add_edge(self, i: int, j: int, m: FloatArray, cost: list[FloatArray]) -> None:
        low = m.min(axis=1)
        low = np.where(np.isinf(low), 0.0, low)
        m = m - low[:, None]
        left = m.min(axis=0)
        left = np.where(np.isinf(left), 0.0, left)
        m = m - left[None, :]
        cost[i] = cost[i] + low
        cost[j] = cost[j] + left
        table, row_of = np.unique(m, axis=0, return_inverse=True)
        table, col_of = np.unique(table, axis=1, return_inverse=True)
        rows = self._groups(i, np.ravel(row_of), table.shape[0])
        cols = self._groups(j, np.ravel(col_of), table.shape[1])
        if table.size == 1:
            return
        if not (table[np.isfinite(table)] > 0).any():
            self._add_clauses(table, rows, cols)
            return
        row_sum: list[list[Any]] = [[] for _ in rows]
        col_sum: list[list[Any]] = [[] for _ in cols]
        for p, q in zip(*np.nonzero(np.isfinite(table)), strict=True):
            pair = self.model.new_bool_var("")
            row_sum[p].append(pair)
            col_sum[q].append(pair)
            self._charge(pair, float(table[p, q]))
        for group, pairs in [
            *zip(rows, row_sum, strict=True),
            *zip(cols, col_sum, strict=True),
        ]:
            self.model.add(_LINEAR.sum(pairs) == sum(group))

    def _groups(self, i: int, of: IntArray, count: int) -> list[list[Any]]:
        groups: list[list[Any]] = [[] for _ in range(count)]
        for literal, g in zip(self.strategies[i], of.tolist(), strict=True):
            groups[g].append(literal)
        return groups

    def _add_clauses(
        self, table: FloatArray, rows: list[list[Any]], cols: list[list[Any]]
    ) -> None:
        """A free-or-forbidden edge needs no marginals: support each way."""
        allowed = np.isfinite(table)
        for p, group in enumerate(rows):
            near = [s for q in np.flatnonzero(allowed[p]) for s in cols[q]]
            self.model.add(sum(near) >= sum(group))
        for q, group in enumerate(cols):
            near = [s for p in np.flatnonzero(allowed[:, q]) for s in rows[p]]
            self.model.add(sum(near) >= sum(group))

    def add_row(self, t: int) -> None:
        """Adds the capacity of row ``t``, rounded so that nothing feasible is lost."""
        if t in self._added:
            return
        self._added.add(t)
        core = self.core
        total: dict[int, FloatArray] = {}
        live = (core.item_start <= t) & (core.item_end > t)
        for q in np.flatnonzero(live).tolist():
            i = int(core.item_node[q])
            at = int(core.item_offset[q])
            vector = core.values[at : at + core.cost[i].size]
            total[i] = total[i] + vector if i in total else vector
        literals: list[Any] = []
        amounts: list[int] = []
        for i, vector in total.items():
            for k in np.flatnonzero(vector).tolist():
                literals.append(self.strategies[i][k])
                amounts.append(int(np.floor(vector[k] * self.use_scale)))
        room = int(np.floor(core.capacity[t] * (1 + 1e-12) * self.use_scale))
        if self.use_scale != 1.0:
            room += 1
        self.model.add(_LINEAR.weighted_sum(literals, amounts) <= room)

    def add_violated(self, choice: IntArray, most: int = 40) -> bool:
        """Adds the rows that ``choice`` overflows, the worst of each stretch first."""
        over = self.core.load(choice) - self.core.capacity
        bad = over > 1e-12 * np.maximum(1.0, self.core.capacity)
        if not bad.any():
            return False
        edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(np.int8), [0]])))
        peaks = [
            s + int(over[s:e].argmax())
            for s, e in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        peaks.sort(key=lambda t: -over[t])
        for t in peaks[:most]:
            self.add_row(t)
        return True

    def solve(
        self,
        time_limit_s: float,
        *,
        hint: IntArray | None = None,
        deterministic: bool = False,
        workers: int = 2,
        seed: int = 0,
    ) -> Answer:
        """Solves with the rows added so far, at most ``time_limit_s`` (deterministic
        seconds of CP-SAT with ``deterministic``)."""
        model = self.model
        variables = [v for v, _ in self._objective]
        weights = [w for _, w in self._objective]
        objective = _LINEAR.weighted_sum(variables, weights)
        model.minimize(objective)
        model.clear_hints()
        if hint is not None:
            for literals, k in zip(self.strategies, hint.tolist(), strict=True):
                for p, literal in enumerate(literals):
                    model.add_hint(literal, p == k)
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
        parameters: Any = solver.parameters
        parameters.random_seed = seed
        if deterministic:  # one thread proves sooner than two that take turns
            parameters.max_deterministic_time = time_limit_s
            parameters.num_workers = 1
            parameters.linearization_level = 2
        else:
            parameters.max_time_in_seconds = time_limit_s
            parameters.num_workers = workers
            if workers == 2:
                parameters.subsolvers.extend(["max_lp", "pseudo_costs"])
        status = solver.solve(model)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        choice = None
        if found:
            picks = [
                next(p for p, s in enumerate(literals) if solver.boolean_value(s))
                for literals in self.strategies
            ]
            choice = np.array(picks, dtype=np.int64)
        closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        bound = np.inf if status == cp_model.INFEASIBLE else -np.inf
        if found or status == cp_model.UNKNOWN:
            bound = solver.best_objective_bound / self.scale
        work_s = solver.response_proto.deterministic_time
        return Answer(choice, bound, closed, work_s)
