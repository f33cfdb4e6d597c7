"""Split loop dims so that useful shards of merged axes can be said.

Forward: an axis that merges the batch with other dims, ``(b s)``, keeps both as dims
in every op downstream. Backward: an axis that is later split in parts (fused QKV) or
whose outer factor must stay whole (``3 x heads``) tells the op that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from passes.ir import Axis, DimKind, OpKind
from passes.spaces.registry import LETTERS, Spec

Factor = tuple[int, int]  # size, size per sample (0: fixed)


@dataclass(slots=True)
class Node:
    """An op under construction: tensor names in the spec's order, and its space."""

    name: str
    target: str
    module: str
    inputs: list[str]
    outputs: list[str]
    spec: Spec
    rates: dict[str, int]


def dim_rates(
    spec: Spec,
    operands: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    batch: int,
) -> dict[str, int]:
    """Per-sample size of every dim. ``operands``: (shape, per_sample) of each."""
    rates: dict[str, int] = {}
    merged: list[tuple[Axis, int]] = []
    for axes, (_, per_sample) in zip(spec.inputs + spec.outputs, operands, strict=True):
        for axis, rate in zip(axes, per_sample, strict=True):
            if axis.window:
                for d in axis.dims:
                    rates.setdefault(d, 0)
            elif len(axis.dims) == 1:
                rates[axis.dims[0]] = rate
            elif axis.dims:
                merged.append((axis, rate))
    for axis, rate in merged:
        unknown = [d for d in axis.dims if d not in rates]
        carried = any(rates.get(d) for d in axis.dims)
        for d in unknown:
            size = spec.dims[d][0]
            if rate and not carried and size % batch == 0:
                rates[d], carried = size // batch, True
            else:
                rates[d] = 0
    return {d: rates.get(d, 0) for d in spec.dims}


def axis_factors(axis: Axis, spec: Spec, rates: dict[str, int]) -> tuple[Factor, ...]:
    """The factors of an axis at the edges of its batch dims, outer to inner."""
    if len(axis.dims) < 2 or axis.window or axis.parts:
        return ()
    groups: list[Factor] = []
    for d in axis.dims:
        size, rate = spec.dims[d][0], rates[d]
        if groups and not rate and not groups[-1][1]:
            groups[-1] = (groups[-1][0] * size, 0)
        else:
            groups.append((size, rate))
    return tuple(groups) if len(groups) > 1 and any(r for _, r in groups) else ()


def _free(spec: Spec, near: str) -> str:
    for c in LETTERS:
        if c not in spec.dims:
            return c
    k = 1
    while f"{near}{k}" in spec.dims:
        k += 1
    return f"{near}{k}"


def _appearances(spec: Spec, dim: str) -> list[Axis]:
    return [
        axis for axes in spec.inputs + spec.outputs for axis in axes if dim in axis.dims
    ]


def divisible(spec: Spec, dim: str) -> bool:
    """Whether a dim may be split in place: no window, no parts, not coupled."""
    return spec.dims[dim][1] is not DimKind.COUPLED and not any(
        a.window or a.parts for a in _appearances(spec, dim)
    )


def split_dim(
    node: Node, dim: str, factors: Sequence[Factor], parts: tuple[int, ...] = ()
) -> None:
    """Replace ``dim`` by factors (the first keeps its name) wherever it appears."""
    spec = node.spec
    size, kind = spec.dims[dim]
    assert prod(s for s, _ in factors) == size, (node.name, dim, factors)
    names: list[str] = [dim]
    made: dict[str, tuple[int, DimKind]] = {}
    for name, value in spec.dims.items():
        if name != dim:
            made[name] = value
            continue
        made[dim] = (factors[0][0], kind)
        for k, (factor_size, _) in enumerate(factors[1:]):
            fresh = f"{dim}r" if parts else _free(spec, dim)
            while fresh in made or fresh in spec.dims or fresh in names:
                fresh = f"{dim}{k + 1}" if fresh in spec.dims else fresh + "r"
            names.append(fresh)
            made[fresh] = (factor_size, kind)
    spec.dims = made
    node.rates.update({n: rate for n, (_, rate) in zip(names, factors, strict=True)})

    def change(axis: Axis) -> Axis:
        if dim not in axis.dims:
            return axis
        dims: list[str] = []
        for d in axis.dims:
            dims += names if d == dim else [d]
        return Axis(tuple(dims), axis.window, parts if len(axis.dims) == 1 else ())

    spec.inputs = [tuple(change(a) for a in axes) for axes in spec.inputs]
    spec.outputs = [tuple(change(a) for a in axes) for axes in spec.outputs]


def adopt_factors(
    node: Node, operand: int, factors: Sequence[tuple[Factor, ...]]
) -> None:
    """Split the dims of an input whose producer keeps merged factors."""
    for axis, known in zip(node.spec.inputs[operand], factors, strict=True):
        if (
            len(known) > 1
            and len(axis.dims) == 1
            and not axis.parts
            and not axis.window
            and divisible(node.spec, axis.dims[0])
            and node.spec.dims[axis.dims[0]][0] == prod(s for s, _ in known)
        ):
            split_dim(node, axis.dims[0], known)


_ROOTS = (OpKind.GEMM, OpKind.CONV, OpKind.GROUPED_GEMM)
_CARRIERS = (OpKind.POINTWISE, OpKind.RANDOM, OpKind.VIEW, OpKind.COPY, OpKind.NORM)


class Backward:
    """Requests on tensor axes, handed to producers up to a matrix product."""

    def __init__(self, nodes: Sequence[Node], leaves: set[str]) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.maker: dict[str, tuple[Node, int]] = {
            name: (node, k) for node in nodes for k, name in enumerate(node.outputs)
        }

    def request(
        self,
        tensor: str,
        axis: int,
        factors: tuple[Factor, ...],
        parts: tuple[int, ...] = (),
    ) -> bool:
        """Split the axis in its producers; False where no matrix product makes it."""
        plan: dict[tuple[str, str], tuple[Node, str]] = {}
        if not self._trace(tensor, axis, plan, 0):
            return False
        for node, dim in plan.values():
            split_dim(node, dim, factors, parts)
        return True

    def _trace(
        self,
        tensor: str,
        axis: int,
        plan: dict[tuple[str, str], tuple[Node, str]],
        depth: int,
    ) -> bool:
        if tensor not in self.maker or depth > 16:
            return False
        node, position = self.maker[tensor]
        dims = node.spec.outputs[position][axis].dims
        if len(dims) != 1 or not divisible(node.spec, dims[0]):
            return False
        dim = dims[0]
        if any(len(a.dims) > 1 for a in _appearances(node.spec, dim)):
            return False
        if (node.name, dim) in plan:
            return True
        plan[node.name, dim] = (node, dim)
        if node.spec.kind in _ROOTS:
            return True
        if node.spec.kind not in _CARRIERS:
            return False
        found = False
        for name, axes in zip(node.inputs, node.spec.inputs, strict=True):
            for k, a in enumerate(axes):
                if a.dims != (dim,) or name in self.leaves:
                    continue
                if not self._trace(name, k, plan, depth + 1):
                    return False
                found = True
        return found


def whole_axes(nodes: Sequence[Node]) -> set[tuple[str, int]]:
    """Tensor axes that some consumer, seen through views, needs whole."""
    result: set[tuple[str, int]] = set()
    for node in reversed(nodes):
        through = node.spec.kind in (OpKind.VIEW, OpKind.POINTWISE, OpKind.COPY)
        tied: set[str] = set()
        if through:
            for name, axes in zip(node.outputs, node.spec.outputs, strict=True):
                for k, axis in enumerate(axes):
                    if len(axis.dims) == 1 and (name, k) in result:
                        tied.add(axis.dims[0])
        for name, axes in zip(node.inputs, node.spec.inputs, strict=True):
            for k, axis in enumerate(axes):
                if not axis.dims or (len(axis.dims) == 1 and axis.dims[0] in tied):
                    result.add((name, k))
    return result


def refine_backward(
    nodes: Sequence[Node], leaves: set[str], shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """Hand parts and whole outer factors to the ops that made the axis.

    Returns the slices whose parts found no matrix product (their parts are useless).
    """
    backward = Backward(nodes, leaves)
    whole = whole_axes(nodes)
    orphans: list[str] = []
    done: set[tuple[str, int]] = set()
    for node in nodes:
        if node.spec.kind not in (OpKind.VIEW, OpKind.POINTWISE) or not node.inputs:
            continue
        for k, axis in enumerate(node.spec.inputs[0]):
            key = (node.inputs[0], k)
            if axis.parts:
                unit = gcd(*axis.parts)
                rate = node.rates.get(axis.dims[0], 0)
                factors = ((unit, rate), (sum(axis.parts) // unit, 0))
                if key not in done and not backward.request(*key, factors, axis.parts):
                    if ".slice." in node.target or ".narrow." in node.target:
                        orphans.append(node.name)
                    continue
                done.add(key)
            elif len(axis.dims) > 1 and key not in done:
                outer = axis.dims[0]
                hit = any(
                    a.dims == (outer,) and (name, j) in whole
                    for name, axes in zip(node.outputs, node.spec.outputs, strict=True)
                    for j, a in enumerate(axes)
                )
                if not hit:
                    continue
                size = node.spec.dims[outer][0]
                full = shapes[node.inputs[0]][k]
                rates = node.rates
                inner = sum(rates[d] for d in axis.dims[1:])
                if inner and len(axis.dims) > 2:
                    continue
                made = ((size, rates[outer]), (full // size, inner))
                if backward.request(*key, made):
                    done.add(key)
    return orphans
