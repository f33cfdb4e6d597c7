"""Use over live ranges as few rows of a matrix, each with its own capacity.

An *item* is one interval of rows in which a node uses ``vector[x]``. Time is cut at
the items' ends; an instant is dropped when nothing that can be chosen overflows it,
or when a neighbouring instant has the same or more live items and no more capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.search.intra.problem import BoolArray, FloatArray, IntArray, ints

Items = dict[tuple[int, int], FloatArray]


class Infeasible(Exception):
    """No choice satisfies the constraints: proved."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Capacity per row, shape (rows,); items use half-open ranges of rows."""

    capacity: FloatArray

    @property
    def count(self) -> int:
        return int(self.capacity.size)


def merge_items(
    target: Items, extra: Iterable[tuple[tuple[int, int], FloatArray]]
) -> None:
    """Adds ``extra`` to ``target``; items over the same range become one."""
    for span, vector in extra:
        old = target.get(span)
        target[span] = vector if old is None else old + vector


def compress(
    use: dict[int, Items], capacity: FloatArray
) -> tuple[dict[int, Items], Rows]:
    """Moves each item's minimum into the capacity, then drops rows that cannot bind.

    ``capacity`` has shape (instants,); items of ``use`` index it. Returns items over
    the rows that are left. Raises :class:`Infeasible` when the minima do not fit.
    """
    size = capacity.size
    flat = [
        (node, s, e, vector)
        for node, items in use.items()
        for (s, e), vector in items.items()
        if e > s
    ]
    starts = np.array([f[1] for f in flat], dtype=np.int64)
    ends = np.array([f[2] for f in flat], dtype=np.int64)
    low = np.array([f[3].min() for f in flat], dtype=np.float64)
    high = np.array([f[3].max() for f in flat], dtype=np.float64)
    room = capacity - spread(starts, ends, low, size)
    slack = 1e-12 * np.maximum(1.0, np.abs(capacity))
    if (room < -slack).any():
        raise Infeasible
    room = np.maximum(room, 0.0)
    moving = high > low
    reach = spread(starts[moving], ends[moving], (high - low)[moving], size)
    kept = _binding_rows(starts[moving], ends[moving], room, reach > room + slack)
    position = np.concatenate([[0], np.cumsum(kept)])
    out: dict[int, Items] = {}
    for k in ints(np.flatnonzero(moving)):
        node, s, e, vector = flat[k]
        span = (int(position[s]), int(position[e]))
        if span[1] > span[0]:
            merge_items(out.setdefault(node, {}), [(span, vector - low[k])])
    return out, Rows(room[kept])


def spread(
    starts: IntArray, ends: IntArray, amount: FloatArray, size: int
) -> FloatArray:
    """The sum per row, shape (size,), of amounts over half-open ranges of rows."""
    change: FloatArray = np.bincount(starts, amount, size + 1).astype(np.float64)
    change -= np.bincount(ends, amount, size + 1)
    return np.cumsum(change)[:size]


def _binding_rows(
    starts: IntArray, ends: IntArray, room: FloatArray, binding: BoolArray
) -> BoolArray:
    """Mask of the rows that no neighbouring row implies."""
    size = room.size
    begun = np.cumsum(np.bincount(starts, minlength=size + 1))[:size]
    ended = np.cumsum(np.bincount(ends, minlength=size + 1))[:size]
    rows = np.flatnonzero(binding)
    while rows.size > 1:
        before = rows.size
        here, after = rows[:-1], rows[1:]
        implied = (ended[after] == ended[here]) & (room[after] <= room[here])
        rows = rows[np.append(~implied, True)]
        here, after = rows[:-1], rows[1:]
        implied = (begun[after] == begun[here]) & (room[here] <= room[after])
        rows = rows[np.append(True, ~implied)]
        if rows.size == before:
            break
    kept = np.zeros(size, dtype=np.bool_)
    kept[rows] = True
    return kept
