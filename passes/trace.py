"""nn.Module -> aten graph by torch.export on meta tensors.

The only file of this package that touches private torch API. The user's module is
never run on data and never changed: a copy whose tensors live on the meta device is
exported.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from passes.accounting import module_tensors
from passes.errors import PassError
from passes.ir import Tensor
from passes.traced import LayerRun as LayerRun
from passes.traced import TracedModel as TracedModel

_BATCH_HINT = 2  # sizes 0 and 1 are never symbolic in torch.export


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    training: bool = True,
    strict: bool = False,
) -> TracedModel:
    """Export ``model`` for ``batch`` samples (default: the example's).

    Axis 0 of every tensor argument whose size equals the example's batch (axis 0 of
    the first tensor argument) is the batch. ``dtype`` casts floating parameters,
    buffers and inputs. ``training=False`` exports under ``torch.no_grad``. The model's
    own train/eval mode is kept.

    Raises:
        PassError: the model can not be exported; names the op, the line of the user's
            model and what to do.
    """
    kwargs = dict(kwargs or {})
    meta = _to_meta(model, dtype)
    example = _example_batch(args, kwargs)
    target = example if batch is None else batch
    tensors = module_tensors(model if dtype is None else meta)

    def inputs(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _meta_inputs(args, kwargs, example, size, dtype)

    hint = max(target, _BATCH_HINT)
    exported = _export(meta, *inputs(hint), hint, training, strict, dynamic=True)
    symbolic = _is_symbolic(exported, hint)
    if not symbolic and hint != target:
        exported = _export(meta, *inputs(target), target, training, strict)
    template = _clean(exported)

    def rebatch(size: int) -> fx.GraphModule:
        base = template
        if not symbolic and size != target:
            base = _clean(_export(meta, *inputs(size), size, training, strict))
        return _concrete(base, inputs(size), tensors, training)

    graph_module = rebatch(target)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return TracedModel(
        graph_module=graph_module,
        batch=target,
        tensors=tensors,
        inputs=tuple(n.name for n in placeholders),
        batched_inputs=tuple(
            n.name for n in placeholders if _leading(n.meta.get("val")) == target
        ),
        training=training,
        symbolic=symbolic,
        rebatch=rebatch,
    )


# --- inputs ---------------------------------------------------------------------------


def _leading(value: object) -> int | None:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return int(value.shape[0])
    return None


def _example_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        size = _leading(leaf)
        if size is not None:
            return size
    raise PassError(
        "no example input is a tensor with a batch axis",
        fix="Give example inputs whose first axis is the batch",
    )


def _meta_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    example: int,
    batch: int,
    dtype: torch.dtype | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == example:
            shape[0] = batch
        kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return torch.empty(shape, dtype=kind, device="meta")

    return pytree.tree_map(one, (tuple(args), dict(kwargs)))


def _to_meta(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A deep copy whose tensors are on the meta device; ties are kept."""
    memo: dict[int, Any] = {}
    shared: dict[tuple[object, ...], torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else None
        return torch.empty_like(tensor, device="meta", dtype=kind)

    for module in model.modules():
        for store in (module._parameters, module._buffers, vars(module)):
            for value in store.values():
                if not isinstance(value, torch.Tensor) or id(value) in memo:
                    continue
                key = (
                    value.untyped_storage()._cdata,
                    value.storage_offset(),
                    tuple(value.shape),
                    tuple(value.stride()),
                )
                if key not in shared:
                    moved = move(value.detach())
                    if isinstance(value, nn.Parameter):
                        moved = nn.Parameter(moved, requires_grad=value.requires_grad)
                    shared[key] = moved
                memo[id(value)] = shared[key]
    return copy.deepcopy(model, memo)


# --- export ---------------------------------------------------------------------------


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    training: bool,
    strict: bool,
    dynamic: bool = False,
) -> torch.export.ExportedProgram:
    shapes: Any = None
    if dynamic:
        auto = torch.export.Dim.AUTO

        def axes(leaf: Any) -> Any:
            return {0: auto} if _leading(leaf) == batch else None

        shapes = pytree.tree_map(axes, _by_name(model, args, kwargs))
    with nullcontext() if training else torch.no_grad():
        return torch.export.export(
            model, args, kwargs, dynamic_shapes=shapes, strict=strict
        )


def _by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by parameter name, in the form that ``dynamic_shapes`` follows."""
    import inspect

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


def _is_symbolic(exported: torch.export.ExportedProgram, batch: int) -> bool:
    """Whether the batch axis of every batched input stayed symbolic."""
    seen = False
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in exported.graph_signature.user_inputs:
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            size = value.shape[0]
            if isinstance(size, torch.SymInt):
                seen = True
            elif size == batch:
                return False
    return seen


# --- graph ----------------------------------------------------------------------------

_DROPPED = re.compile(
    r"^(aten\._assert_tensor_metadata|aten\._assert_async|aten\._assert_scalar"
    r"|aten\.sym_constrain_range|aten\.sym_constrain_range_for_size)"
)


def _clean(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """Without guards and asserts; regions of no_grad and autocast written in place."""
    module = exported.module()
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        guard = node.op == "call_module" and "_guards_fn" in str(node.target)
        if guard or (node.op == "call_function" and _DROPPED.match(str(node.target))):
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda n: _impure(n))
    return fx.GraphModule(module, graph)


def _impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return False


# --- concrete metadata ----------------------------------------------------------------


class _Propagate(fx.Interpreter):
    """Runs the graph on fake tensors and records every value."""

    def __init__(self, module: fx.GraphModule, training: bool) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.training = training

    def run_node(self, n: fx.Node) -> Any:
        quiet = n.meta.get("no_grad", False) or not self.training
        with torch.set_grad_enabled(not quiet):
            value = super().run_node(n)
        n.meta["val"] = pytree.tree_map(_leaf, value)
        return value


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    flag = value.requires_grad
    return value.detach().requires_grad_(flag)


def _concrete(
    template: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    tensors: tuple[Tensor, ...],
    training: bool,
) -> fx.GraphModule:
    """A copy of ``template`` for concrete inputs: no symbolic size is left."""
    graph = fx.Graph()
    names: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(template.graph, names)
    graph.output(result)
    module = fx.GraphModule(template, graph)
    mode = FakeTensorMode(
        shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True
    )
    values = [
        mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(inputs)
    ]
    with mode:
        _Propagate(module, training).run(*values)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, int | float):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        elif node.op != "output":
            _where(node)
    module.recompile()
    return module


def _where(node: fx.Node) -> None:
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", ""))
    node.meta["module_path"] = re.sub(r"@\d+", "", path)
    node.meta["module_class"] = kind if isinstance(kind, str) else kind.__qualname__
