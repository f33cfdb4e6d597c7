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


def _groups(graph: OpGraph, start: int, stop: int) -> list[list[int]]:
    """Groups of op indices inside one block, each in order.

    ``level`` is the length of the longest path in groups: an op joins its producer's
    group only if none of its other inputs comes from a later level, so that no path
    leaves a group and returns.
    """
    group_of: dict[int, int] = {}
    members: list[list[int]] = []
    level: list[int] = []
    volume: list[int] = []
    rows: list[set[int]] = []  # sizes that reductions in the group left
    maker: dict[str, int] = {}
    for i in range(start, stop):
        op = graph.ops[i]
        sources = [maker[n] for n in op.inputs if n in maker]
        below = [group_of[s] for s in sources]
        deepest = max((level[g] for g in below), default=-1)
        size = _volume(graph, op)
        chosen = -1
        if op.kind in _BODY:
            for source in sources:
                g = group_of[source]
                fits = (
                    graph.ops[source].kind in _BODY
                    and (volume[g] in (0, size) or size in rows[g])
                    and level[g] == deepest
                )
                if fits and g > chosen:
                    chosen = g
        if chosen < 0:
            chosen = len(members)
            members.append([])
            level.append(deepest + 1)
            volume.append(0)
            rows.append(set())
        members[chosen].append(i)
        group_of[i] = chosen
        if op.kind not in _FREE:
            volume[chosen] = max(volume[chosen], size)
        if op.kind is OpKind.REDUCE:
            rows[chosen] |= {prod(graph.tensor(n).shape) for n in op.outputs}
        for name in op.outputs:
            maker[name] = i
    return members


def _kernels(ops: Sequence[Op], group: Sequence[int]) -> int:
    return sum(ops[i].kind not in _FREE for i in group)


def fuse(graph: OpGraph) -> OpGraph:
    """The graph with ``fusion`` ids; a group of fewer than two kernels has none."""
    fusion: dict[int, int] = {}
    spans = [(b.start, b.stop) for b in graph.blocks] or [(0, len(graph.ops))]
    number = 0
    for start, stop in spans:
        for group in _groups(graph, start, stop):
            if len(group) > 1 and _kernels(graph.ops, group) > 1:
                fusion |= dict.fromkeys(group, number)
                number += 1
    ops = tuple(
        op if op.fusion == fusion.get(i, -1) else replace(op, fusion=fusion.get(i, -1))
        for i, op in enumerate(graph.ops)
    )
    return graph.with_ops(ops)
