"""Read a traced FX graph into plain records: ops, tensors, shapes, arguments.

Tensors are named by their node (parameters and buffers by their full name). Regions
that only switch a mode (no_grad, autocast, checkpoint) are read in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from passes.errors import PassError
from passes.ir import DTYPE_BYTES, TensorKind
from passes.spaces.registry import Ref, Shape


@dataclass(slots=True)
class RawTensor:
    """A tensor before lowering."""

    name: str
    shape: Shape
    dtype: str
    kind: TensorKind
    requires_grad: bool = False


@dataclass(slots=True)
class RawOp:
    """An op before lowering: bound arguments with :class:`Ref` for tensors."""

    name: str
    target: str
    pointwise: bool
    args: dict[str, object]
    inputs: list[str]
    outputs: list[str]
    module: str
    slice_of: tuple[str, int, int, int] | None = None  # tensor, axis, start, end


@dataclass(slots=True)
class RawGraph:
    """All ops and tensors of a traced graph, in topological order."""

    ops: list[RawOp] = field(default_factory=list[RawOp])
    tensors: dict[str, RawTensor] = field(default_factory=dict[str, RawTensor])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])


_INLINED = (
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
    "invoke_subgraph",
    "wrap",
)
# what a write through a view does to the view's base
_VIEWS = {
    "aten.slice.Tensor": "aten.slice_scatter.default",
    "aten.select.int": "aten.select_scatter.default",
    "aten.view.default": "aten.masked_scatter.default",
    "aten.transpose.int": "aten.masked_scatter.default",
    "aten.unsqueeze.default": "aten.masked_scatter.default",
}
_IGNORED = ("_guards_fn", "_assert", "sym_constrain", "_set_grad_enabled", "lazy_load")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in the IR; unknown ones are stored as a byte."""
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPE_BYTES else "uint8"


def target_name(target: object) -> str:
    """``aten.linear.default`` for an overload, the bare name otherwise."""
    if isinstance(target, OpOverload):
        return f"{target}"
    name = getattr(target, "name", None)
    if callable(name):
        return str(name())
    return str(getattr(target, "__name__", target))


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor value during reading."""

    name: str
    value: torch.Tensor


class _Reader:
    def __init__(self) -> None:
        self.graph = RawGraph()
        self.used: set[str] = set()

    def fresh(self, name: str) -> str:
        while name in self.used:
            name += "_"
        self.used.add(name)
        return name

    def tensor(self, name: str, value: torch.Tensor, kind: TensorKind) -> str:
        self.graph.tensors[name] = RawTensor(
            name,
            tuple(int(s) for s in value.shape),
            dtype_name(value.dtype),
            kind,
            value.requires_grad,
        )
        return name

    def read(
        self, module: fx.GraphModule, arguments: Sequence[object] | None, path: str
    ) -> object:
        """Read one graph; returns its output with tensors replaced by names."""
        values: dict[fx.Node, object] = {}
        given = iter(arguments or ())

        def resolve(item: object) -> object:
            return fx.node.map_arg(item, lambda n: values[n])  # type: ignore[arg-type]

        for node in module.graph.nodes:
            if node.op == "placeholder":
                if arguments is None:
                    values[node] = self.placeholder(node)
                else:
                    values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self.attribute(module, node)
            elif node.op == "output":
                return resolve(node.args[0])
            elif node.op == "call_module":
                if not any(word in str(node.target) for word in _IGNORED):
                    raise PassError("a module call is left in the graph", node.target)
                values[node] = None
            else:
                values[node] = self.call(node, resolve, path)
                self.write(node, values, path)
        return None

    def placeholder(self, node: fx.Node) -> object:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            name = self.fresh(node.name)
            self.graph.inputs.append(name)
            return _Named(self.tensor(name, value, TensorKind.INPUT), value)
        return value

    def attribute(self, module: fx.GraphModule, node: fx.Node) -> object:
        name = str(node.target)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            return found
        if name not in self.graph.tensors:
            parameter = isinstance(found, torch.nn.Parameter)
            kind = TensorKind.PARAMETER if parameter else TensorKind.BUFFER
            self.tensor(name, found, kind)
            self.used.add(name)
        return _Named(name, found)

    def call(self, node: fx.Node, resolve: Any, path: str) -> object:
        name = target_name(node.target)
        path = module_path(node) or path
        if name == "getitem" or node.target is operator.getitem:
            source, index = resolve(node.args[0]), node.args[1]
            if isinstance(source, (list, tuple)):
                return source[index]  # type: ignore[index]
        if name in _INLINED:
            return self.inline(node, name, resolve, path)
        value = node.meta.get("val")
        if any(word in name for word in _IGNORED) or not _has_tensor(value):
            return _number(value)
        bound = resolve(bind(node))
        refs: list[Ref] = []
        inputs: list[str] = []

        def strip(item: object) -> object:
            if isinstance(item, _Named):
                t = self.graph.tensors[item.name]
                refs.append(Ref(len(refs), t.shape, t.dtype))
                inputs.append(item.name)
                return refs[-1]
            if isinstance(item, (list, tuple)):
                return [strip(x) for x in item]  # type: ignore[misc]
            return _number(item)

        args = {key: strip(item) for key, item in bound.items()}
        op_name = self.fresh(node.name)
        outputs, result = self.results(node, op_name, value)
        self.graph.ops.append(
            RawOp(
                op_name,
                name,
                is_pointwise(node.target),
                args,
                inputs,
                outputs,
                path,
                _slice_range(name, args, inputs),
            )
        )
        return result

    def write(self, node: fx.Node, values: dict[fx.Node, object], path: str) -> None:
        """After an in-place op, later readers see its result.

        Where it wrote through a view, the view's base gets a new version: a scatter of
        the result into the base.
        """
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not node.args:
            return
        target, result = node.args[0], values[node]
        while isinstance(target, fx.Node) and isinstance(result, _Named):
            if not isinstance(values.get(target), _Named):
                return
            values[target] = result
            base = target.args[0] if target.args else None
            if target_name(target.target) not in _VIEWS or not isinstance(
                base, fx.Node
            ):
                return
            old = values.get(base)
            if not isinstance(old, _Named):
                return
            result = self.scatter(target, old, result, path)
            target = base

    def scatter(self, view: fx.Node, base: _Named, source: _Named, path: str) -> _Named:
        """A new version of ``base`` with ``source`` written through ``view``."""
        tensors = self.graph.tensors
        old, new = tensors[base.name], tensors[source.name]
        if old.shape == new.shape and view.target is torch.ops.aten.slice.Tensor:
            return source  # the whole base was written
        name = self.fresh(f"{source.name.partition('.')[0]}.written")
        self.tensor(name, base.value, TensorKind.ACTIVATION)
        tensors[name].requires_grad = old.requires_grad or new.requires_grad
        args: dict[str, object] = {
            "self": Ref(0, old.shape, old.dtype),
            "src": Ref(1, new.shape, new.dtype),
            "dim": bind(view).get("dim", 0),
        }
        self.graph.ops.append(
            RawOp(
                name,
                _VIEWS[target_name(view.target)],
                False,
                args,
                [base.name, source.name],
                [name],
                module_path(view) or path,
            )
        )
        return _Named(name, base.value)

    def results(
        self, node: fx.Node, op_name: str, value: object
    ) -> tuple[list[str], object]:
        if isinstance(value, torch.Tensor):
            self.tensor(op_name, value, TensorKind.ACTIVATION)
            return [op_name], _Named(op_name, value)
        users = {
            user.args[1]: user.name
            for user in node.users
            if user.target is operator.getitem and isinstance(user.args[1], int)
        }
        assert isinstance(value, (list, tuple))
        names: list[str] = []
        items: list[object] = []
        for k, item in enumerate(cast(Sequence[object], value)):
            if not isinstance(item, torch.Tensor):
                items.append(_number(item))
                continue
            name = self.fresh(users.get(k, f"{op_name}.{k}"))
            self.tensor(name, item, TensorKind.ACTIVATION)
            names.append(name)
            items.append(_Named(name, item))
        return names, tuple(items)

    def inline(self, node: fx.Node, name: str, resolve: Any, path: str) -> object:
        args = list(node.args)
        at = next(
            i for i, a in enumerate(args) if isinstance(resolve(a), fx.GraphModule)
        )
        body = resolve(args[at])
        rest = args[at + 1 :]
        if name == "invoke_subgraph" and rest and isinstance(rest[0], str):
            rest = rest[1:]
        return self.read(body, [resolve(a) for a in rest], path)


def _has_tensor(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value)  # type: ignore[misc]
    return isinstance(value, torch.Tensor)


def _number(value: object) -> object:
    """A symbolic size as a number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = value.node
        hint = node.hint
        assert hint is not None, f"size {value} has no value"
        return hint
    return value


def bind(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by schema name, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        named = {f"arg{i}": a for i, a in enumerate(node.args)}
        if target_name(node.target) == "flex_attention":
            named = dict(zip(("query", "key", "value"), node.args, strict=False)) | {
                "rest": tuple(node.args[3:])
            }
        return named | dict(node.kwargs)
    result: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            result[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            result[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            result[argument.name] = argument.default_value
    return result


def is_pointwise(target: object) -> bool:
    """Whether torch tags the op as elementwise."""
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward made the node."""
    known = node.meta.get("module_path")
    if isinstance(known, str):
        return known
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]).split("@")[0] if stack else ""


def _slice_range(
    name: str, args: Mapping[str, object], inputs: Sequence[str]
) -> tuple[str, int, int, int] | None:
    if not inputs or not isinstance(args.get("self"), Ref):
        return None
    x = args["self"]
    assert isinstance(x, Ref)
    axis = args.get("dim", 0)
    if not isinstance(axis, int) or not x.rank:
        return None
    axis %= x.rank
    size = x.shape[axis]
    if name.startswith("aten.slice.") and args.get("step", 1) == 1:
        start, end = args.get("start"), args.get("end")
        start = 0 if start is None else start
        end = size if end is None else end
        if not isinstance(start, int) or not isinstance(end, int):
            return None
        start = max(0, start + size if start < 0 else start)
        end = min(size, end + size if end < 0 else end)
        return inputs[0], axis, start, end
    if name.startswith("aten.narrow."):
        start, length = args.get("start"), args.get("length")
        if isinstance(start, int) and isinstance(length, int):
            start = start % size if size else 0
            return inputs[0], axis, start, start + length
    return None


def collect(module: fx.GraphModule) -> RawGraph:
    """Read a traced graph whose nodes carry ``meta['val']``."""
    reader = _Reader()
    result = reader.read(module, None, "")

    def flat(item: object) -> list[str]:
        if isinstance(item, _Named):
            return [item.name]
        if isinstance(item, (list, tuple)):
            return [n for x in item for n in flat(x)]  # type: ignore[misc]
        if isinstance(item, dict):
            return [n for x in item.values() for n in flat(x)]  # type: ignore[misc]
        return []

    reader.graph.outputs = flat(result)
    return reader.graph
