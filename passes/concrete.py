"""From torch.export's program to a plain graph, and from symbolic sizes to numbers."""

# pyright: reportPrivateUsage=false
# OpOverload and its schema have no public names

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from passes.errors import PassError
from passes.walk import map_nodes

_DROPPED = re.compile(
    r"aten\.(_assert_tensor_metadata|_assert_async|_assert_scalar|sym_constrain_range)"
    r"|_set_grad_enabled|_enter_autocast|_exit_autocast"
)
_REGIONS = {  # higher-order ops that run a subgraph in a mode: index of the subgraph
    "wrap_with_set_grad_enabled": 1,
    "wrap_with_autocast": 4,
    "tag_activation_checkpoint": 0,
}
_CUT = re.compile(r"@\d+")


def plain_graph(
    exported: torch.export.ExportedProgram, aliases: Mapping[str, str]
) -> fx.GraphModule:
    """Without guards, asserts and regions; tied tensors under their first name.

    Sets ``meta["module_path"]``, ``meta["module_class"]`` and ``meta["no_grad"]``.
    """
    source = exported.module()
    graph = fx.Graph()
    copier = _Copier(source, graph, aliases)
    results = copier.copy(source, {}, no_grad=False)
    graph.output(results)
    graph.eliminate_dead_code(_keep)
    module = fx.GraphModule(source, graph)
    for node in graph.nodes:
        _mark_module(node)
    return module


class _Copier:
    """Copies a graph into another, subgraphs in place."""

    def __init__(
        self, root: fx.GraphModule, graph: fx.Graph, aliases: Mapping[str, str]
    ) -> None:
        self.root, self.graph, self.aliases = root, graph, aliases
        self.attributes: dict[str, fx.Node] = {}

    def copy(self, module: Any, values: dict[fx.Node, Any], *, no_grad: bool) -> Any:
        """Append ``module``'s nodes; returns its output in terms of new nodes."""
        for node in module.graph.nodes:
            if node.op == "output":
                return map_nodes(node.args[0], lambda n: values[n])
            if node not in values:
                values[node] = self._one(module, node, values, no_grad)
        raise AssertionError("a graph without output")

    def _one(
        self, module: Any, node: fx.Node, values: dict[fx.Node, Any], no_grad: bool
    ) -> Any:
        if node.op == "get_attr":
            return self._attribute(module, node)
        if node.op == "call_module":
            assert "_guards_fn" in str(node.target), node.target
            return None
        if node.op == "call_function":
            name = _target_name(node.target)
            if _DROPPED.match(name):
                return None
            if name in _REGIONS:
                return self._region(module, node, name, values, no_grad)
            if node.target is operator.getitem:
                outer = values[node.args[0]]  # type: ignore[index]
                if isinstance(outer, tuple | list):
                    return outer[node.args[1]]  # type: ignore[index]
        new = self.graph.node_copy(node, lambda n: values[n])
        new.meta = dict(node.meta)
        new.meta["no_grad"] = no_grad
        return new

    def _attribute(self, module: Any, node: fx.Node) -> Any:
        target = str(node.target)
        found = operator.attrgetter(target)(module)
        if isinstance(found, fx.GraphModule):
            return found
        target = self.aliases.get(target, target)
        if target not in self.attributes:
            new = self.graph.node_copy(node)
            new.target = target
            new.meta = {**node.meta, "no_grad": False}
            self.attributes[target] = new
        return self.attributes[target]

    def _region(
        self,
        module: Any,
        node: fx.Node,
        name: str,
        values: dict[fx.Node, Any],
        no_grad: bool,
    ) -> Any:
        at = _REGIONS[name]
        arguments: tuple[Any, ...] = map_nodes(node.args, lambda n: _Held(values[n]))
        plain: list[Any] = [a.value if isinstance(a, _Held) else a for a in arguments]
        body, operands = plain[at], plain[at + 1 :]
        assert isinstance(body, fx.GraphModule)
        inner = body.graph.find_nodes(op="placeholder")
        quiet = not plain[0] if name == "wrap_with_set_grad_enabled" else no_grad
        bound = dict(zip(inner, operands, strict=True))
        return self.copy(body, bound, no_grad=quiet)


class _Held:
    """Keeps ``map_arg`` from walking into what a node stands for."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _target_name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target}"
    name = getattr(target, "_name", None) or getattr(target, "__name__", None)
    return str(name or target)


def _keep(node: fx.Node) -> bool:
    """Nodes that stay though nothing uses them: inputs, output, mutations."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or _updates_statistics(node)
    return False


def _mark_module(node: fx.Node) -> None:
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", ""))
    node.meta["module_path"] = _CUT.sub("", path)
    node.meta["module_class"] = kind if isinstance(kind, str) else kind.__qualname__


# --- mutations ------------------------------------------------------------------------


def _updates_statistics(node: fx.Node) -> bool:
    """A batch norm that moves its running statistics."""
    target = str(node.target)
    if target == "aten.batch_norm.default":
        return bool(node.args[5]) and node.args[3] is not None
    if target == "aten.instance_norm.default":
        return bool(node.args[5]) and node.args[3] is not None
    return False


def mutated_tensors(module: fx.GraphModule) -> tuple[str, ...]:
    """Names of the parameters and buffers that a forward changes in place."""
    found: dict[str, None] = {}
    for node in module.graph.nodes:
        for changed in _changed(node):
            root = _root(changed)
            if root.op == "get_attr":
                found[str(root.target)] = None
    return tuple(found)


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    if _updates_statistics(node):
        yield from (a for a in node.args[3:5] if isinstance(a, fx.Node))
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        info = argument.alias_info
        if info is not None and info.is_write and isinstance(value, fx.Node):
            yield value


def _root(node: fx.Node) -> fx.Node:
    """The tensor that ``node`` is a view of."""
    while node.op == "call_function":
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not node.args:
            break
        first = target._schema.arguments[0].alias_info
        source = node.args[0]
        if first is None or not isinstance(source, fx.Node):
            break
        node = source
    return node


# --- sizes ----------------------------------------------------------------------------


def _batch_sizes(module: fx.GraphModule) -> list[Any]:
    """The leading size of every input that is a tensor with axes."""
    values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    return [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim() > 0]


def is_symbolic(module: fx.GraphModule, batch: int) -> bool:
    """Whether the leading axis of every batched input stayed symbolic."""
    seen = False
    for size in _batch_sizes(module):
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
            seen = True
        elif int(size) == batch:
            return False
    return seen


def allows(module: fx.GraphModule, batch: int) -> bool:
    """Whether a symbolic graph is that of ``batch`` samples.

    Checks every condition on sizes that the trace relied on. (That the batch is more
    than one is not among them: torch.export takes it for granted.)
    """
    for size in _batch_sizes(module):
        if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
            continue
        environment: Any = size.node.shape_env
        for guard in environment.guards:
            values = dict.fromkeys(guard.expr.free_symbols, batch)
            if guard.expr.subs(values) == False:  # noqa: E712 (sympy's, not Python's)
                return False
    return True


class _Sizes:
    """Numbers for symbolic sizes: every symbol is the batch."""

    def __init__(self, module: fx.GraphModule, batch: int) -> None:
        self.values: dict[Any, int] = {}
        self.known: dict[Any, Any] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                for size in value.shape:
                    if isinstance(size, torch.SymInt):
                        for symbol in size.node.expr.free_symbols:
                            self.values[symbol] = batch

    def number(self, size: Any, node: fx.Node) -> Any:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expression: Any = size.node.expr
        if expression not in self.known:
            found = expression.subs(self.values)
            if found.free_symbols:
                raise PassError(
                    f"a size depends on data: {node.target}",
                    _source_line(node),
                    "Give the op a fixed size (a mask, a capacity) or plan that part "
                    "by hand",
                )
            kinds: dict[Any, Any] = {
                torch.SymInt: int,
                torch.SymFloat: float,
                torch.SymBool: bool,
            }
            self.known[expression] = kinds[type(size)](found)
        return self.known[expression]

    def tensor(self, value: torch.Tensor, node: fx.Node) -> torch.Tensor:
        return torch.empty_strided(
            [self.number(s, node) for s in value.shape],
            [self.number(s, node) for s in value.stride()],
            dtype=value.dtype,
            device="meta",
        )


def _source_line(node: fx.Node) -> str:
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:]) or node.name


def concrete_graph(
    template: fx.GraphModule, batch: int, training: bool
) -> fx.GraphModule:
    """A copy of ``template`` for ``batch`` samples: no symbolic size is left."""
    sizes = _Sizes(template, batch)
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    mode = FakeTensorMode()
    with mode:
        for node in template.graph.nodes:
            value = node.meta.get("val")
            number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            if number or (node.op == "call_function" and isinstance(value, int)):
                values[node] = sizes.number(value, node)
                continue
            new = graph.node_copy(node, lambda n: values[n])
            new.meta = dict(node.meta)
            values[node] = new
            if node.op != "output":
                new.meta["val"] = _concrete_value(template, new, value, sizes, training)
    return fx.GraphModule(template, graph)


def _concrete_value(
    module: fx.GraphModule, node: fx.Node, value: Any, sizes: _Sizes, training: bool
) -> Any:
    flag = training and _needs_gradient(module, node)

    def leaf(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return sizes.number(item, node)
        floating = item.is_floating_point() or item.is_complex()
        return sizes.tensor(item, node).requires_grad_(flag and floating)

    return pytree.tree_map(leaf, value)


_NO_GRADIENT = ("aten.detach", "aten.zeros_like", "aten.ones_like", "aten.full_like",
                "aten.empty_like", "aten.rand_like", "aten.randn_like",
                "aten.new_", "aten.sign.", "aten.one_hot")  # fmt: skip


def _needs_gradient(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether autograd would follow the node's value."""
    if node.op == "get_attr":
        found = operator.attrgetter(str(node.target))(module)
        return isinstance(found, torch.nn.Parameter) and found.requires_grad
    if node.op != "call_function" or node.meta.get("no_grad", False):
        return False
    if str(node.target).startswith(_NO_GRADIENT):
        return False
    return any(
        item.requires_grad
        for source in node.all_input_nodes
        for item in pytree.tree_leaves(source.meta.get("val"))
        if isinstance(item, torch.Tensor)
    )
