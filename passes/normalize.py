"""Clean a traced graph: what computes nothing goes, what mutates becomes visible."""

# pyright: reportPrivateUsage=false
# module tables and operator schemas have no public names

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

aten = torch.ops.aten

_ASSERTS = (
    "aten._assert_tensor_metadata",
    "aten._assert_async",
    "aten._assert_scalar",
    "aten.sym_constrain_range",
    "aten._functional_assert_async",
)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Remove ops that compute nothing and write safe in-place ops out of place.

    Requires: an aten graph with ``meta["val"]`` (fake tensors) on every node, as
    :func:`passes.trace.trace` and torch.export give it.

    Ensures: no guard or assert is left; dropouts that do nothing (p = 0 or not
    training), ``alias``, ``lift_fresh``, ``to`` and ``expand`` and ``view`` to what
    the tensor already is, full slices, ``contiguous`` of contiguous tensors, additions
    of nothing and (``detach``, when ``training`` is off) are replaced by their input.
    An in-place op on a temporary that no later node and no view reads becomes its
    out-of-place overload; in-place ops on parameters, buffers, inputs or anything
    that is read again stay, so mutations stay visible. Values, gradients and the order
    of random numbers are those of the input graph. Running it again changes nothing.
    The input graph module is not modified; the result shares its parameters.
    """

    name: ClassVar[str] = "normalize"
    training: bool = True

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        result = fx.GraphModule(module, copy.deepcopy(module.graph))
        result.meta.update(module.meta)
        _drop_checks(result.graph)
        for node in list(result.graph.nodes):
            if node.op != "call_function":
                continue
            _functionalize(node)
            source = self._identity(node)
            if source is not None:
                node.replace_all_uses_with(source)
                result.graph.erase_node(node)
        _drop_dead(result.graph)
        result.graph.lint()
        result.recompile()
        return result

    def _identity(self, node: fx.Node) -> fx.Node | None:
        """The input that ``node`` equals, if any."""
        rule = _IDENTITIES.get(node.target)  # type: ignore[arg-type]
        if node.target is aten.detach.default and not self.training:
            rule = _always
        source = node.args[0] if node.args else None
        if rule is None or not isinstance(source, fx.Node):
            return None
        if _written(node) or _written(source):
            return None
        return source if rule(node, source) else None


def normalize(module: fx.GraphModule, *, training: bool = True) -> fx.GraphModule:
    """See :class:`Normalize`."""
    return Normalize(training)(module)


# --- removal --------------------------------------------------------------------------


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        guard = node.op == "call_module" and "_guards_fn" in str(node.target)
        check = guard or str(node.target).startswith(_ASSERTS)
        if check and not node.users:
            graph.erase_node(node)


def _drop_dead(graph: fx.Graph) -> None:
    """Erase what nothing uses, but inputs, mutations and random numbers."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        target = node.target
        effect = (
            not isinstance(target, torch._ops.OpOverload)
            or target._schema.is_mutable
            or torch.Tag.nondeterministic_seeded in target.tags
            or _moves_statistics(node)
        )
        if node.op == "get_attr" or (node.op == "call_function" and not effect):
            graph.erase_node(node)


def _moves_statistics(node: fx.Node) -> bool:
    norms = (aten.batch_norm.default, aten.instance_norm.default)
    return node.target in norms and bool(node.args[5])


# --- identities -----------------------------------------------------------------------

Rule = Callable[[fx.Node, fx.Node], bool]


def _always(_: fx.Node, __: fx.Node) -> bool:
    return True


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def _dropout(node: fx.Node, _: fx.Node) -> bool:
    p, train = _argument(node, 1, "p"), _argument(node, 2, "train")
    return p == 0 or train is False


def _same_tensor(node: fx.Node, source: fx.Node) -> bool:
    """Shape, strides, dtype and device did not change."""
    new, old = node.meta.get("val"), source.meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    return (
        new.dtype == old.dtype
        and new.device == old.device
        and tuple(new.shape) == tuple(old.shape)
        and tuple(new.stride()) == tuple(old.stride())
    )


def _full_slice(node: fx.Node, source: fx.Node) -> bool:
    step = _argument(node, 4, "step", 1)
    return step == 1 and _same_tensor(node, source)


# where the overloads of aten.to take `copy`
_COPY_POSITION: dict[Any, int] = {
    aten.to.dtype: 3,
    aten.to.device: 4,
    aten.to.other: 3,
    aten.to.dtype_layout: 6,
}


def _unchanged_copy(node: fx.Node, source: fx.Node) -> bool:
    """A conversion that makes no copy because nothing differs."""
    copies = _argument(node, 99, "copy", False)
    target: Any = node.target
    position = _COPY_POSITION.get(target, 99)
    if len(node.args) > position:
        copies = node.args[position]
    return not copies and _same_tensor(node, source)


_IDENTITIES: dict[Any, Rule] = {
    aten.alias.default: _always,
    aten.lift_fresh.default: _always,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.alpha_dropout.default: _dropout,
    aten.to.dtype: _unchanged_copy,
    aten.to.device: _unchanged_copy,
    aten.to.other: _unchanged_copy,
    aten.to.dtype_layout: _unchanged_copy,
    aten.contiguous.default: _same_tensor,
    aten.expand.default: _same_tensor,
    aten.view.default: _same_tensor,
    aten.reshape.default: _same_tensor,
    aten.slice.Tensor: _full_slice,
    aten.flatten.using_ints: _same_tensor,
}


# --- mutations ------------------------------------------------------------------------


def _writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose memory ``node`` writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    found: list[fx.Node] = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        info = argument.alias_info
        if info is not None and info.is_write and isinstance(value, fx.Node):
            found.append(value)
    return tuple(found)


def _written(node: fx.Node) -> bool:
    """Whether ``node``'s memory is written under this name or another.

    Every node that may share the memory is followed, so removing a name for it can
    not change which values are written.
    """
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if any(current in _writes(user) for user in current.users):
            return True
        todo += [user for user in current.users if _may_share(user, current)]
        todo += [s for s in current.all_input_nodes if _may_share(current, s)]
    return False


def _may_share(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` may be (a view of) ``source``'s memory."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem of a list of views
    if target in (
        aten.reshape.default,
        aten.contiguous.default,
        aten.flatten.using_ints,
    ):
        return True
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if value is source and argument.alias_info is not None:
            return True
    return f"{target}".startswith("aten.to.") or target is aten.dropout.default


def _functionalize(node: fx.Node) -> None:
    """``x.relu_()`` -> ``x.relu()`` where nobody else sees ``x``."""
    functional = _out_of_place(node.target)
    source = node.args[0] if node.args else None
    if functional is None or not isinstance(source, fx.Node):
        return
    if source.op != "call_function" or not _is_fresh(source):
        return
    if not _only_reader_from(source, node):
        return
    node.target = functional


def _out_of_place(target: Any) -> Any:
    """The overload without the trailing underscore, with the same arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if not target._schema.name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(aten, name[:-1], None)
    overload = getattr(packet, target._overloadname, None) if packet else None
    if overload is None:
        return None
    ours = [a.name for a in target._schema.arguments]
    return overload if ours == [a.name for a in overload._schema.arguments] else None


def _is_fresh(node: fx.Node) -> bool:
    """Whether the node's op allocates its output (it is no view of anything)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return not any(_may_share(node, source) for source in node.all_input_nodes)


def _only_reader_from(source: fx.Node, node: fx.Node) -> bool:
    """No other user of ``source`` comes after ``node`` or is a view of it."""
    before = True
    order = {n: i for i, n in enumerate(source.graph.nodes)}
    for user in source.users:
        if user is node:
            continue
        if order[user] > order[node] or _may_share(user, source):
            before = False
    value, old = node.meta.get("val"), source.meta.get("val")
    same = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
    return before and same and value.dtype == old.dtype  # type: ignore[union-attr]
