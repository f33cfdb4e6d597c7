"""Group ops that a compiler runs as one kernel.

Requires blocks where a stage may be cut (a group never crosses a block). Ensures: ops
with one ``fusion`` id form a connected producer-consumer chain of elementwise, norm,
softmax, reduction, random and view ops over one iteration volume, and no path leaves
the group and comes back. Matrix products, convolutions, attention, gathers and sorts
stay alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from passes.ir import Op, OpGraph, OpKind

_BODY = frozenset(
    {
        OpKind.POINTWISE,
        OpKind.NORM,
        OpKind.SOFTMAX,
        OpKind.REDUCE,
        OpKind.RANDOM,
        OpKind.CREATE,
        OpKind.COPY,
        OpKind.VIEW,
        OpKind.LOSS,
    }
)
_FREE = frozenset({OpKind.VIEW, OpKind.CREATE})


def _volume(graph: OpGraph, op: Op) -> int:
    """Points of the kernel that would run this op."""
    names = op.inputs if op.kind in (OpKind.REDUCE, OpKind.LOSS) else op.outputs
    return max((prod(graph.tensor(n).shape) for n in names), default=0)


class _Grouping:
    """Groups of one block's ops, grown in op order.

    ``level`` is the length of the longest path of groups that leads to a group. An op
    joins only a group of its deepest producers' level, and two groups become one only
    at one level (a group that nobody else reads may be lifted to it), so no path
    leaves a group and returns.
    """

    def __init__(self, graph: OpGraph, start: int, stop: int) -> None:
        self.graph = graph
        self.group_of: dict[int, int] = {}
        self.members: list[list[int]] = []
        self.level: list[int] = []
        self.volume: list[int] = []
        self.rows: list[set[int]] = []  # sizes that reductions in the group left
        self.read: list[bool] = []  # by another group
        self.maker: dict[str, int] = {}
        for i in range(start, stop):
            self._place(i)

    def _place(self, i: int) -> None:
        op = self.graph.ops[i]
        size = _volume(self.graph, op)
        sources = [self.maker[n] for n in op.inputs if n in self.maker]
        below = list(dict.fromkeys(self.group_of[s] for s in sources))
        deepest = max((self.level[g] for g in below), default=-1)
        chosen = -1
        if op.kind in _BODY:
            fitting = [g for g in below if self._fits(g, size)]
            at_top = [g for g in fitting if self.level[g] == deepest]
            if at_top:
                chosen = at_top[0]
                for g in fitting:
                    if g != chosen and self._joins(g, deepest):
                        self._join(chosen, g)
        if chosen < 0:
            chosen = self._new(deepest + 1)
        for g in below:
            if self.members[g] and g != chosen:
                self.read[g] = True
        self.members[chosen].append(i)
        self.group_of[i] = chosen
        if op.kind not in _FREE:
            self.volume[chosen] = max(self.volume[chosen], size)
        if op.kind is OpKind.REDUCE:
            self.rows[chosen] |= {prod(self.graph.tensor(n).shape) for n in op.outputs}
        self.maker |= dict.fromkeys(op.outputs, i)

    def _new(self, level: int) -> int:
        self.members.append([])
        self.level.append(level)
        self.volume.append(0)
        self.rows.append(set())
        self.read.append(False)
        return len(self.members) - 1

    def _fits(self, g: int, size: int) -> bool:
        body = all(self.graph.ops[i].kind in _BODY for i in self.members[g][:1])
        return body and (self.volume[g] in (0, size) or size in self.rows[g])

    def _joins(self, g: int, deepest: int) -> bool:
        return self.level[g] == deepest or not self.read[g]

    def _join(self, target: int, source: int) -> None:
        for i in self.members[source]:
            self.group_of[i] = target
        self.members[target] += self.members[source]
        self.members[source] = []
        self.volume[target] = max(self.volume[target], self.volume[source])
        self.rows[target] |= self.rows[source]
        self.read[target] = self.read[target] or self.read[source]


def _kernels(ops: Sequence[Op], group: Sequence[int]) -> int:
    return sum(ops[i].kind not in _FREE for i in group)


def fuse(graph: OpGraph) -> OpGraph:
    """The graph with ``fusion`` ids; a group of fewer than two kernels has none."""
    fusion: dict[int, int] = {}
    spans = [(b.start, b.stop) for b in graph.blocks] or [(0, len(graph.ops))]
    number = 0
    for start, stop in spans:
        found = _Grouping(graph, start, stop).members
        for group in sorted(sorted(g) for g in found if g):
            if len(group) > 1 and _kernels(graph.ops, group) > 1:
                fusion |= dict.fromkeys(group, number)
                number += 1
    ops = tuple(
        op if op.fusion == fusion.get(i, -1) else replace(op, fusion=fusion.get(i, -1))
        for i, op in enumerate(graph.ops)
    )
    return graph.with_ops(ops)
