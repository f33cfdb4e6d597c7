"""What autograd keeps, measured by running the real module on fake CUDA tensors.

Independent of the traced graph: the module itself runs eagerly under
``saved_tensors_hooks``. Its CUDA branches are taken (fused dropout, fused RMS norm,
row statistics in FP32) though no GPU is there, except in attention, whose choice asks
the driver: it is sent to the kernel that torch's own rules name.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def fake_cuda_works() -> bool:
    """Whether this build of torch makes fake CUDA tensors without a GPU."""
    try:
        with FakeTensorMode():
            return (torch.empty(2, device="cuda") + 1).is_cuda
    except (RuntimeError, AssertionError):
        return False


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch 2.x picks on an A100 for these operands."""
    if q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal)[0]
    if enable_gqa and q.shape[1] != k.shape[1]:
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=True)[0]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, dropout_p, is_causal)[0]


def kept_storages(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, int]:
    """Bytes of every storage that autograd keeps beyond parameters and inputs."""
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seed = tensor.numel() <= 2 and not tensor.is_floating_point()
        if not seed:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        return tensor

    model = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            return torch.empty(t.shape, dtype=t.dtype, device="cuda")

        for module in model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = nn.Parameter(fake(p), p.requires_grad)
            for key, b in list(module._buffers.items()):
                if b is not None:
                    module._buffers[key] = fake(b)
        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        owned = [*model.parameters(), *model.buffers()]
        owned += [
            t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ]
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        patch = mock.patch.object(F, "scaled_dot_product_attention", _attention)
        with patch, hooks:
            result = model(*args, **kwargs)
        for tensor in owned:
            found.pop(tensor.untyped_storage()._cdata, None)
        del result
    return found
