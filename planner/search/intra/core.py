"""What the reductions leave, as flat arrays for the bounds and the searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.intra.problem import Edge, FloatArray, IntArray, ints
from planner.search.intra.reductions import Graph
from planner.search.intra.usage import Infeasible, Items, compress, spread


@dataclass(frozen=True, slots=True)
class Core:
    """Nodes 0..n-1, at most one edge per pair, items over rows with capacities.

    ``near[i]`` are the neighbours j with matrices of shape (i's, j's strategies) and
    ``back[i]`` the same with the axes exchanged.
    Item ``k`` belongs to node ``item_node[k]``, covers rows ``[item_start[k],
    item_end[k])`` and uses ``values[item_offset[k] + x]``.
    """

    cost: tuple[FloatArray, ...]
    edges: tuple[Edge, ...]
    near: tuple[tuple[tuple[int, FloatArray], ...], ...]
    back: tuple[tuple[tuple[int, FloatArray], ...], ...]
    item_node: IntArray
    item_start: IntArray
    item_end: IntArray
    item_offset: IntArray
    values: FloatArray
    capacity: FloatArray

    @property
    def count(self) -> int:
        return len(self.cost)

    @property
    def sizes(self) -> IntArray:
        return np.array([c.size for c in self.cost], dtype=np.int64)

    def load(self, choice: IntArray) -> FloatArray:
        """Use per row, shape (rows,)."""
        amount = self.values[self.item_offset + choice[self.item_node]]
        return spread(self.item_start, self.item_end, amount, self.capacity.size)

    def fits(self, choice: IntArray) -> bool:
        slack = 1e-12 * np.maximum(1.0, self.capacity)
        return bool((self.load(choice) <= self.capacity + slack).all())

    def price(self, choice: IntArray) -> float:
        """Node and edge costs of ``choice``."""
        x = choice.tolist()
        total = sum(float(c[k]) for c, k in zip(self.cost, x, strict=True))
        return total + sum(float(m[x[i], x[j]]) for i, j, m in self.edges)


def make_core(
    cost: Sequence[FloatArray],
    edges: Sequence[Edge],
    use: dict[int, Items],
    capacity: FloatArray,
) -> Core:
    """Builds the flat form."""
    near: list[list[tuple[int, FloatArray]]] = [[] for _ in cost]
    back: list[list[tuple[int, FloatArray]]] = [[] for _ in cost]
    for i, j, m in edges:
        turned = np.transpose(m)
        near[i].append((j, m))
        back[i].append((j, turned))
        back[j].append((i, m))
        near[j].append((i, turned))
    flat = [
        (i, s, e, vector)
        for i, items in use.items()
        for (s, e), vector in sorted(items.items())
    ]
    sizes = np.array([f[3].size for f in flat], dtype=np.int64)
    return Core(
        tuple(cost),
        tuple(edges),
        tuple(tuple(n) for n in near),
        tuple(tuple(n) for n in back),
        np.array([f[0] for f in flat], dtype=np.int64),
        np.array([f[1] for f in flat], dtype=np.int64),
        np.array([f[2] for f in flat], dtype=np.int64),
        np.cumsum(sizes) - sizes,
        np.concatenate([f[3] for f in flat]) if flat else np.zeros(0),
        capacity,
    )


def core_of(graph: Graph) -> tuple[Core, IntArray]:
    """The live part of ``graph`` and, per core node, the node of the problem."""
    live = np.flatnonzero(np.array(graph.alive, dtype=np.bool_))
    index = {int(v): k for k, v in enumerate(live)}
    edges = [
        (k, index[j], m)
        for v, k in index.items()
        for j, m in graph.adj[v].items()
        if v < j
    ]
    use = {index[v]: items for v, items in graph.use.items()}
    core = make_core([graph.cost[v] for v in live], edges, use, graph.rows.capacity)
    return core, live


def components(core: Core) -> list[IntArray]:
    """Connected components by edges alone, each sorted, in order of least node."""
    seen = [False] * core.count
    found: list[IntArray] = []
    for first in range(core.count):
        if seen[first]:
            continue
        seen[first] = True
        todo, part = [first], [first]
        while todo:
            for j, _ in core.near[todo.pop()]:
                if not seen[j]:
                    seen[j] = True
                    todo.append(j)
                    part.append(j)
        found.append(np.array(sorted(part), dtype=np.int64))
    return found


def narrow(core: Core, domains: Sequence[IntArray]) -> Core:
    """The same core with only the strategies ``domains[i]`` of node i."""
    use: dict[int, Items] = {}
    for q, v in enumerate(ints(core.item_node)):
        span = (int(core.item_start[q]), int(core.item_end[q]))
        vector = core.values[int(core.item_offset[q]) + domains[v]]
        use.setdefault(v, {})[span] = vector
    return make_core(
        [c[d] for c, d in zip(core.cost, domains, strict=True)],
        [(i, j, m[np.ix_(domains[i], domains[j])]) for i, j, m in core.edges],
        use,
        core.capacity,
    )


def restrict(
    core: Core, choice: IntArray, nodes: IntArray, domains: Sequence[IntArray]
) -> Core:
    """The part of ``core`` on ``nodes`` with all others held at ``choice``.

    ``domains[k]`` are the strategies that ``nodes[k]`` may take. Raises
    :class:`Infeasible` where the rest alone overflows a row.
    """
    index = np.full(core.count, -1, dtype=np.int64)
    index[nodes] = np.arange(nodes.size)
    cost: list[FloatArray] = []
    edges: list[Edge] = []
    for k, (v, domain) in enumerate(zip(ints(nodes), domains, strict=True)):
        own = core.cost[v][domain]
        for j, m in core.near[v]:
            at = int(index[j])
            if at < 0:
                own = own + m[domain, choice[j]]
            elif at > k:
                edges.append((k, at, m[np.ix_(domain, domains[at])]))
        cost.append(own)
    inside = index[core.item_node] >= 0
    rest = np.where(inside, 0.0, core.values[core.item_offset + choice[core.item_node]])
    held = spread(core.item_start, core.item_end, rest, core.capacity.size)
    use: dict[int, Items] = {}
    for q in np.flatnonzero(inside).tolist():
        at = int(index[core.item_node[q]])
        span = (int(core.item_start[q]), int(core.item_end[q]))
        use.setdefault(at, {})[span] = core.values[core.item_offset[q] + domains[at]]
    items, rows = compress(use, core.capacity - held)
    return make_core(cost, edges, items, rows.capacity)


__all__ = [
    "Core",
    "Infeasible",
    "components",
    "core_of",
    "make_core",
    "narrow",
    "restrict",
]
