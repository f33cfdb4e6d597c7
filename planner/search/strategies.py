"""The ways one op can run on a mesh axis, read off its iteration space.

A mesh axis of ``size`` ranks divides one loop dim (or none). On a parallel dim the
operands it indexes are sharded and the others replicated; on a reduction dim the
outputs are partial sums. The gradient of an input follows: sharded where the input is,
a partial sum where the op's work is divided but the input is not, else replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir import DimKind, IterationSpace, Op, Operand, OpKind
from planner.search.placements import PARTIAL, REPLICATED, Placement, shard


@dataclass(frozen=True, slots=True)
class Strategy:
    """``dim``: the loop dim that the axis divides; "" replicates, "+" passes a sum."""

    dim: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    padded: bool = False


def operand_placement(
    operand: Operand, dim: str, space: IterationSpace
) -> Placement | None:
    """The shard of ``operand`` when ``dim`` is divided; R if it is not indexed by it.

    None: indexed in a way that can not be divided (a window, or inside parts).
    """
    found: Placement | None = None
    for number, axis in enumerate(operand.axes):
        if dim not in axis.dims:
            continue
        if axis.window or found is not None:
            return None
        position = axis.dims.index(dim)
        outer = 1
        for name in axis.dims[:position]:
            outer *= space.dim(name).size
        if axis.parts and position:
            return None
        found = shard(number, outer, axis.parts)
    return found if found is not None else REPLICATED


_SUMMABLE = {
    OpKind.GEMM,
    OpKind.GROUPED_GEMM,
    OpKind.CONV,
    OpKind.EMBEDDING,
    OpKind.REDUCE,
    OpKind.LOSS,
}


def _divided(op: Op, dim: str, kind: DimKind, padded: bool) -> Strategy | None:
    space = op.space
    inputs: list[Placement] = []
    for operand in space.inputs:
        placement = operand_placement(operand, dim, space)
        if placement is None:
            return None
        inputs.append(placement)
    outputs: list[Placement] = []
    for operand in space.outputs:
        placement = operand_placement(operand, dim, space)
        if placement is None:
            return None
        if kind is DimKind.REDUCTION:
            if placement.kind == "S":
                return None
            # a loss over a divided vocabulary exchanges its row statistics itself
            placement = REPLICATED if op.kind is OpKind.LOSS else PARTIAL
        elif placement.kind == "R":
            return None  # an output that every rank would compute in part
        outputs.append(placement)
    if not any(p.kind == "S" for p in inputs + outputs):
        return None
    gradients = tuple(p if p.kind == "S" else PARTIAL for p in inputs)
    return Strategy(dim, tuple(inputs), tuple(outputs), gradients, padded)


def op_strategies(
    op: Op, size: int, paddable: frozenset[int] = frozenset()
) -> tuple[Strategy, ...]:
    """Every strategy of ``op`` on an axis of ``size`` ranks, replicated first.

    ``paddable``: dim sizes (vocabularies) that may be divided unevenly, by padding.
    """
    everywhere = (REPLICATED,) * len(op.space.inputs)
    result = [
        Strategy("", everywhere, (REPLICATED,) * len(op.space.outputs), everywhere)
    ]
    if size == 1 or op.kind is OpKind.UNKNOWN:
        return tuple(result)
    for dim in op.space.dims:
        if dim.kind is DimKind.COUPLED or dim.size < size:
            continue
        if dim.kind is DimKind.REDUCTION and op.kind not in _SUMMABLE:
            continue
        padded = dim.size % size != 0
        if padded and dim.size not in paddable:
            continue
        strategy = _divided(op, dim.name, dim.kind, padded)
        if strategy is not None:
            result.append(strategy)
    if op.kind is OpKind.VIEW and len(op.space.inputs) == 1:
        outputs = (PARTIAL,) * len(op.space.outputs)
        result.append(Strategy("+", (PARTIAL,), outputs, (REPLICATED,)))
    return tuple(result)


def share(operand: Operand, strategy: Strategy, op: Op, size: int) -> float:
    """The fraction of ``operand``'s elements that one rank holds under ``strategy``."""
    if strategy.dim in ("", "+"):
        return 1.0
    if not any(strategy.dim in axis.dims for axis in operand.axes):
        return 1.0
    full = op.space.dim(strategy.dim).size
    return -(-full // size) / full
