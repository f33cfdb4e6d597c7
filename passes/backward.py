"""What autograd keeps from the forward for the backward.

The traced graph is run once on meta tensors under saved-tensor hooks. A kept tensor is
identified by its storage: a view of a parameter, buffer or input costs nothing, an
activation that several ops keep counts at the first of them, and what only autograd
sees (row statistics, dropout masks, log-softmax) becomes a tensor of kind SAVED.

Where CPU and CUDA kernels differ the CUDA ones count: a fused attention keeps its
operands, its output and one FP32 log-sum-exp per row, never the scores, and dropout
keeps a mask of bools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from passes.ir import Axis, Op, Operand, OpGraph, OpKind, Tensor, TensorKind
from passes.lower import PROBE, SECOND_PROBE, with_batch
from passes.traced import TracedModel


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that a node keeps. ``name`` is the graph's where it has one."""

    node: str
    name: str | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def known(self) -> bool:
        return self.name is not None


class _Opaque(torch.autograd.Function):
    """Stands for a kernel whose kept tensors are stated, not observed."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensors[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("the recorded graph is never run backward")


_ATTENTION = "aten.scaled_dot_product_attention"
_DROPOUT = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout")


class _Recorder(fx.Interpreter):
    """Runs a traced graph on meta tensors and notes what each node keeps."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.names: dict[int, str | None] = {}  # storage to its first tensor's name
        self.kept: list[SavedTensor] = []
        self.counted: set[tuple[int, int, int]] = set()
        self.alive: list[Any] = []  # a freed storage's address could come back
        self.found: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.found.append(tensor)
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        self.found = []
        quiet = bool(n.meta.get("no_grad", False))
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        with torch.set_grad_enabled(not quiet), hooks:
            value = self._run(n)
        self._note(n, value)
        return value

    def _run(self, n: fx.Node) -> Any:
        target = str(n.target)
        if n.op == "call_function" and target.startswith((_ATTENTION, *_DROPOUT)):
            args, _ = self.fetch_args_kwargs_from_env(n)
            tensors = [a for a in pytree.tree_leaves(args) if _is_tensor(a)]
            wants = any(t.requires_grad for t in tensors)
            shape = tuple(n.meta["val"].shape)
            out = _Opaque.apply(shape, *tensors)
            if wants and torch.is_grad_enabled():
                self._stated(n, target, args, tensors, out)
            return out
        return super().run_node(n)

    def _stated(
        self, n: fx.Node, target: str, args: Any, tensors: list[Any], out: Any
    ) -> None:
        if target.startswith(_ATTENTION):
            self.found = [*tensors, out, out.new_empty(out.shape[:-1]).float()]
        elif _probability(args) > 0 and bool(args[2] if len(args) > 2 else True):
            self.found = [torch.empty(out.shape, dtype=torch.bool, device="meta")]

    def _note(self, n: fx.Node, value: Any) -> None:
        named = n.op in ("get_attr", "placeholder")
        for item in pytree.tree_leaves(value):
            if _is_tensor(item):
                self.alive.append(item)
                key = _storage(item)
                self.names.setdefault(key, None if named else n.name)
        for tensor in self.found:
            self.alive.append(tensor)
            key = _storage(tensor)
            if key in self.names and self.names[key] is None:
                continue  # a parameter, buffer or input
            whole = (key, 0, -1)
            part = (key, int(tensor.storage_offset()), tensor.numel())
            full = tensor.numel() * tensor.element_size()
            complete = full >= tensor.untyped_storage().nbytes()
            if whole in self.counted or part in self.counted:
                continue
            self.counted.add(whole if complete else part)
            name = self._name_of(n, tensor, value)
            self.kept.append(
                SavedTensor(
                    n.name,
                    name,
                    tuple(tensor.shape),
                    str(tensor.dtype).removeprefix("torch."),
                )
            )

    def _name_of(self, n: fx.Node, tensor: torch.Tensor, value: Any) -> str | None:
        """The node, among this one and its operands, whose value this is."""
        for node in n.all_input_nodes:
            if _same(self.env.get(node), tensor):
                return node.name
        return n.name if _same(value, tensor) else None


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _same(held: Any, tensor: torch.Tensor) -> bool:
    return (
        _is_tensor(held)
        and _storage(held) == _storage(tensor)
        and held.numel() == tensor.numel()
        and held.storage_offset() == tensor.storage_offset()
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _probability(args: Any) -> float:
    return float(args[1]) if len(args) > 1 else 0.5


def saved_tensors(module: fx.GraphModule) -> tuple[SavedTensor, ...]:
    """What each node keeps, in graph order; parameters and inputs left out.

    ``module``: a traced graph with ``meta["val"]`` on every node.
    """
    inputs = [
        _on_meta(node.meta.get("val"))
        for node in module.graph.find_nodes(op="placeholder")
    ]
    recorder = _Recorder(module)
    recorder.run(*inputs)
    return tuple(recorder.kept)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def annotate_saved(graph: OpGraph, traced: TracedModel) -> OpGraph:
    """``graph``, as lowered from ``traced``, with ``Op.saved`` filled in."""
    if not traced.training:
        return graph
    scales = any(t.per_sample for t in graph.tensors)
    if graph.batch != PROBE and scales:
        # one sample's axes look like broadcasts: read the shapes at another batch
        probed = annotate_saved(with_batch(graph, PROBE), traced)
        return with_batch(probed, graph.batch)
    here = saved_tensors(traced.at_batch(graph.batch))
    there = saved_tensors(traced.at_batch(SECOND_PROBE)) if scales else here
    by_node: dict[str, list[tuple[SavedTensor, tuple[int, ...]]]] = {}
    for item, rates in zip(here, _rates(here, there, graph.batch), strict=True):
        by_node.setdefault(item.node, []).append((item, rates))
    known = {t.name for t in graph.tensors}
    tensors: list[Tensor] = list(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        saved: list[Operand] = []
        for number, (item, rates) in enumerate(by_node.get(op.name, ())):
            operand = _known_operand(op, item) if item.name in known else None
            if operand is None:
                name = f"{op.name}.saved{number}"
                kept = Tensor(name, item.shape, item.dtype, TensorKind.SAVED)
                tensors.append(replace(kept, per_sample=rates))
                operand = Operand(name, _axes(graph, op, item.shape))
            saved.append(operand)
        ops.append(replace(op, saved=tuple(saved)) if saved else op)
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors))


def _rates(
    here: Sequence[SavedTensor], there: Sequence[SavedTensor], batch: int
) -> list[tuple[int, ...]]:
    """Size per sample of each axis of what is kept at two batches."""
    assert [s.node for s in here] == [s.node for s in there], "one structure"
    result: list[tuple[int, ...]] = []
    for one, two in zip(here, there, strict=True):
        rates = tuple(
            0 if a == b else a // batch
            for a, b in zip(one.shape, two.shape, strict=True)
        )
        result.append(rates if any(rates) else ())
    return result


def _known_operand(op: Op, item: SavedTensor) -> Operand | None:
    operands = op.space.inputs + op.space.outputs
    return next((o for o in operands if o.tensor == item.name), None)


def _axes(graph: OpGraph, op: Op, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """How the op's dims index a kept tensor: as the operand that it resembles most."""
    best: tuple[Axis, ...] = tuple(Axis() for _ in shape)
    most = 0
    for operand in op.space.outputs + op.space.inputs:
        axes = _like(op, operand, graph.tensor(operand.tensor).shape, shape)
        score = sum(len(a.dims) for a in axes)
        if score > most:
            best, most = axes, score
    return best


def _like(
    op: Op, operand: Operand, source: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Axis, ...]:
    """Axes of ``shape`` where its axes are those of ``source``, alone or merged."""
    size = {d.name: d.size for d in op.space.dims}
    axes: list[Axis] = []
    at = 0
    for length in shape:
        start, total = at, 1
        while at < len(source) and total < length:
            total *= source[at]
            at += 1
        merged = operand.axes[start:at]
        dims = tuple(d for a in merged for d in a.dims)
        plain = not any(a.window or a.parts for a in merged)
        full = prod(size[d] for d in dims) == total == length > 1
        axes.append(Axis(dims) if plain and full else Axis())
        if total > length:
            at = start + 1
    return tuple(axes)


def saved_bytes(graph: OpGraph, ops: Iterable[Op] | None = None) -> int:
    """Bytes kept by ``ops`` (default: all) for one micro-batch on one device."""
    chosen = graph.ops if ops is None else ops
    return sum(graph.tensor(s.tensor).nbytes for op in chosen for s in op.saved)


def block_working_set(graph: OpGraph, start: int, stop: int) -> int:
    """Peak bytes while ``ops[start:stop]`` run forward again and then backward.

    All that they keep, plus the largest pair of gradients in flight (of an op's
    outputs and of its inputs).
    """
    ops = graph.ops[start:stop]
    flowing = 0
    for op in ops:
        if op.kind is OpKind.VIEW:
            continue
        made = sum(graph.tensor(t).nbytes for t in op.outputs)
        passed = sum(
            graph.tensor(t).nbytes for t in op.inputs if graph.tensor(t).requires_grad
        )
        flowing = max(flowing, made + passed)
    return saved_bytes(graph, ops) + flowing
