"""Convolution -> im2col + GEMM, as a graph that runs.

A convolution of any number of spatial dims is rewritten into plain aten ops::

    forward      x -> pad -> unfold per dim -> [N, o.., Ci * k..] @ W^T -> [N, Co, o..]
    transposed   x -> [N, i.., Ci] @ W -> [N, Co, i.., k..] -> fold per dim -> crop

Groups run as one batched product (``bmm``) with the group as its batch, so a
depthwise convolution is ``ci`` products with one output column each. The transposed
form is the adjoint of the forward one: its GEMM comes first and the patches are
summed afterwards (col2im), so it does no work on inserted zeros and its FLOPs equal
those that torch's FlopCounterMode gives the convolution.

What is left out: ``aten.conv_tbc`` and quantised convolutions stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg

from passes.conv_info import (
    CONV_TARGETS,
    ConvCall,
    ConvInfo,
    ConvRole,
    call_of,
    info_of,
)
from passes.errors import PassError
from passes.traced import TracedModel

aten = torch.ops.aten


Size = int | fx.Node
_KEPT = ("nn_module_stack", "stack_trace", "torch_fn", "from_node", "custom")


class _Emitter:
    """Adds nodes before ``node``; each gets its fake value and metadata."""

    def __init__(self, node: fx.Node, info: ConvInfo) -> None:
        self.node, self.info = node, info
        self.mode = detect_fake_mode(node.meta["val"])
        if self.mode is None:
            raise PassError(
                "convolution without a fake value",
                node.name,
                "trace the model with torch.export or propagate fake tensors first",
            )

    def __call__(
        self, role: ConvRole, target: Callable[..., Any], *args: Any
    ) -> fx.Node:
        graph = self.node.graph
        new = graph.create_node(
            "call_function", target, args, {}, name=f"{self.node.name}_{role}"
        )
        values = map_arg(args, lambda a: a.meta["val"])
        assert self.mode is not None
        grad = torch.set_grad_enabled(not self.node.meta.get("no_grad", False))
        with self.mode, enable_python_dispatcher(), grad:
            value = target(*values)
        keep = (*_KEPT, "module_path", "module_class", "no_grad")
        new.meta = {k: self.node.meta[k] for k in keep if k in self.node.meta}
        if isinstance(value, torch.Tensor):  # a leaf, as traced values are
            value = value.detach().requires_grad_(value.requires_grad)
        new.meta |= {"val": value, "conv": self.info, "conv_role": role}
        return new

    def size(self, x: fx.Node, dim: int) -> Size:
        """A static size as an int, a symbolic one as a node."""
        size = x.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self(ConvRole.COLUMNS, aten.sym_size.int, x, dim)

    def affine(self, a: Size, scale: int, shift: int) -> Size:
        """``a * scale + shift``, where ``a`` may be a node."""
        if isinstance(a, int):
            return a * scale + shift
        if scale != 1:
            a = self(ConvRole.COLUMNS, operator.mul, a, scale)
        return self(ConvRole.COLUMNS, operator.add, a, shift) if shift else a


def _pad(e: _Emitter, x: fx.Node, start: Sequence[int], end: Sequence[int]) -> fx.Node:
    """Zero-pad (or crop, where negative) the trailing ``len(start)`` dims."""
    if not any(start) and not any(end):
        return x
    widths = [w for pair in zip(start, end, strict=True) for w in reversed(pair)]
    return e(ConvRole.PAD, aten.constant_pad_nd.default, x, widths[::-1])


def _patches(e: _Emitter, x: fx.Node) -> fx.Node:
    """``[N, C, i..] -> [N, C, o.., k..]``, a view."""
    info = e.info
    rank = len(info.kernel)
    for i in range(rank):
        k, dilation = info.kernel[i], info.dilation[i]
        span = dilation * (k - 1) + 1
        x = e(
            ConvRole.PATCHES, aten.unfold.default, x, 2 + i, span, info.stride[i]
        )  # the window becomes the last dim
        if dilation > 1 and k > 1:
            x = e(ConvRole.PATCHES, aten.slice.Tensor, x, -1, 0, span, dilation)
    return x


def _fold(e: _Emitter, x: fx.Node) -> fx.Node:
    """``[N, C, i.., k..] -> [N, C, full..]``: the adjoint of :func:`_patches`."""
    info = e.info
    for i in reversed(range(len(info.kernel))):
        k, dilation = info.kernel[i], info.dilation[i]
        span = dilation * (k - 1) + 1
        if dilation > 1 and k > 1:  # put dilation - 1 zeros between kernel taps
            x = e(ConvRole.FOLD, aten.unsqueeze.default, x, -1)
            x = e(ConvRole.FOLD, aten.constant_pad_nd.default, x, [0, dilation - 1])
            x = e(ConvRole.FOLD, aten.flatten.using_ints, x, -2, -1)
            x = e(ConvRole.FOLD, aten.constant_pad_nd.default, x, [0, 1 - dilation])
        sizes = [e.size(x, d) for d in range(x.meta["val"].dim() - 1)]
        sizes[2 + i] = e.affine(sizes[2 + i], info.stride[i], span - info.stride[i])
        x = e(
            ConvRole.FOLD,
            aten.unfold_backward.default,
            x,
            sizes,
            2 + i,
            span,
            info.stride[i],
        )
    return x


def _permute(e: _Emitter, role: ConvRole, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    if list(dims) == sorted(dims):
        return x
    return e(role, aten.permute.default, x, list(dims))


def _columns(e: _Emitter, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The patches written out in the GEMM's order: the copy that im2col is.

    A kernel of one tap without stride has no patches: its input is the operand.
    """
    x = _permute(e, ConvRole.COLUMNS, x, dims)
    if max(*e.info.kernel, *e.info.stride, 1) == 1:
        return x
    return e(ConvRole.COLUMNS, aten.contiguous.default, x)


def _product(e: _Emitter, rows: fx.Node, weight: fx.Node) -> fx.Node:
    """``[G, N, p.., K] x [G, K, n] -> [G, N, p.., n]`` as one batched product."""
    val = rows.meta["val"]
    shape = [e.size(rows, d) for d in range(val.dim() - 1)] + [e.info.n]
    a = e(ConvRole.COLUMNS, aten.flatten.using_ints, rows, 1, -2)
    y = e(ConvRole.GEMM, aten.bmm.default, a, weight)
    return e(ConvRole.LAYOUT, aten.view.default, y, shape)


def _add_bias(e: _Emitter, y: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Add ``bias`` along dim 1 of ``[N, C, spatial..]``."""
    if bias is None:
        return y
    shape = [-1] + [1] * len(e.info.kernel)
    b = e(ConvRole.BIAS, aten.view.default, bias, shape)
    dtype = y.meta["val"].dtype
    if b.meta["val"].dtype != dtype:  # under autocast only the product is cast
        b = e(ConvRole.BIAS, aten.to.dtype, b, dtype)
    return e(ConvRole.BIAS, aten.add.Tensor, y, b)


def _forward(e: _Emitter, call: ConvCall, x: fx.Node) -> fx.Node:
    """im2col, then the product."""
    info = e.info
    rank, groups = len(info.kernel), info.groups
    out = list(range(2, 2 + rank))
    x = _pad(e, x, info.padding, info.padding_end)
    x = _patches(e, x)  # [N, C, o.., k..]
    if groups == 1:
        window = list(range(2 + rank, 2 + 2 * rank))
        x = _columns(e, x, [0, *out, 1, *window])
        rows = e(ConvRole.COLUMNS, aten.flatten.using_ints, x, 1 + rank, -1)
        w = e(ConvRole.WEIGHT, aten.flatten.using_ints, call.weight, 1, -1)
        y = e(ConvRole.GEMM, aten.linear.default, rows, w, call.bias)
        return _permute(
            e, ConvRole.LAYOUT, y, [0, 1 + rank, *range(1, 1 + rank)]
        )  # [N, Co, o..]
    x = e(ConvRole.COLUMNS, aten.unflatten.int, x, 1, [groups, info.ci // groups])
    spatial = list(range(3, 3 + rank))
    window = list(range(3 + rank, 3 + 2 * rank))
    x = _columns(e, x, [1, 0, *spatial, 2, *window])
    rows = e(ConvRole.COLUMNS, aten.flatten.using_ints, x, 2 + rank, -1)
    w = e(ConvRole.WEIGHT, aten.view.default, call.weight, [groups, info.n, info.k])
    w = e(ConvRole.WEIGHT, aten.transpose.int, w, 1, 2)
    y = _product(e, rows, w)  # [G, N, o.., Co/G]
    y = _permute(e, ConvRole.LAYOUT, y, [1, 0, 2 + rank, *range(2, 2 + rank)])
    y = e(ConvRole.LAYOUT, aten.contiguous.default, y)
    y = e(ConvRole.LAYOUT, aten.flatten.using_ints, y, 1, 2)
    return _add_bias(e, y, call.bias)


def _transposed(e: _Emitter, call: ConvCall, x: fx.Node) -> fx.Node:
    """The product, then col2im and the crop by ``padding``."""
    info = e.info
    rank, groups = len(info.kernel), info.groups
    per_group = [info.co // groups, *info.kernel]
    if groups == 1:
        rows = _permute(e, ConvRole.COLUMNS, x, [0, *range(2, 2 + rank), 1])
        w = e(ConvRole.WEIGHT, aten.flatten.using_ints, call.weight, 1, -1)
        y = e(ConvRole.GEMM, aten.matmul.default, rows, w)  # [N, i.., Co * k..]
        y = e(ConvRole.LAYOUT, aten.unflatten.int, y, 1 + rank, per_group)
        window = range(2 + rank, 2 + 2 * rank)
        y = _permute(e, ConvRole.LAYOUT, y, [0, 1 + rank, *range(1, 1 + rank), *window])
    else:
        x = e(ConvRole.COLUMNS, aten.unflatten.int, x, 1, [groups, info.ci // groups])
        rows = _permute(e, ConvRole.COLUMNS, x, [1, 0, *range(3, 3 + rank), 2])
        w = e(ConvRole.WEIGHT, aten.view.default, call.weight, [groups, info.k, info.n])
        y = _product(e, rows, w)  # [G, N, i.., Co/G * k..]
        y = e(ConvRole.LAYOUT, aten.unflatten.int, y, 2 + rank, per_group)
        window = range(3 + rank, 3 + 2 * rank)
        y = _permute(
            e, ConvRole.LAYOUT, y, [1, 0, 2 + rank, *range(2, 2 + rank), *window]
        )
        y = e(ConvRole.LAYOUT, aten.flatten.using_ints, y, 1, 2)
    y = _fold(e, y)
    crop = [-p for p in info.padding]
    extra = [o - p for o, p in zip(info.output_padding, info.padding, strict=True)]
    return _add_bias(e, _pad(e, y, crop, extra), call.bias)


def _layout_of(value: torch.Tensor) -> torch.memory_format:
    if value.is_contiguous():
        return torch.contiguous_format
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if value.dim() == 5 and value.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


def _as_before(e: _Emitter, y: fx.Node) -> fx.Node:
    """Give ``y`` the memory layout that the convolution's output had.

    Which copies are made follows from the geometry, never from strides: those of a
    single sample are ambiguous, and the graph must be the same at every batch.
    """
    before, now = e.node.meta["val"], y.meta["val"]
    assert before.shape == now.shape, (e.info, before.shape, now.shape)
    layout = _layout_of(before)
    rows_last = not e.info.transposed and e.info.groups == 1  # [N, o.., Co] in memory
    if layout is torch.contiguous_format:
        return e(ConvRole.LAYOUT, aten.contiguous.default, y) if rows_last else y
    if rows_last:
        return y
    new = e.node.graph.call_function(
        aten.contiguous.default, (y,), {"memory_format": layout}
    )
    new.meta = y.meta | {"val": before}
    return new


def _rewrite(node: fx.Node) -> None:
    """Replace one convolution node."""
    call = call_of(node)
    info = info_of(node, call)
    rank = len(info.kernel)
    with node.graph.inserting_before(node):
        emit = _Emitter(node, info)
        x = call.x
        unbatched = x.meta["val"].dim() == rank + 1
        if unbatched:
            x = emit(ConvRole.LAYOUT, aten.unsqueeze.default, x, 0)
        y = (_transposed if call.transposed else _forward)(emit, call, x)
        if unbatched:
            y = emit(ConvRole.LAYOUT, aten.squeeze.dim, y, 0)
        y = _as_before(emit, y)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


def _autocast_of(owner: fx.GraphModule, name: str) -> AbstractContextManager[Any]:
    """The autocast region that runs the sub-graph ``name``, if one does."""
    for node in owner.graph.nodes:
        if "wrap_with_autocast" not in str(node.target):
            continue
        device, dtype, enabled, cache, body = node.args[:5]
        if isinstance(body, fx.Node) and body.target == name:
            return torch.autocast(device, dtype, enabled, cache)
    return nullcontext()


@dataclass(frozen=True, slots=True)
class ConvToGemm:
    """Rewrite every convolution into explicit im2col + GEMM (+ bias).

    Requires: nodes carry ``meta["val"]`` (fake tensors, as torch.export leaves them);
    sizes of weights are static, batch and spatial sizes may be symbolic.

    Ensures: no node of :data:`CONV_TARGETS` is left (in sub-graphs neither); outputs
    and all gradients equal the input graph's; each new node carries the convolution's
    ``nn_module_stack``, its fake value, ``meta["conv"]`` (:class:`ConvInfo`, the same
    object for the whole group) and ``meta["conv_role"]``; output strides are kept. A
    padding mode other than zeros is a separate op before the convolution and stays.
    Running it again changes nothing. The input graph module is not modified; the
    result shares its parameters and buffers.

    ``only``: rewrite just convolutions of these spatial ranks.
    """

    name: ClassVar[str] = "conv-to-gemm"
    only: tuple[int, ...] = (1, 2, 3)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        result = fx.GraphModule(module, copy.deepcopy(module.graph))
        result.meta.update(module.meta)
        for node in list(result.graph.nodes):
            if node.op == "get_attr" and isinstance(node.target, str):
                child = getattr(result, node.target, None)
                if isinstance(child, fx.GraphModule):
                    with _autocast_of(result, node.target):
                        setattr(result, node.target, self(child))
            elif node.target in CONV_TARGETS and self._wants(node):
                _rewrite(node)
        result.graph.lint()
        result.recompile()
        return result

    def _wants(self, node: fx.Node) -> bool:
        weight = call_of(node).weight.meta.get("val")
        return weight is not None and weight.dim() - 2 in self.only


def conv_to_gemm(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite all convolutions of ``module``; see :class:`ConvToGemm`."""
    return ConvToGemm()(module)


def materialize(traced: TracedModel) -> TracedModel:
    """``traced`` with every convolution as im2col + GEMM, at any batch."""
    known: dict[int, fx.GraphModule] = {}

    def rebatch(batch: int) -> fx.GraphModule:
        if batch not in known:
            known[batch] = conv_to_gemm(traced.rebatch(batch))
        return known[batch]

    graph_module = conv_to_gemm(traced.graph_module)
    return replace(traced, graph_module=graph_module, rebatch=rebatch)
