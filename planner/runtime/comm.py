"""Collectives on one mesh axis, and the autograd functions that move placements.

A :class:`Move` turns a tensor from one placement into another, and its gradient from
the state that the reader gives into the one that the maker needs, exactly as the
planner prices them. Everything that is issued is written to a :class:`Recorder`, in the
plan's own count of bytes: the full tensor of an all-gather, a reduce-scatter or an
all-reduce, one rank's send buffer of an all-to-all.
"""

from __future__ import annotations

# pyright: reportDeprecated=false
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime.layout import cut, join, local_extent, padded
from planner.search.placements import REPLICATED, Placement

# renamed in torch 2.14
_all_gather: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective of this rank."""

    where: str
    kind: str
    axis: str
    phase: str
    group_size: int
    nbytes: int


@dataclass(slots=True)
class Recorder:
    """What this rank issued since :meth:`start`."""

    issued: list[Issued] = field(default_factory=list[Issued])
    active: bool = False
    in_backward: bool = False
    where: str = ""

    def start(self) -> None:
        self.issued.clear()
        self.active = True

    def add(
        self, kind: str, axis: str, size: int, nbytes: int, phase: str, where: str = ""
    ) -> None:
        if not self.active:
            return
        if phase == "forward" and self.in_backward:
            phase = "recompute"
        self.issued.append(
            Issued(where or self.where, kind, axis, phase, size, int(nbytes))
        )

    @contextmanager
    def backward(self) -> Generator[None]:
        """Marks what is issued inside as backward (or recompute)."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as this rank sees it. ``ranks``: global ranks of its group."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: Any
    recorder: Recorder = field(repr=False)

    def all_reduce(
        self, x: Tensor, phase: str, *, maximum: bool = False, where: str = ""
    ) -> Tensor:
        """The sum (or maximum) over the axis, in a new tensor."""
        if self.size == 1:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        self.recorder.add(
            "all_reduce", self.name, self.size, _nbytes(out), phase, where
        )
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        if not out.is_meta:  # an audit issues on paper
            dist.all_reduce(out, op, group=self.group)
        return out

    def all_reduce_(
        self, flat: Tensor, phase: str, where: str = "", elements: int = -1
    ) -> None:
        """The sum over the axis, in place."""
        if self.size == 1:
            return
        count = flat.numel() if elements < 0 else elements
        nbytes = count * flat.element_size()
        self.recorder.add("all_reduce", self.name, self.size, nbytes, phase, where)
        if not flat.is_meta:
            dist.all_reduce(flat, group=self.group)

    def gather_flat(
        self, local: Tensor, phase: str, where: str = "", elements: int = -1
    ) -> Tensor:
        """[n] of every rank -> [size, n]; ``elements`` of these are not padding."""
        if self.size == 1:
            return local.unsqueeze(0)
        out = local.new_empty(self.size * local.numel())
        count = out.numel() if elements < 0 else elements
        nbytes = count * out.element_size()
        self.recorder.add("all_gather", self.name, self.size, nbytes, phase, where)
        if not out.is_meta:
            _all_gather(out, local.contiguous(), group=self.group)
        return out.view(self.size, -1)

    def scatter_sum_flat(
        self, full: Tensor, phase: str, where: str = "", elements: int = -1
    ) -> Tensor:
        """[size, n] -> this rank's [n], summed over the axis."""
        if self.size == 1:
            return full[0]
        out = full.new_empty(full.shape[1])
        count = full.numel() if elements < 0 else elements
        nbytes = count * full.element_size()
        self.recorder.add("reduce_scatter", self.name, self.size, nbytes, phase, where)
        if not out.is_meta:
            _reduce_scatter(out, full.contiguous().view(-1), group=self.group)
        return out

    def exchange_flat(self, pieces: Tensor, phase: str, nbytes: int) -> Tensor:
        """All-to-all of [size, n]; ``nbytes`` of them are not padding."""
        out = torch.empty_like(pieces)
        self.recorder.add("all_to_all", self.name, self.size, nbytes, phase)
        if not out.is_meta:
            dist.all_to_all_single(
                out.view(-1), pieces.contiguous().view(-1), group=self.group
            )
        return out


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _shard_shapes(
    shape: Sequence[int], p: Placement, size: int
) -> tuple[list[int], list[int]]:
    """Padded local shape and the true extent of every rank along the axis."""
    extents = [local_extent(shape[p.axis], p, size, r) for r in range(size)]
    largest = list(shape)
    largest[p.axis] = max(extents)
    return largest, extents


def _gather(
    x: Tensor, p: Placement, shape: Sequence[int], axis: Axis, phase: str
) -> Tensor:
    wide, extents = _shard_shapes(shape, p, axis.size)
    flat = padded(x, p.axis, wide[p.axis]).view(-1)
    rows = axis.gather_flat(flat, phase, elements=prod(shape))
    parts = [
        row.view(wide).narrow(p.axis, 0, n)
        for row, n in zip(rows, extents, strict=True)
    ]
    return join(parts, p, shape[p.axis])


def _scatter(x: Tensor, p: Placement, axis: Axis, phase: str) -> Tensor:
    wide, extents = _shard_shapes(x.shape, p, axis.size)
    rows = [
        padded(cut(x, p, axis.size, r), p.axis, wide[p.axis]).reshape(-1)
        for r in range(axis.size)
    ]
    mine = axis.scatter_sum_flat(torch.stack(rows), phase, elements=x.numel())
    return mine.view(wide).narrow(p.axis, 0, extents[axis.rank])


def _exchange(
    x: Tensor,
    src: Placement,
    dst: Placement,
    shape: Sequence[int],
    axis: Axis,
    phase: str,
) -> Tensor:
    if src.axis == dst.axis:
        whole = _gather(x, src, shape, axis, phase)
        return cut(whole, dst, axis.size, axis.rank).clone()
    wide, held = _shard_shapes(shape, src, axis.size)
    wide, wanted = _shard_shapes(wide, dst, axis.size)
    rows: list[Tensor] = []
    for rank in range(axis.size):
        piece = padded(cut(x, dst, axis.size, rank), src.axis, wide[src.axis])
        rows.append(padded(piece, dst.axis, wide[dst.axis]).view(-1))
    whole_bytes = prod(shape) * x.element_size()
    got = axis.exchange_flat(torch.stack(rows), phase, whole_bytes // axis.size)
    parts = [
        row.view(wide).narrow(src.axis, 0, n).narrow(dst.axis, 0, wanted[axis.rank])
        for row, n in zip(got, held, strict=True)
    ]
    return join(parts, src, shape[src.axis])


def convert(
    x: Tensor,
    src: Placement,
    dst: Placement,
    shape: Sequence[int],
    axis: Axis,
    phase: str,
    *,
    gradient: bool = False,
) -> Tensor:
    """``x`` (the local part under ``src`` of a tensor of ``shape``) under ``dst``.

    ``shape`` is the tensor's full shape on this axis. A gradient that is whole on every
    rank becomes a pending sum by keeping it on the first rank alone.
    """
    if src == dst or axis.size == 1:
        return x
    if dst.kind == "P":
        assert gradient, (src, dst)
        assert src.kind == "R", (src, dst)
        return x if axis.rank == 0 else torch.zeros_like(x)
    if src.kind == "R":
        return cut(x, dst, axis.size, axis.rank).clone(
            memory_format=torch.contiguous_format
        )
    if src.kind == "P":
        if dst.kind == "R":
            return axis.all_reduce(x, phase)
        return _scatter(x, dst, axis, phase)
    if dst.kind == "R":
        return _gather(x, src, shape, axis, phase)
    return _exchange(x, src, dst, shape, axis, phase)


@dataclass(frozen=True, slots=True)
class Move:
    """``src`` becomes ``dst``; the gradient comes as ``gives``, leaves as ``needs``."""

    src: Placement
    dst: Placement
    gives: Placement
    needs: Placement

    @property
    def idle(self) -> bool:
        return self.src == self.dst and self.gives == self.needs


STAY = Move(REPLICATED, REPLICATED, REPLICATED, REPLICATED)


class _MoveFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, move: Move, shape: tuple[int, ...], axis: Axis
    ) -> Tensor:
        ctx.move, ctx.shape, ctx.axis = move, shape, axis
        ctx.where = axis.recorder.where
        out = convert(x, move.src, move.dst, shape, axis, "forward")
        return out.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        move, axis = ctx.move, ctx.axis
        axis.recorder.where = ctx.where
        out = convert(
            grad, move.gives, move.needs, ctx.shape, axis, "backward", gradient=True
        )
        return out, None, None, None


def moved(x: Tensor, move: Move, shape: tuple[int, ...], axis: Axis) -> Tensor:
    """Applies ``move`` to the local tensor ``x`` of a tensor of full ``shape``."""
    if axis.size == 1 or move.idle:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return convert(x, move.src, move.dst, shape, axis, "forward")
    return _MoveFunction.apply(x, move, shape, axis)  # pyright: ignore[reportReturnType]


class _SumFunction(torch.autograd.Function):
    """An all-reduce whose result every rank uses alike: the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis of values that every rank has a share of."""
    return _SumFunction.apply(x, axis)  # pyright: ignore[reportReturnType]
