"""Exact reductions: the optimum of what is left, lifted, is the problem's optimum.

* *infinite edges*: a strategy without a finite partner on some edge is dropped;
* *followers*: where one node's strategy determines a neighbour's, the neighbour is
  folded into it (with its costs, its edges and its use over its own live range);
* *parallel edges* are summed, edges that split into two node costs vanish;
* *single strategies* become constants;
* *dominance*: a strategy goes when another costs no more against every choice of the
  neighbours and uses no more in any row;
* *capacity*: a strategy goes when it overflows a row with all others at their least;
* *elimination*: a node whose use cannot matter and that has at most two neighbours
  is minimised out.

Every step is logged, so that :meth:`Graph.lift` turns a choice for the reduced graph
into one for the problem.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np

from planner.search.intra.problem import FloatArray, IntArray, Problem, ints
from planner.search.intra.usage import Infeasible, Items, Rows, compress, merge_items

# ("keep", node, kept) | ("fold", node, into, map) | ("fix", node)
# | ("drop", node, neighbours, best)
Step: TypeAlias = tuple[str, int, tuple[int, ...], IntArray]
_EMPTY = np.zeros(0, dtype=np.int64)
_DOMINANCE_WORK = 4_000_000  # largest table a dominance test may build


class Graph:
    """A problem under reduction. ``cost[i]`` and ``adj[i][j]`` describe live nodes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost: list[FloatArray] = list(problem.costs)
        self.adj: list[dict[int, FloatArray]] = [{} for _ in problem.costs]
        self.alive = [True] * len(self.cost)
        self.constant = 0.0
        self.log: list[Step] = []
        self.use: dict[int, Items] = {}
        self.rows = Rows(np.zeros(0))
        self._queue: deque[int] = deque(range(len(self.cost)))
        self._queued = [True] * len(self.cost)
        for i, j, m in problem.edges:
            self._join(i, j, m)

    # -- the queue of nodes to look at again ------------------------------------
    def _push(self, i: int) -> None:
        if not self._queued[i]:
            self._queued[i] = True
            self._queue.append(i)

    def _join(self, i: int, j: int, m: FloatArray) -> None:
        if i == j:
            self.cost[i] = self.cost[i] + np.diagonal(m)
            return
        old = self.adj[i].get(j)
        new = m if old is None else old + m
        self.adj[i][j] = new
        self.adj[j][i] = np.transpose(new)

    def _part(self, i: int, j: int) -> None:
        del self.adj[i][j]
        del self.adj[j][i]

    # -- steps --------------------------------------------------------------------
    def keep(self, i: int, kept: IntArray) -> None:
        """Restricts node ``i`` to the strategies ``kept``."""
        if kept.size == 0:
            raise Infeasible
        self.log.append(("keep", i, (), kept))
        self.cost[i] = self.cost[i][kept]
        for j in self.adj[i]:
            m = self.adj[i][j][kept]
            self.adj[i][j] = m
            self.adj[j][i] = np.transpose(m)
            self._push(j)
        if i in self.use:
            self.use[i] = {span: v[kept] for span, v in self.use[i].items()}
        self._push(i)

    def _fold(self, a: int, b: int, follow: IntArray) -> None:
        """Folds ``a`` into ``b``: x_a = follow[x_b]."""
        m = self.adj[b][a]
        self.cost[b] = (
            self.cost[b] + self.cost[a][follow] + m[np.arange(follow.size), follow]
        )
        self._part(a, b)
        for k, w in list(self.adj[a].items()):
            self._part(a, k)
            self._join(b, k, w[follow])
            self._push(k)
        if a in self.use:
            extra = self.use.pop(a)
            merge_items(
                self.use.setdefault(b, {}),
                [(span, v[follow]) for span, v in extra.items()],
            )
        self.alive[a] = False
        self.log.append(("fold", a, (b,), follow))
        self._push(b)

    def _fix(self, i: int) -> None:
        """Turns a node with one strategy into constants (its use is all minimum)."""
        for j, m in list(self.adj[i].items()):
            self.cost[j] = self.cost[j] + m[0]
            self._part(i, j)
            self._push(j)
        self.constant += float(self.cost[i][0])
        self.alive[i] = False
        self.log.append(("fix", i, (), _EMPTY))

    def drop(self, i: int) -> None:
        """Minimises out a node of degree at most two that uses nothing."""
        near = tuple(self.adj[i])
        table = self.cost[i]
        if len(near) == 1:
            table = table[:, None] + self.adj[i][near[0]]
        elif len(near) == 2:
            one, two = self.adj[i][near[0]], self.adj[i][near[1]]
            table = (table[:, None] + one)[:, :, None] + two[:, None, :]
        best = table.argmin(axis=0)
        least = table.min(axis=0)
        for j in near:
            self._part(i, j)
            self._push(j)
        if not near:
            self.constant += float(least)
        elif len(near) == 1:
            self.cost[near[0]] = self.cost[near[0]] + least
        else:
            self._join(near[0], near[1], least)
        self.alive[i] = False
        self.log.append(("drop", i, near, np.asarray(best, dtype=np.int64)))

    # -- passes -------------------------------------------------------------------
    def propagate(self) -> None:
        """Drops, fixes, folds and parts until nothing changes."""
        while self._queue:
            i = self._queue.popleft()
            self._queued[i] = False
            if self.alive[i]:
                self._visit(i)

    def _visit(self, i: int) -> None:
        ok = self.cost[i] < np.inf
        for j, m in self.adj[i].items():
            ok = ok & ((m + self.cost[j]).min(axis=1) < np.inf)
        if not ok.all():
            self.keep(i, np.flatnonzero(ok))
            return
        if self.cost[i].size == 1:
            self._fix(i)
            return
        for j in list(self.adj[i]):
            m = self.adj[i].get(j)
            if m is None:
                continue
            finite = m < np.inf
            if finite.all():
                self._split(i, j, m)
            elif self.cost[j].size > 1 and finite.sum(axis=1).max() <= 1:
                into, gone = i, j
                if finite.sum(axis=0).max() <= 1 and self._smaller(i, j):
                    into, gone, finite = j, i, np.transpose(finite)
                supported = np.flatnonzero(np.sum(finite, axis=1))
                if supported.size < finite.shape[0]:
                    self.keep(into, supported)
                    self._push(i)
                    return
                self._fold(gone, into, np.argmax(finite, axis=1))
                if gone == i:
                    return

    def _smaller(self, i: int, j: int) -> bool:
        return len(self.adj[i]) < len(self.adj[j])

    def _split(self, i: int, j: int, m: FloatArray) -> None:
        """Parts an edge that is exactly a row cost plus a column cost."""
        if ((m - m[:, :1]) == (m[0] - m[0, 0])).all():
            self._part(i, j)
            self.cost[i] = self.cost[i] + m[:, 0]
            self.cost[j] = self.cost[j] + (m[0] - m[0, 0])
            self._push(j)

    def set_usage(self) -> None:
        """Finds, once the first propagation is over, who uses what and when."""
        limit = self.problem.usage_limit
        if limit is None:
            return
        owner, chosen = self._compose()
        spans = self.problem.intervals
        times, index = np.unique(spans, return_inverse=True)
        starts, ends = ints(np.ravel(index)[::2]), ints(np.ravel(index)[1::2])
        base = np.zeros(times.size + 1)
        raw: dict[int, Items] = {}
        for v, (s, e) in enumerate(zip(starts, ends, strict=True)):
            if e <= s:
                continue
            vector = self.problem.usages[v][chosen[v]]
            if owner[v] < 0 or vector.size == 1:
                base[s] += vector[0]
                base[e] -= vector[0]
            else:
                merge_items(raw.setdefault(owner[v], {}), [((s, e), vector)])
        capacity = limit - np.cumsum(base)[: times.size]
        self.use, self.rows = compress(raw, capacity)

    def _compose(self) -> tuple[list[int], list[IntArray]]:
        """For every node its live owner (-1: none) and its strategy by the owner's."""
        owner = list(range(len(self.cost)))
        chosen = [
            np.arange(c.size) if a else np.zeros(1, dtype=np.int64)
            for c, a in zip(self.cost, self.alive, strict=True)
        ]
        for kind, i, near, data in reversed(self.log):
            if kind == "keep":
                chosen[i] = data[chosen[i]]
            elif kind == "fix":
                owner[i] = -1
            else:
                owner[i] = owner[near[0]]
                chosen[i] = data[chosen[near[0]]]
        return owner, chosen

    def tighten(self) -> None:
        """Recomputes the rows and drops strategies that overflow one."""
        if not self.rows.count:
            self.use = {}
            return
        self.use, self.rows = compress(self.use, self.rows.capacity)
        room = self.rows.capacity
        for i in list(self.use):
            cuts, level = own_rows(self.use[i], self.cost[i].size)
            inside = cuts if cuts[-1] < room.size else cuts[:-1]
            least = np.minimum.reduceat(room, inside)[: level.shape[0]]
            over = (level > least[:, None] * (1 + 1e-12)).any(axis=0)
            if over.any():
                self.keep(i, np.flatnonzero(~over))

    def dominate(self) -> None:
        """Drops dominated strategies (ties keep the earliest)."""
        for i, alive in enumerate(self.alive):
            if alive and self.cost[i].size > 1:
                kept = self._undominated(i)
                if kept.size < self.cost[i].size:
                    self.keep(i, kept)

    def _undominated(self, i: int) -> IntArray:
        size = self.cost[i].size
        widest = max((m.shape[1] for m in self.adj[i].values()), default=1)
        kept = np.arange(size)
        if size * size * widest > _DOMINANCE_WORK:
            return kept
        worse = self.cost[i][:, None] - self.cost[i][None, :]  # a over b
        for m in self.adj[i].values():
            with np.errstate(invalid="ignore"):  # inf - inf: not comparable, kept
                more = m[:, None, :] - m[None, :, :]
                more = np.where(np.isinf(m)[None, :, :], -np.inf, more)
                worse = worse + more.max(axis=2)
        able = worse <= 0
        if i in self.use:
            for level in own_rows(self.use[i], size)[1]:
                able &= level[:, None] <= level[None, :]
        np.fill_diagonal(able, False)
        mutual = able & np.transpose(able)
        able &= ~(mutual & (kept[:, None] > kept[None, :]))
        return np.flatnonzero(np.sum(able, axis=0) == 0)

    def eliminate(self, limit: int = 2) -> bool:
        """Minimises out nodes with no use and at most ``limit`` neighbours."""
        found = False
        todo = [i for i, a in enumerate(self.alive) if a and i not in self.use]
        while todo:
            i = todo.pop()
            near = self.adj[i]
            if not self.alive[i] or len(near) > limit:
                continue
            table = self.cost[i].size * float(
                np.prod([m.shape[1] for m in near.values()])
            )
            if table > _DOMINANCE_WORK:
                continue
            near = list(near)
            self.drop(i)
            found = True
            todo += [j for j in near if j not in self.use]
        return found

    # -- back ---------------------------------------------------------------------
    def lift(self, choice: dict[int, int]) -> IntArray:
        """A strategy for every node of the problem from one for every live node."""
        x = np.zeros(len(self.cost), dtype=np.int64)
        for i, k in choice.items():
            x[i] = k
        for kind, i, near, data in reversed(self.log):
            if kind == "keep":
                x[i] = data[x[i]]
            elif kind == "fix":
                x[i] = 0
            else:
                x[i] = data[tuple(x[j] for j in near)]
        return x


def own_rows(items: Items, size: int) -> tuple[IntArray, FloatArray]:
    """The bounds, shape (segments + 1,), and the use, shape (segments, size), of the
    stretches of rows in which one node's use is constant."""
    cuts = np.unique(np.array([t for span in items for t in span], dtype=np.int64))
    change = np.zeros((cuts.size, size))
    for (s, e), vector in items.items():
        change[np.searchsorted(cuts, s)] += vector
        change[np.searchsorted(cuts, e)] -= vector
    return cuts, np.cumsum(change, axis=0)[:-1]


def reduce(problem: Problem, rounds: int = 4) -> Graph:
    """Applies every reduction until nothing changes, at most ``rounds`` times.

    Raises :class:`Infeasible` when that proves that nothing fits.
    """
    graph = Graph(problem)
    graph.propagate()
    graph.set_usage()
    for _ in range(rounds):
        before = len(graph.log)
        graph.tighten()
        graph.dominate()
        graph.propagate()
        graph.eliminate()
        graph.propagate()
        if len(graph.log) == before:
            break
    graph.tighten()
    graph.propagate()
    return graph
