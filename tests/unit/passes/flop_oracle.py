"""FLOPs of the real module, counted by torch, beside those of the lowered graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from passes.ir import Op, OpGraph, OpKind


class Flops(NamedTuple):
    forward: int
    backward: int


def torch_flops(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool = True,
) -> Flops:
    """Counted while ``module`` runs, forward and then backward from all its outputs.

    Attention runs as two products: torch's fused kernels have no formula on the meta
    and CPU devices.
    """
    with FlopCounterMode(display=False) as mode, sdpa_kernel(SDPBackend.MATH):
        result = module(*args, **kwargs)
        forward = mode.get_total_flops()
        if not backward:
            return Flops(forward, 0)
        loss = getattr(result, "loss", None)
        if isinstance(loss, torch.Tensor):
            result = loss
        floats = [
            t
            for t in pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        sum((t.float().sum() for t in floats[1:]), floats[0].float().sum()).backward()
        return Flops(forward, mode.get_total_flops() - forward)


def _attention_recompute(op: Op) -> int:
    """A fused backward makes the scores again: one product more than the two-product
    form, whose scores are kept."""
    if op.kind is not OpKind.ATTENTION or not op.backward_flops:
        return 0
    names = ("batch", "q_heads", "q_len", "kv_len", "qk_dim")
    product = 2
    for name in names:
        product *= op.number(name)
    return product


def _grouped_weight_gradient(op: Op) -> int:
    """torch gives the weight gradient of a convolution of g groups g times the work
    that it has."""
    if op.kind is not OpKind.CONV or not op.backward_flops:
        return 0
    return (op.number("groups") - 1) * op.forward_flops


def counted_flops(graph: OpGraph) -> Flops:
    """The graph's FLOPs as torch would count them.

    Grouped products (experts) and recurrences are left out: torch has no formula for
    ``_grouped_mm``, nor for an LSTM that runs as one CPU kernel.
    """
    forward = backward = 0
    for op in graph.ops:
        if op.kind in (OpKind.GROUPED_GEMM, OpKind.SCAN):
            continue
        forward += op.forward_flops
        backward += op.backward_flops
        backward += _grouped_weight_gradient(op) - _attention_recompute(op)
    return Flops(forward, backward)
