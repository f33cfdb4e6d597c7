"""Exact minimisation by eliminating one node after another (min-sum dynamic program).

Eliminating node v with the later neighbours S leaves the message

    m(x_S) = min_k [ theta_v(k) + sum of edges and messages that contain v ].

Axes of every table are in decreasing order of elimination with v last, so a table is
aligned to another by inserting axes of length one.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.intra.core import Core
from planner.search.intra.problem import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Plan:
    """An elimination order; ``scope[v]`` are the nodes that v's message speaks of.

    ``held`` are nodes that the order leaves out because their tables would exceed
    the limit: :func:`minimise` keeps them at a given choice.
    """

    order: tuple[int, ...]
    scope: dict[int, tuple[int, ...]]
    held: tuple[int, ...]
    largest: float


def make_plan(
    core: Core,
    table_limit: float,
    *,
    nodes: Sequence[int] | None = None,
    rng: random.Random | None = None,
    leaning: float = 1.0,
) -> Plan:
    """Orders by the smallest table first. Where the smallest exceeds ``table_limit``
    a node is held instead: the one with most neighbours, or with ``rng`` one of the
    neighbourhood drawn with weight degree ** ``leaning``."""
    inside = range(core.count) if nodes is None else nodes
    member = [False] * core.count
    for v in inside:
        member[v] = True
    near = {v: {j for j, _ in core.near[v] if member[j]} for v in inside}
    weight = np.log2(core.sizes).tolist()
    bound = float(np.log2(table_limit)) + 1e-9

    def size(v: int) -> float:
        total = weight[v]
        for j in near[v]:
            total += weight[j]
        return total

    noise = {v: 0.0 if rng is None else rng.random() for v in inside}
    heap = [(size(v) + noise[v], v) for v in inside]
    heapq.heapify(heap)
    latest = {v: key for key, v in heap}
    order: list[int] = []
    scope: dict[int, tuple[int, ...]] = {}
    held: list[int] = []
    largest = 0.0
    while heap:
        key, v = heapq.heappop(heap)
        if latest.get(v) != key:
            continue
        around = near[v]
        if key - noise[v] > bound:
            gone = _to_hold(v, near, rng, leaning)
            held.append(gone)
            touched = near.pop(gone)
            del latest[gone]
            for j in touched:
                near[j].discard(gone)
        else:
            order.append(v)
            largest = max(largest, key - noise[v])
            scope[v] = tuple(around)
            touched = near.pop(v)
            del latest[v]
            for j in touched:
                near[j] |= touched
                near[j].discard(v)
                near[j].discard(j)
        for j in touched:
            new = size(j) + noise[j]
            if new != latest[j]:
                latest[j] = new
                heapq.heappush(heap, (new, j))
    position = {v: k for k, v in enumerate(order)}
    ordered = {
        v: tuple(sorted(around, key=lambda j: -position[j]))
        for v, around in (
            (v, [j for j in s if j in position]) for v, s in scope.items()
        )
    }
    return Plan(tuple(order), ordered, tuple(sorted(held)), 2.0**largest)


def _to_hold(
    v: int, near: dict[int, set[int]], rng: random.Random | None, leaning: float
) -> int:
    options = sorted([v, *near[v]])
    if rng is None:
        return max(options, key=lambda j: (len(near[j]), -j))
    return rng.choices(options, weights=[len(near[j]) ** leaning for j in options])[0]


@dataclass(frozen=True, slots=True)
class Tables:
    """The bucket of every node, axes ``(*scope, node)``, and the minimum."""

    bucket: dict[int, FloatArray]
    value: float


def eliminate(core: Core, plan: Plan, theta: Sequence[FloatArray]) -> Tables:
    """Runs the plan forward; ``theta`` replaces the node costs (held nodes must have
    been charged to it by the caller)."""
    bucket: dict[int, FloatArray] = {}
    inbox: dict[int, list[tuple[tuple[int, ...], FloatArray]]] = {}
    position = {v: k for k, v in enumerate(plan.order)}
    value = 0.0
    for v in plan.order:
        scope = plan.scope[v]
        table = theta[v]
        if scope:
            axis = {j: a for a, j in enumerate(scope)}
            here = position[v]
            width = len(scope) + 1
            for j, m in core.back[v]:
                if position.get(j, -1) > here:
                    shape = [1] * width
                    shape[axis[j]], shape[-1] = m.shape
                    table = table + np.reshape(m, shape)
            for others, message in inbox.pop(v, ()):
                shape = [1] * width
                shape[-1] = message.shape[-1]
                for j, length in zip(others, message.shape, strict=False):
                    shape[axis[j]] = length
                table = table + np.reshape(message, shape)
            least: FloatArray = table.min(axis=-1)
            inbox.setdefault(scope[-1], []).append((scope[:-1], least))
        else:
            for _, message in inbox.pop(v, ()):
                table = table + message
            value += float(table.min())
        bucket[v] = table
    return Tables(bucket, value)


def decode(plan: Plan, tables: Tables, choice: IntArray) -> None:
    """Writes the minimiser into ``choice`` (held nodes stay)."""
    for v in reversed(plan.order):
        at = tuple([choice[j] for j in plan.scope[v]])
        choice[v] = tables.bucket[v][at].argmin()


def held_theta(
    core: Core, plan: Plan, theta: Sequence[FloatArray], choice: IntArray
) -> list[FloatArray]:
    """Adds to ``theta`` the edges from held nodes at ``choice``."""
    out = list(theta)
    inside = set(plan.order)
    for h in range(core.count) if len(inside) < core.count else ():
        if h in inside:
            continue
        k = choice[h]
        for j, m in core.near[h]:
            if j in inside:
                out[j] = out[j] + m[k]
    return out
