"""Trace deep models by two of their equal layers, and prove that two are enough.

Consecutive equal layers of a list (same class, parameter shapes and settings, an index
aside) are a *run*. All but its first two units become stand-ins that cost one node
each: the model still calls every layer, by whatever indexing it likes. While the model
is exported, each call's inputs are compared with those of the unit before: they must
be the outputs of the layer before, or tensors from outside that all share. After it,
nothing of the run but its last output may be used elsewhere, and the two traced units
must be equal node by node. A run that fails any check is traced in full.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.traced import LayerRun
from passes.walk import (
    buffers_of,
    children_of,
    map_nodes,
    named_modules,
    parameters_of,
)

_MIN_LAYERS = 4
_MAX_PERIOD = 8
_INDEX_NAMES = frozenset(
    {
        *("layer_idx", "layer_index", "layer_id", "layer_number", "layer_num"),
        *("idx", "index", "block_idx", "block_index", "block_id", "depth_idx"),
    }
)


class UnequalLayers(Exception):
    """A run that two of its units do not stand for; ``run`` is traced in full."""

    def __init__(self, run: LayerRun, why: str) -> None:
        super().__init__(f"{run.prefix}: {why}")
        self.run, self.why = run, why


# --- equal layers ---------------------------------------------------------------------


def _setting(value: object) -> Hashable:
    """What of an attribute must agree: scalars by value, the rest by type."""
    if value is None or isinstance(value, bool | int | float | str | enum.Enum):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, tuple | list):
        return tuple(_setting(v) for v in value)  # type: ignore[misc]
    if isinstance(value, Mapping):
        return tuple((str(k), _setting(v)) for k, v in value.items())  # type: ignore[misc]
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return type(value).__qualname__


def _tensor_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)


def _signature(layer: nn.Module) -> Hashable:
    parts: list[Hashable] = []
    for path, module in named_modules(layer):
        own = vars(module)
        settings = tuple(
            (key, _setting(value))
            for key, value in sorted(own.items())
            if not key.startswith("_") and key not in _INDEX_NAMES
        )
        tensors = tuple(
            (name, _tensor_key(value))
            for store in (parameters_of(module), buffers_of(module))
            for name, value in store.items()
        )
        parts.append((path, type(module), settings, tensors))
    return tuple(parts)


def _shares(layers: Sequence[nn.Module], counts: Mapping[int, int]) -> bool:
    """Whether a layer or a tensor of it is also registered elsewhere."""
    if len({id(layer) for layer in layers}) != len(layers):
        return True
    return any(counts[id(p)] > 1 for layer in layers for p in layer.parameters())


def _best_segment(kinds: Sequence[int], start: int) -> tuple[int, int]:
    """(layers covered, period) of the run from ``start`` that leaves out the most."""
    best, period = 0, 1
    for p in range(1, _MAX_PERIOD + 1):
        stop = start + p
        while stop < len(kinds) and kinds[stop] == kinds[stop - p]:
            stop += 1
        covered = (stop - start) // p * p
        fits = covered >= max(_MIN_LAYERS, 3 * p)
        if fits and covered - 2 * p > best - 2 * period:
            best, period = covered, p
    return best, period


def _list_runs(prefix: str, container: nn.Module) -> Iterator[LayerRun]:
    names = list(children_of(container))
    known: dict[Hashable, int] = {}
    kinds = [
        known.setdefault(_signature(child), len(known)) if child is not None else -i
        for i, child in enumerate(children_of(container).values(), start=1)
    ]
    start = 0
    while start < len(names):
        covered, period = _best_segment(kinds, start)
        if covered:
            original = tuple(names[start : start + covered])
            yield LayerRun(prefix, original, original[: 2 * period], period)
        start += covered or 1


def find_runs(model: nn.Module) -> tuple[LayerRun, ...]:
    """Runs of equal layers in the model's lists, outermost only."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    runs: list[LayerRun] = []
    inside: set[str] = set()
    for path, module in named_modules(model):
        if any(path == p or path.startswith(f"{p}.") for p in inside):
            continue
        if not isinstance(module, nn.ModuleList | nn.Sequential) or (
            len(module) < _MIN_LAYERS
        ):
            continue
        for run in _list_runs(path, module):
            layers = [children_of(module)[name] for name in run.original]
            if _shares([x for x in layers if x is not None], counts):
                continue
            runs.append(run)
            inside.update(run.path(name) for name in run.original)
    return tuple(runs)


# --- stand-ins ------------------------------------------------------------------------


def shorten(model: nn.Module, runs: Sequence[LayerRun]) -> nn.Module:
    """A copy of the module tree (tensors shared) with the runs' later layers empty."""
    emptied = {run.path(n) for run in runs for n in run.original[len(run.kept) :]}
    return _copy_tree(model, "", emptied, {})


def _copy_tree(
    module: nn.Module, path: str, emptied: set[str], memo: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    new = copy.copy(module)
    memo[id(module)] = new
    empty = path in emptied
    state = vars(new)
    state["_parameters"] = {} if empty else dict(parameters_of(module))
    state["_buffers"] = {} if empty else dict(buffers_of(module))
    state["_modules"] = {
        name: None
        if child is None
        else _copy_tree(child, f"{path}.{name}" if path else name, emptied, memo)
        for name, child in ({} if empty else children_of(module)).items()
    }
    return new


@dataclass(slots=True)
class _Call:
    inputs: list[Any]
    outputs: list[Any]
    spec: pytree.TreeSpec
    pattern: tuple[Hashable, ...]


@dataclass(slots=True)
class Watch:
    """Follows the calls of one run during an export."""

    run: LayerRun
    calls: list[_Call] = field(default_factory=list[_Call])

    def attach(self, model: nn.Module) -> None:
        """Watch the kept layers of ``model`` and give the emptied ones a stand-in."""
        self.calls.clear()
        for index, name in enumerate(self.run.original):
            layer = model.get_submodule(self.run.path(name))
            if name in self.run.kept:
                layer.register_forward_hook(self._hook(index), with_kwargs=True)
            else:
                layer.forward = self._stand_in(index)  # type: ignore[method-assign]

    def fail(self, why: str) -> UnequalLayers:
        return UnequalLayers(self.run, why)

    def finished(self) -> bool:
        return len(self.calls) == len(self.run.original)

    def _hook(self, index: int) -> Callable[..., None]:
        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            inputs = pytree.tree_leaves((args, kwargs))
            outputs, spec = pytree.tree_flatten(output)
            self._record(index, inputs, outputs, spec)

        return hook

    def _record(
        self, index: int, inputs: list[Any], outputs: list[Any], spec: pytree.TreeSpec
    ) -> None:
        if index != len(self.calls):
            raise self.fail("layers are not called once each, in order")
        pattern = self._pattern(inputs)
        period = self.run.period
        if index >= 2 * period and pattern != self.calls[index - period].pattern:
            raise self.fail(f"layer {index} is not fed like the one before")
        self.calls.append(_Call(inputs, outputs, spec, pattern))

    def _pattern(self, inputs: list[Any]) -> tuple[Hashable, ...]:
        """Where each input comes from: the layer before, or which tensor outside."""
        before: dict[int, int] = {}
        if self.calls:
            last = self.calls[-1]
            passed = {id(x) for x in last.inputs}
            for j, leaf in enumerate(last.outputs):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in passed:
                    before.setdefault(id(leaf), j)
        return tuple(
            (("before", before[id(x)]) if id(x) in before else ("outside", id(x)))
            if isinstance(x, torch.Tensor)
            else _setting(x)
            for x in inputs
        )

    def _stand_in(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index != len(self.calls):
                raise self.fail("layers are not called once each, in order")
            model = self.calls[index - self.run.period]
            inputs = pytree.tree_leaves((args, kwargs))
            if len(inputs) != len(model.inputs):
                raise self.fail(f"layer {index} is called differently")
            outputs = [_imitate(leaf, model.inputs, inputs) for leaf in model.outputs]
            self._record(index, inputs, outputs, model.spec)
            return pytree.tree_unflatten(outputs, model.spec)

        return forward


def _imitate(leaf: Any, before: list[Any], now: list[Any]) -> Any:
    """What a layer with inputs ``now`` returns where its model returned ``leaf``."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for old, new in zip(before, now, strict=True):
        if leaf is old:
            return new
    for old, new in zip(before, now, strict=True):
        same = isinstance(old, torch.Tensor) and old.dtype == leaf.dtype
        if same and old.dim() == leaf.dim() and tuple(old.shape) == tuple(leaf.shape):
            return torch.clone(new)
    return torch.empty_like(leaf)


# --- checks on the graph --------------------------------------------------------------


def _is_size(node: fx.Node) -> bool:
    sizes = torch.SymInt | torch.SymFloat | torch.SymBool | int | float
    return isinstance(node.meta.get("val"), sizes)


def _owner(path: str, prefix: str) -> str | None:
    """The child of ``prefix`` that ``path`` lies in."""
    head = f"{prefix}." if prefix else ""
    if not path.startswith(head):
        return None
    return path[len(head) :].split(".", 1)[0]


def _child(node: fx.Node, run: LayerRun, members: Mapping[str, int]) -> int:
    """Position in the run of the layer that ran ``node``, -1 outside the run.

    Sizes belong to no layer: they are computed once, wherever they are first needed.
    """
    if node.op != "call_function" or _is_size(node):
        return -1
    return members.get(_owner(node.meta["module_path"], run.prefix) or "", -1)


def remove_stand_ins(graph: fx.Graph, run: LayerRun) -> None:
    """Wire the run's last output to the last traced unit; requires ``module_path``.

    Raises:
        UnequalLayers: something between the layers uses more than the chain.
    """
    members = {name: i for i, name in enumerate(run.original)}
    kept, last = len(run.kept), len(run.original) - 1
    where = {node: _child(node, run, members) for node in graph.nodes}
    stand_ins = [node for node, position in where.items() if position >= kept]
    for node, position in where.items():
        if 0 <= position < last:
            if any(where[user] < 0 for user in node.users):
                raise UnequalLayers(run, f"layer {position} is used outside the run")
            if position < kept and any(where[u] > kept for u in node.users):
                raise UnequalLayers(run, f"layer {position} is used later in the run")
    for node in reversed(stand_ins):
        if not node.users:
            graph.erase_node(node)
    for node in stand_ins:
        if not node.users:
            continue
        if node.target is not torch.ops.aten.clone.default:
            raise UnequalLayers(run, "an output of the last layer has no model")
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def check_units_equal(graph: fx.Graph, run: LayerRun) -> None:
    """The two traced units agree node by node: op, shapes, wiring, module.

    Raises:
        UnequalLayers: they do not.
    """
    members = {name: i for i, name in enumerate(run.kept)}
    units: list[list[Hashable]] = [[], []]
    local: list[dict[fx.Node, int]] = [{}, {}]
    for node in graph.nodes:
        position = _child(node, run, members)
        if position < 0:
            continue
        unit, layer = divmod(position, run.period)
        local[unit][node] = len(local[unit])
        units[unit].append(_describe(node, run, layer, local[unit]))
    if units[0] != units[1]:
        raise UnequalLayers(run, "the first two units differ in their ops")


def _describe(
    node: fx.Node, run: LayerRun, layer: int, local: Mapping[fx.Node, int]
) -> Hashable:
    head = len(f"{run.prefix}.") if run.prefix else 0

    def inside(path: str) -> str:
        return path[head:].partition(".")[2]

    def operand(other: fx.Node) -> str:
        if _is_size(other):
            return f"size {other.meta['val']}"
        if other in local:
            return f"%{local[other]}"
        owner = _owner(str(other.target), run.prefix)
        if other.op == "get_attr" and owner in run.kept:
            return f"@{inside(str(other.target))}"
        return f"outside {_shapes(other.meta.get('val'))}"

    args = map_nodes((node.args, node.kwargs), lambda n: _Name(operand(n)))
    path = inside(node.meta["module_path"])
    return (str(node.target), layer, path, repr(args), _shapes(node.meta.get("val")))


@dataclass(frozen=True, slots=True)
class _Name:
    text: str


def _shapes(value: object) -> str:
    return str(
        [
            (tuple(str(s) for s in leaf.shape), str(leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else str(leaf)
            for leaf in pytree.tree_leaves(value)
        ]
    )
