"""The intra-operator sharding problem and its answer.

Choose one strategy ``x_i`` per node to minimise

    sum_i costs_i[x_i] + sum_(i,j,M) M[x_i, x_j]

such that at every instant ``t`` the nodes that live then fit:

    sum over i with start_i <= t < end_i of usages_i[x_i] <= usage_limit.

A cost of ``inf`` forbids a strategy or a pair. Costs and usages are in whatever
unit the caller likes (seconds and bytes in the planner); whole numbers below 2**53
are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from planner.errors import PlannerError

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Edge: TypeAlias = tuple[int, int, FloatArray]


def ints(array: IntArray) -> list[int]:
    """``array.tolist()`` with its type."""
    out: list[int] = array.tolist()
    return out


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes with strategies, pairwise costs and one limit over live ranges.

    ``costs[i]`` and ``usages[i]`` have shape (strategies of i,); ``intervals`` has
    shape (nodes, 2), half open; ``edges`` are ``(i, j, matrix)`` with matrix of shape
    (strategies of i, strategies of j), and several edges may join the same pair.
    ``usage_limit`` None means no limit. Build one with :meth:`make`, which checks.
    """

    costs: tuple[FloatArray, ...]
    usages: tuple[FloatArray, ...]
    intervals: IntArray
    edges: tuple[Edge, ...]
    usage_limit: float | None = None

    @staticmethod
    def make(
        costs: Sequence[npt.ArrayLike],
        usages: Sequence[npt.ArrayLike] | None = None,
        intervals: npt.ArrayLike | None = None,
        edges: Sequence[tuple[int, int, npt.ArrayLike]] = (),
        usage_limit: float | None = None,
    ) -> Problem:
        """Checks and converts; without ``usages`` nothing is used, without
        ``intervals`` every node lives in the one instant 0."""
        nodes = tuple(np.asarray(c, dtype=np.float64) for c in costs)
        if usages is None:
            used = tuple(np.zeros(len(c)) for c in nodes)
        else:
            used = tuple(np.asarray(u, dtype=np.float64) for u in usages)
        if intervals is None:
            live = np.tile(np.array([[0, 1]], dtype=np.int64), (len(nodes), 1))
        else:
            live = np.reshape(np.asarray(intervals, dtype=np.int64), (-1, 2))
        pairs = tuple(
            (int(i), int(j), np.asarray(m, dtype=np.float64)) for i, j, m in edges
        )
        problem = Problem(nodes, used, live, pairs, usage_limit)
        _check(problem)
        return problem


def _check(problem: Problem) -> None:
    n = len(problem.costs)
    if len(problem.usages) != n or len(problem.intervals) != n:
        raise PlannerError(
            "costs, usages and intervals speak of different numbers of nodes",
            (n, len(problem.usages), len(problem.intervals)),
            "give one entry of each per node",
        )
    if problem.usage_limit is not None and np.isnan(problem.usage_limit):
        raise PlannerError("usage_limit is not a number", problem.usage_limit)
    for i, (c, u) in enumerate(zip(problem.costs, problem.usages, strict=True)):
        if c.ndim != 1 or c.size == 0 or c.shape != u.shape:
            raise PlannerError(
                f"node {i} needs as many usages as costs, at least one",
                (c.shape, u.shape),
            )
        if np.isnan(c).any() or np.isneginf(c).any() or not np.isfinite(u).all():
            raise PlannerError(
                f"node {i} has a cost or usage that is not a number or without bound",
                fix="costs may be +inf, usages must be finite",
            )
    for i, j, m in problem.edges:
        if not (0 <= i < n and 0 <= j < n):
            raise PlannerError("an edge names a node that does not exist", (i, j))
        if m.shape != (problem.costs[i].size, problem.costs[j].size):
            raise PlannerError(
                f"edge ({i}, {j}) has a matrix of the wrong shape",
                m.shape,
                f"expected {(problem.costs[i].size, problem.costs[j].size)}",
            )
        if np.isnan(m).any() or np.isneginf(m).any():
            raise PlannerError(f"edge ({i}, {j}) has a cost that is not a number")


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    ``choice`` has shape (nodes,) and is None where no feasible choice is known;
    ``status`` is "optimal" only where ``lower_bound`` meets ``cost`` (to rounding),
    "infeasible" only where proved, "unknown" where time ran out first; ``gap`` is
    (cost - lower_bound) / |cost|, inf without a choice.
    """

    choice: IntArray | None
    cost: float
    lower_bound: float
    status: str
    gap: float
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
