"""Prices on rows turned into node costs, and fast evaluation of whole choices."""

from __future__ import annotations

import itertools

import numpy as np

from planner.search.intra.core import Core
from planner.search.intra.problem import FloatArray, IntArray


class Pricer:
    """Flat views of a core: theta(prices) = cost + use charged at the rows' prices."""

    def __init__(self, core: Core) -> None:
        self.core = core
        sizes = core.sizes
        self._offset = np.concatenate([[0], np.cumsum(sizes)])
        self._cost = np.concatenate(core.cost) if core.cost else np.zeros(0)
        self._item_size = sizes[core.item_node]
        start = self._offset[core.item_node] - core.item_offset
        self._target = np.repeat(start, self._item_size) + np.arange(core.values.size)
        shapes = [m.shape for _, _, m in core.edges]
        lengths = np.array([r * c for r, c in shapes], dtype=np.int64)
        self._edge_offset = np.cumsum(lengths) - lengths
        self._edge_width = np.array([c for _, c in shapes], dtype=np.int64)
        self._from = np.array([i for i, _, _ in core.edges], dtype=np.int64)
        self._to = np.array([j for _, j, _ in core.edges], dtype=np.int64)
        flat = [m.ravel() for _, _, m in core.edges]
        self._edges = np.concatenate(flat) if flat else np.zeros(0)

    def theta(self, prices: FloatArray) -> list[FloatArray]:
        """Node costs at ``prices`` (shape (rows,), cost per unit of use)."""
        core = self.core
        along = np.concatenate([[0.0], np.cumsum(prices)])
        rate = along[core.item_end] - along[core.item_start]
        charge = np.bincount(
            self._target,
            core.values * np.repeat(rate, self._item_size),
            self._cost.size,
        )
        priced = self._cost + charge
        offset = self._offset.tolist()
        return [priced[a:b] for a, b in itertools.pairwise(offset)]

    def price(self, choice: IntArray) -> float:
        """Node and edge costs of ``choice`` without prices."""
        nodes = self._cost[self._offset[:-1] + choice].sum()
        at = self._edge_offset + choice[self._from] * self._edge_width
        return float(nodes + self._edges[at + choice[self._to]].sum())
