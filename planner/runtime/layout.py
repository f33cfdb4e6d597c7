"""Which part of a tensor a rank holds: index maps of the plan's placements.

A shard takes its share of every part of an axis (``S(1;3x)``: three equal parts), which
DTensor's ``Shard`` can not say; these maps cut and rebuild it. Shares are those of
``torch.chunk``: ``ceil(part / size)`` for the first ranks, what is left for the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.search.placements import Placement


def parts_of(extent: int, placement: Placement) -> tuple[int, ...]:
    """Sizes of the parts of a sharded axis of ``extent`` elements."""
    if placement.parts:
        assert sum(placement.parts) == extent, (placement, extent)
        return placement.parts
    assert extent % placement.outer == 0, (placement, extent)
    return (extent // placement.outer,) * placement.outer


def share(part: int, size: int, rank: int) -> tuple[int, int]:
    """(start, length) of one rank's share of a part."""
    step = -(-part // size)
    start = min(rank * step, part)
    return start, min(step, part - start)


def local_extent(extent: int, placement: Placement, size: int, rank: int) -> int:
    """Elements of a sharded axis that ``rank`` holds."""
    return sum(share(p, size, rank)[1] for p in parts_of(extent, placement))


def local_shape(
    shape: Sequence[int], placement: Placement, size: int, rank: int
) -> tuple[int, ...]:
    """Shape of the local tensor; of a replicated or partial one, the whole."""
    if placement.kind != "S":
        return tuple(shape)
    extent = local_extent(shape[placement.axis], placement, size, rank)
    return (*shape[: placement.axis], extent, *shape[placement.axis + 1 :])


def cut(full: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """The local part of ``full`` (a view where that is possible)."""
    if placement.kind != "S":
        return full
    axis, at = placement.axis, 0
    pieces: list[Tensor] = []
    for part in parts_of(full.shape[axis], placement):
        start, length = share(part, size, rank)
        pieces.append(full.narrow(axis, at + start, length))
        at += part
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def join(locals_: Sequence[Tensor], placement: Placement, extent: int) -> Tensor:
    """The full tensor from all ranks' parts; the inverse of :func:`cut`."""
    axis, size = placement.axis, len(locals_)
    parts = parts_of(extent, placement)
    if len(parts) == 1:
        return torch.cat(list(locals_), axis)
    offsets = [0] * size
    pieces: list[Tensor] = []
    for part in parts:
        for rank, local in enumerate(locals_):
            _, length = share(part, size, rank)
            pieces.append(local.narrow(axis, offsets[rank], length))
            offsets[rank] += length
    return torch.cat(pieces, axis)


def padded(local: Tensor, axis: int, extent: int) -> Tensor:
    """``local`` with zeros appended up to ``extent`` along ``axis``, contiguous."""
    missing = extent - local.shape[axis]
    if not missing:
        return local.contiguous()
    shape = list(local.shape)
    shape[axis] = missing
    return torch.cat([local, local.new_zeros(shape)], axis)
