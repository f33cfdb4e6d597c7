"""Axis maps of tensors that only autograd sees.

Row statistics, masks, scores and log-sum-exps have no entry in the op's iteration
space. Their axes are found by size: an axis takes the loop dims of the operand axis (or
of neighbouring operand axes, where it merges them) with the same extent, first at the
same position, then anywhere, each loop dim at most once. Axes that fit nothing are
whole, so they are counted in full on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from passes.ir import Axis, Op, Operand, OpKind

_PADDED_ROWS = 32  # the efficient attention kernel rounds its log-sum-exps up


def _extents(op: Op) -> dict[str, int]:
    return {d.name: d.size for d in op.space.dims}


def _extent(axis: Axis, size: dict[str, int]) -> int:
    return prod(size[name] for name in axis.dims)


def saved_axes(op: Op, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """One axis per entry of ``shape``, over the loop dims of ``op``."""
    size = _extents(op)
    operands = [*op.space.outputs, *op.space.inputs]
    for operand in operands:
        extents = tuple(_extent(a, size) for a in operand.axes)
        if extents == shape and not any(a.window for a in operand.axes):
            return operand.axes
    used: set[str] = set()
    found: list[Axis] = []
    for position, length in enumerate(shape):
        axis = _one_sample(op, operands, position, size)
        if length > 1:
            options = _options(op, operands, position, len(shape))
            axis = next((a for a in options if _fits(a, length, size, used)), Axis())
        used.update(axis.dims)
        found.append(axis)
    return tuple(found)


def _one_sample(
    op: Op, operands: list[Operand], position: int, size: dict[str, int]
) -> Axis:
    """The batch axis at ``position`` of an operand traced with one sample."""
    carried = {d.name for d in op.space.dims if d.per_sample}
    for operand in operands:
        axis = operand.axes[position] if position < len(operand.axes) else Axis()
        if carried.issuperset(axis.dims) and axis.dims and _extent(axis, size) == 1:
            return axis
    return Axis()


def _options(
    op: Op, operands: list[Operand], position: int, rank: int
) -> Iterator[Axis]:
    """Candidate axes, likeliest first."""
    for operand in operands:
        if position < len(operand.axes):
            yield operand.axes[position]
    if op.kind is OpKind.ATTENTION and position == rank - 1:
        yield from (Axis((d.name,)) for d in op.space.dims if d.name == "kv")
    for operand in operands:
        yield from operand.axes
    for operand in operands:
        yield from _merged(operand)
    yield from (Axis((d.name,)) for d in op.space.dims)
    if op.kind is OpKind.ATTENTION and position == rank - 1:
        yield Axis(("q",))


def _merged(operand: Operand) -> Iterator[Axis]:
    """Runs of at least two neighbouring axes as one."""
    axes = operand.axes
    for start in range(len(axes)):
        for stop in range(start + 2, len(axes) + 1):
            run = axes[start:stop]
            if not any(a.window or a.parts for a in run):
                yield Axis(tuple(d for a in run for d in a.dims))


def _fits(axis: Axis, length: int, size: dict[str, int], used: set[str]) -> bool:
    if not axis.dims or axis.window or used.intersection(axis.dims):
        return False
    if any(d not in size for d in axis.dims):
        return False
    extent = _extent(axis, size)
    padded = axis.dims == ("q",) and length == -(-extent // _PADDED_ROWS) * _PADDED_ROWS
    return extent == length or padded


def rates_of(op: Op, operand: Operand, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Size per sample of each axis; empty where none carries the batch."""
    dims = {d.name: d for d in op.space.dims}
    rates: list[int] = []
    for axis, length in zip(operand.axes, shape, strict=True):
        rate = 0
        for name in axis.dims:
            dim = dims[name]
            if dim.per_sample:
                rate = length * dim.per_sample // dim.size
        rates.append(rate)
    return tuple(rates) if any(rates) else ()
