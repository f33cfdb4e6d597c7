"""Where a tensor lives on one mesh axis, and what it costs to move it.

A placement is DTensor's, on one axis of ``size`` ranks: replicated ``R``, sharded
``S(axis)`` or a pending sum ``P``. A shard may be *strided*: ``outer`` equal chunks of
the axis, each divided (a flattened ``(batch, seq)`` axis sharded by sequence), or
``parts`` unequal ones (a fused QKV weight), every rank taking its share of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Placement:
    """``kind`` is "R", "S" or "P"; ``axis`` the tensor axis of a shard."""

    kind: str
    axis: int = -1
    outer: int = 1
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "P":
            return "P(sum)"
        if self.kind == "R":
            return "R"
        if self.parts:
            return f"S({self.axis};{','.join(map(str, self.parts))})"
        if self.outer > 1:
            return f"S({self.axis};{self.outer}x)"
        return f"S({self.axis})"


REPLICATED = Placement("R")
PARTIAL = Placement("P")


def shard(axis: int, outer: int = 1, parts: tuple[int, ...] = ()) -> Placement:
    """A shard in canonical form: equal parts are written as ``outer`` chunks."""
    if parts and len(set(parts)) == 1:
        return Placement("S", axis, len(parts) * outer)
    return Placement("S", axis, outer, parts)


@dataclass(frozen=True, slots=True)
class Reshard:
    """One redistribution: the collective it needs, "" for none or a local slice."""

    kind: str
    nbytes: float


FREE = Reshard("", 0.0)


def reshard(src: Placement, dst: Placement, nbytes: float, size: int) -> Reshard | None:
    """The collective that turns ``src`` into ``dst`` for a tensor of ``nbytes`` in all.

    None: not possible (nothing becomes a pending sum except one that is one already).
    Moving between two shards is an all-to-all of the local ``nbytes / size``.
    """
    if src == dst or nbytes == 0:
        return FREE
    if dst.kind == "P":
        return None
    if src.kind == "R":
        return FREE
    if src.kind == "P":
        return Reshard("all_reduce" if dst.kind == "R" else "reduce_scatter", nbytes)
    if dst.kind == "R":
        return Reshard("all_gather", nbytes)
    return Reshard("all_to_all", nbytes / size)


def gradient_reshard(
    src: Placement, dst: Placement, nbytes: float, size: int
) -> Reshard | None:
    """As :func:`reshard`, for a gradient: a replicated one may stand for a sum."""
    if dst.kind == "P":
        return FREE if src.kind in "RP" else None
    return reshard(src, dst, nbytes, size)


class CommPricer(Protocol):
    """Seconds of one collective on the mesh axis that is being solved."""

    def __call__(self, kind: str, nbytes: float) -> float: ...
