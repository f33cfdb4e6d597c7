"""What autograd keeps from the forward for the backward, op by op.

The traced graph is run once on meta tensors under saved-tensor hooks
(:func:`saved_tensors`); kernels that keep something else on CUDA stand in for their
ops (:mod:`passes.saved_kernels`). A kept tensor is identified by its storage, and a
storage counts once, in full, however many ops keep it or views of it:

* storages of parameters, buffers and inputs cost nothing (they live anyway);
* the first op that keeps a whole activation owns it; if several layers of a list keep
  it (rotary angles), its producer does, so that the layers stay equal;
* where only views are kept, each view counts at the first op that keeps it if the
  views together fill the storage (the thirds of a fused QKV product); otherwise the
  storage lives as a whole because of a part of it, and its producer owns it;
* what only autograd sees (row statistics, masks, log-softmax) is a tensor of kind
  SAVED of the op that keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from passes.ir import DTYPE_BYTES, Op, Operand, OpGraph, Tensor, TensorKind
from passes.lower import PROBE, with_batch
from passes.saved_axes import rates_of, saved_axes
from passes.saved_kernels import KERNELS
from passes.traced import TracedModel


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that ``node`` keeps and owns; sizes in elements and bytes.

    ``name``: the graph's tensor (a node's name), "" for one that only autograd sees.
    """

    node: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that autograd packed while ``node`` ran."""

    node: str
    module: str
    tensor: torch.Tensor
    names: tuple[tuple[str, torch.Tensor], ...]  # graph tensors on the same storage


@dataclass(slots=True)
class _Storage:
    """One storage: who made it and every tensor on it that was packed."""

    nbytes: int
    free: bool = False  # a parameter, buffer or input
    producer: tuple[str, str, torch.Tensor] | None = None  # node, tensor name, value
    kept: list[_Kept] = field(default_factory=list[_Kept])


class _Recorder(fx.Interpreter):
    """Runs a traced graph on meta tensors and notes what each node keeps."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.storages: dict[int, _Storage] = {}
        self.alive: list[Any] = []  # a freed storage's address could come back
        self.packed: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor)
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        self.packed = []
        quiet = bool(n.meta.get("no_grad", False))
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        with torch.set_grad_enabled(not quiet), hooks:
            value = self._compute(n)
        self._note(n, value)
        return value

    def _compute(self, n: fx.Node) -> Any:
        name = str(getattr(n.target, "_name", None) or n.target)
        stand_in = KERNELS.get(name.replace("::", "."), KERNELS.get(str(n.target)))
        if n.op == "call_function" and stand_in is not None:
            return stand_in(n, *self.fetch_args_kwargs_from_env(n))
        return super().run_node(n)

    def _note(self, n: fx.Node, value: Any) -> None:
        if n.op == "output":
            return
        leaf = n.op in ("get_attr", "placeholder")
        made = list(_named(n, value))
        for name, item in made:
            storage = self._storage(item)
            storage.free = storage.free or leaf
            if storage.producer is None:
                storage.producer = (n.name, name, item)
        seen = [pair for s in n.all_input_nodes for pair in _named(s, self.env[s])]
        for tensor in self.packed:
            storage = self._storage(tensor)
            same = tuple(p for p in seen + made if _key(p[1]) == _key(tensor))
            path = str(n.meta.get("module_path", ""))
            storage.kept.append(_Kept(n.name, path, tensor, same))

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        self.alive.append(tensor)
        size = tensor.untyped_storage().nbytes()
        return self.storages.setdefault(_key(tensor), _Storage(size))


def _key(tensor: torch.Tensor) -> int:
    reference: Any = StorageWeakRef(tensor.untyped_storage())
    return int(reference.cdata)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _named(node: fx.Node, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a node's value under the names that lowering gives them."""
    if isinstance(value, torch.Tensor):
        yield node.name, value
    elif isinstance(value, list | tuple):
        users = {
            u.args[1]: u.name
            for u in node.users
            if len(u.args) > 1 and isinstance(u.args[1], int)
        }
        for index, item in enumerate(pytree.tree_leaves(value)):
            if isinstance(item, torch.Tensor):
                yield users.get(index, f"{node.name}.{index}"), item


def _owned(storage: _Storage) -> Iterator[SavedTensor]:
    """How one kept storage is attributed: the rules of this module's docstring."""
    first = storage.kept[0]
    if storage.producer is not None and _shared(storage):
        node, name, tensor = storage.producer
        if _bytes(tensor) == storage.nbytes:
            yield _record(node, name, tensor)
            return
    for name, tensor in first.names:
        if _bytes(tensor) == storage.nbytes:
            yield _record(first.node, name, tensor)
            return
    if storage.producer is None:
        yield _extra(first, storage.nbytes)
        return
    parts: dict[tuple[Any, ...], tuple[str, str, torch.Tensor]] = {}
    for kept in storage.kept:
        for name, tensor in kept.names:
            if _same_view(tensor, kept.tensor):
                region = (tensor.storage_offset(), tensor.numel())
                parts.setdefault(region, (kept.node, name, tensor))
                break
    if sum(_bytes(t) for _, _, t in parts.values()) == storage.nbytes:
        yield from (_record(*part) for part in parts.values())
        return
    node, name, tensor = storage.producer
    if _bytes(tensor) == storage.nbytes:
        yield _record(node, name, tensor)
    else:
        yield _extra(first, storage.nbytes)


def _shared(storage: _Storage) -> bool:
    """Whether several elements of a list of layers keep it."""
    first = storage.kept[0].module.split(".")
    for kept in storage.kept[1:]:
        pairs = zip(first, kept.module.split("."), strict=False)
        one, other = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if one.isdigit() and other.isdigit():
            return True
    return False


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.numel(), int(a.storage_offset())) == (b.numel(), int(b.storage_offset()))


def _record(node: str, name: str, tensor: torch.Tensor) -> SavedTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(node, name, tuple(tensor.shape), dtype, _bytes(tensor))


def _extra(kept: _Kept, nbytes: int) -> SavedTensor:
    """A storage without a name in the graph, shaped as the kept tensor if that fills
    it."""
    tensor = kept.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    if _bytes(tensor) == nbytes:
        return SavedTensor(kept.node, "", tuple(tensor.shape), dtype, nbytes)
    count = nbytes // tensor.element_size()
    return SavedTensor(kept.node, "", (count,), dtype, nbytes)


def saved_tensors(module: fx.GraphModule) -> tuple[SavedTensor, ...]:
    """What each node keeps, in graph order; parameters, buffers and inputs left out.

    ``module``: a traced graph (:class:`passes.traced.TracedModel`) with concrete
    ``meta["val"]`` on every node and parameters on the meta device. Bytes are those
    that autograd keeps on CUDA for the graph's batch on one device.
    """
    inputs = [
        _on_meta(node.meta.get("val"))
        for node in module.graph.find_nodes(op="placeholder")
    ]
    recorder = _Recorder(module)
    recorder.run(*inputs)
    order = {node.name: i for i, node in enumerate(module.graph.nodes)}
    found = [
        item
        for storage in recorder.storages.values()
        if storage.kept and not storage.free and storage.nbytes
        for item in _owned(storage)
    ]
    return tuple(sorted(found, key=lambda s: order[s.node]))


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


# --- on the operator graph ------------------------------------------------------------


def annotate_saved(graph: OpGraph, traced: TracedModel) -> OpGraph:
    """``graph``, as lowered from ``traced``, with ``Op.saved`` filled in.

    Bytes are exact at the graph's batch and rescale with :func:`with_batch` in
    proportion. That is exact but for one sample, where torch makes views of what it
    copies for more (the reshape before a batched product): a graph read at one sample
    then counts what those views hold, up to 2 % of an unfused attention layer. A
    graph for inference keeps nothing and is returned as it is.
    """
    if not traced.training:
        return graph
    here = _by_node(traced, graph.batch)
    if graph.batch == PROBE or not any(t.per_sample for t in graph.tensors):
        return _annotated(graph, here, {})
    # one sample's axes look like broadcasts: maps are read at another batch
    probe = with_batch(graph, PROBE)
    there = _by_node(traced, PROBE)
    alike = {
        op.name: saved_operands(op, there[op.name])
        for op in probe.ops
        if op.name in there and _alike(here.get(op.name, []), there[op.name])
    }
    return _annotated(graph, here, alike)


Operands = tuple[tuple[Operand, ...], tuple[Tensor, ...]]


def _by_node(traced: TracedModel, batch: int) -> dict[str, list[SavedTensor]]:
    found: dict[str, list[SavedTensor]] = {}
    for item in saved_tensors(traced.at_batch(batch)):
        found.setdefault(item.node, []).append(item)
    return found


def _alike(here: list[SavedTensor], there: list[SavedTensor]) -> bool:
    """The same tensors at two batches."""

    def form(items: list[SavedTensor]) -> list[tuple[str, str, int]]:
        return [(i.name, i.dtype, len(i.shape)) for i in items]

    return form(here) == form(there)


def _annotated(
    graph: OpGraph, saved: Mapping[str, list[SavedTensor]], alike: dict[str, Operands]
) -> OpGraph:
    """``saved`` attached to its ops, with axis maps from ``alike`` where there."""
    tensors: list[Tensor] = list(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        items = saved.get(op.name, [])
        operands, extras = alike.get(op.name) or saved_operands(op, items)
        shapes = [i.shape for i in items if i.name not in _operand_names(op)]
        for extra, shape in zip(extras, shapes, strict=True):
            flat = extra.dtype == "uint8" and len(shape) != len(extra.shape)
            tensors.append(extra if flat else replace(extra, shape=shape))
        ops.append(replace(op, saved=operands) if operands else op)
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors))


def _operand_names(op: Op) -> set[str]:
    return {o.tensor for o in op.space.inputs + op.space.outputs}


def saved_operands(
    op: Op, saved: Iterable[SavedTensor]
) -> tuple[tuple[Operand, ...], tuple[Tensor, ...]]:
    """How the op's loop dims index what it keeps, and a record for each new tensor.

    A tensor that is an operand keeps its axes; others get theirs by kind and shape
    (:func:`passes.saved_axes.saved_axes`).
    """
    known: Mapping[str, Operand] = {
        o.tensor: o for o in op.space.inputs + op.space.outputs
    }
    operands: list[Operand] = []
    extras: list[Tensor] = []
    for item in saved:
        if item.name in known:
            operands.append(known[item.name])
            continue
        name = f"{op.name}.saved{len(operands)}"
        shape, dtype = item.shape, item.dtype
        if dtype not in DTYPE_BYTES:
            shape, dtype = (item.nbytes,), "uint8"
        operand = Operand(name, saved_axes(op, shape))
        record = Tensor(name, shape, dtype, TensorKind.SAVED)
        extras.append(replace(record, per_sample=rates_of(op, operand, shape)))
        operands.append(operand)
    return tuple(operands), tuple(extras)


def saved_bytes(graph: OpGraph, ops: Iterable[Op] | None = None) -> int:
    """Bytes kept by ``ops`` (default: all) for one micro-batch on one device."""
    chosen = graph.ops if ops is None else ops
    return sum(graph.tensor(s.tensor).nbytes for op in chosen for s in op.saved)
