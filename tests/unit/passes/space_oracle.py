"""Checks an op's iteration space against what the op really computes.

For a parallel dim, the outputs of one shard may depend only on that shard of the
inputs; for a reduction dim of a linear op, the shards' outputs add up to the whole.
"""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false
from typing import Any

import torch
from torch import fx, nn

from passes.ir import Axis, DimKind, IterationSpace, Op, Operand, OpGraph, OpKind
from passes.lower import lower
from passes.trace import trace
from passes.traced import TracedModel

SHARDS = 2


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def traced_call(function: Any, *args: torch.Tensor) -> TracedModel:
    module = function if isinstance(function, nn.Module) else Call(function)
    return trace(module, args)


def coordinates(axis: Axis, size: int, dim: str, space: IterationSpace) -> torch.Tensor:
    """The value of loop dim ``dim`` at every position of the axis."""
    sizes = [space.dim(d).size for d in axis.dims]
    at = axis.dims.index(dim)
    inner = 1
    for s in sizes[at + 1 :]:
        inner *= s
    position = torch.arange(size)
    if axis.parts:
        assert at == 0
        assert sum(axis.parts) == size
        pieces = [torch.arange(p) // (p // sizes[0]) for p in axis.parts]
        return torch.cat(pieces)
    assert inner * sizes[at] <= size
    return position // inner % sizes[at]


def shard_mask(
    operand: Operand, shape: torch.Size, dim: str, space: IterationSpace, rank: int
) -> torch.Tensor | None:
    """Where the operand belongs to shard ``rank`` of ``dim``; None: not indexed."""
    mask: torch.Tensor | None = None
    chunk = space.dim(dim).size // SHARDS
    for k, axis in enumerate(operand.axes):
        if dim in axis.dims:
            mine = coordinates(axis, shape[k], dim, space) // chunk == rank
            view = [1] * len(shape)
            view[k] = shape[k]
            line = mine.view(view).expand(shape)
            mask = line if mask is None else mask & line
    return mask


def divisible_dims(op: Op) -> list[str]:
    """Dims that two ranks may divide: not coupled, no window or inner part."""
    result: list[str] = []
    for dim in op.space.dims:
        axes = [
            a
            for o in op.space.inputs + op.space.outputs
            for a in o.axes
            if dim.name in a.dims
        ]
        bad = any(a.window or (a.parts and a.dims[0] != dim.name) for a in axes)
        if dim.kind is not DimKind.COUPLED and dim.size % SHARDS == 0 and not bad:
            result.append(dim.name)
    return result


def _random(tensor: torch.Tensor, high: int) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape) > 0.5
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.randint(0, max(1, high), tensor.shape, dtype=tensor.dtype)
    # positive: a running variance must be
    return torch.rand(tensor.shape, dtype=tensor.dtype) + 0.1


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)]


class Oracle:
    """Runs single nodes of a traced graph on chosen inputs."""

    def __init__(self, traced: TracedModel, graph: OpGraph) -> None:
        self.graph = graph
        self.module = traced.graph_module
        self.nodes = {n.name: n for n in self.module.graph.nodes}

    def meta(self, name: str) -> torch.Tensor:
        node = self.nodes.get(name)
        if node is None:  # a parameter
            found: Any = self.module
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return node.meta["val"]

    def run(self, op: Op, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        node = self.nodes[op.name]

        def value(item: fx.Node) -> Any:
            name = str(item.target) if item.op == "get_attr" else item.name
            return inputs[name].clone()

        args = fx.node.map_arg(node.args, value)
        kwargs = fx.node.map_arg(dict(node.kwargs), value)
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        torch.manual_seed(1)
        return _flat(node.target(*args, **kwargs))  # type: ignore[operator]

    def check(self, op: Op) -> int:
        """How many dims were checked; fails where the space is wrong."""
        high = min((s for n in op.inputs for s in self.meta(n).shape), default=1)
        torch.manual_seed(0)
        inputs = {n: _random(self.meta(n), high) for n in op.inputs}
        if len(set(op.inputs)) != len(op.inputs):
            return 0
        expected = self.run(op, inputs)
        checked = 0
        for dim in divisible_dims(op):
            kind = op.space.dim(dim).kind
            if kind is DimKind.PARALLEL:
                self._parallel(op, dim, inputs, expected, high)
            elif op.kind in (OpKind.GEMM, OpKind.CONV, OpKind.GROUPED_GEMM):
                self._reduction(op, dim, inputs, expected)
            else:
                continue
            checked += 1
        return checked

    def _parallel(
        self, op: Op, dim: str, inputs: Any, expected: list[torch.Tensor], high: int
    ) -> None:
        for rank in range(SHARDS):
            changed = dict(inputs)
            for operand in op.space.inputs:
                value = inputs[operand.tensor]
                mask = shard_mask(operand, value.shape, dim, op.space, rank)
                if mask is not None:
                    other = _random(value, high)
                    changed[operand.tensor] = torch.where(mask, value, other)
            found = self.run(op, changed)
            by_name = dict(
                zip(op.outputs, zip(expected, found, strict=False), strict=False)
            )
            for operand in op.space.outputs:
                before, after = by_name[operand.tensor]
                mask = shard_mask(operand, before.shape, dim, op.space, rank)
                if mask is None:
                    continue
                torch.testing.assert_close(
                    after[mask],
                    before[mask],
                    rtol=1e-4,
                    atol=1e-4,
                    msg=lambda m, d=dim: f"{op.name} {op.target} dim {d}: {m}",
                )

    def _reduction(
        self, op: Op, dim: str, inputs: Any, expected: list[torch.Tensor]
    ) -> None:
        total: torch.Tensor | None = None
        for rank in range(SHARDS):
            changed = dict(inputs)
            for k, operand in enumerate(op.space.inputs):
                value = inputs[operand.tensor]
                mask = shard_mask(operand, value.shape, dim, op.space, rank)
                if mask is not None:
                    changed[operand.tensor] = value * mask
                elif k > 1 and rank:  # the bias, once
                    changed[operand.tensor] = torch.zeros_like(value)
            part = self.run(op, changed)[0]
            total = part if total is None else total + part
        torch.testing.assert_close(total, expected[0], rtol=1e-3, atol=1e-3)


def check_all(function: Any, *args: torch.Tensor) -> int:
    """Checks every op of a function's graph; returns how many dims were checked."""
    traced = traced_call(function, *args)
    graph = lower(traced)
    assert not any(op.kind is OpKind.UNKNOWN for op in graph.ops), graph.warnings
    oracle = Oracle(traced, graph)
    return sum(oracle.check(op) for op in graph.ops)
