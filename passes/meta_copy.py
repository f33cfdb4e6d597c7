"""A copy of a module whose tensors hold no data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from passes.walk import buffers_of, parameters_of


def meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Deep copy with every tensor on the meta device; ties and modes are kept.

    Parameters, buffers and plain tensor attributes are replaced; floating ones are
    cast to ``dtype`` if given. Hooks and settings are copied. The original is
    untouched and no data is copied.
    """
    memo: dict[int, Any] = {}
    shared: dict[tuple[object, ...], torch.Tensor] = {}
    for module in model.modules():
        for store in (parameters_of(module), buffers_of(module), vars(module)):
            for value in store.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = _moved(value, dtype, shared)
    # the originals must outlive the copy: deepcopy finds them by address
    return copy.deepcopy(model, memo)


def _moved(
    value: torch.Tensor,
    dtype: torch.dtype | None,
    shared: dict[tuple[object, ...], torch.Tensor],
) -> torch.Tensor:
    key: tuple[object, ...] = (
        type(value),
        value.untyped_storage()._cdata,  # pyright: ignore[reportPrivateUsage]
        value.storage_offset(),
        tuple(value.shape),
        tuple(value.stride()),
    )
    if key not in shared:
        cast = dtype if dtype is not None and value.is_floating_point() else None
        moved = torch.empty_like(value.detach(), device="meta", dtype=cast)
        if isinstance(value, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=value.requires_grad)
        shared[key] = moved
    return shared[key]
