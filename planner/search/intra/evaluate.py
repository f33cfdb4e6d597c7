"""Checks and prices a choice by the problem's own rule. Knows no solver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.intra.problem import IntArray, Problem


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Objective of a choice, the highest use at any instant, and whether it is
    allowed: cost finite and the peak within the limit."""

    cost: float
    peak_usage: float
    valid: bool


def evaluate(problem: Problem, choice: IntArray) -> Evaluation:
    """Prices ``choice`` (shape (nodes,)): node costs plus edge costs; use summed over
    the nodes that live at each instant (half-open intervals)."""
    picks = [int(x) for x in choice]
    if len(picks) != len(problem.costs):
        raise ValueError("one strategy per node is needed")
    cost = 0.0
    events: dict[int, float] = {}
    for x, c, u, (start, end) in zip(
        picks, problem.costs, problem.usages, problem.intervals.tolist(), strict=True
    ):
        if not 0 <= x < len(c):
            raise ValueError(f"strategy {x} of a node with {len(c)}")
        cost += float(c[x])
        if end > start:
            events[start] = events.get(start, 0.0) + float(u[x])
            events[end] = events.get(end, 0.0) - float(u[x])
    for i, j, m in problem.edges:
        cost += float(m[picks[i], picks[j]])
    peak, level = 0.0, 0.0
    for t in sorted(events):
        level += events[t]
        peak = max(peak, level)
    limit = problem.usage_limit
    fits = limit is None or peak <= limit * (1 + 1e-12)
    return Evaluation(cost, peak, bool(np.isfinite(cost)) and fits)
