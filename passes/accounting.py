"""Parameters and buffers of a module: tied ones once, under the model's own names."""

from __future__ import annotations

import torch
from torch import nn

from passes.errors import PassError
from passes.ir import DTYPE_BYTES, Tensor, TensorKind
from passes.walk import buffers_of, named_modules, unsaved_buffers_of


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory seen in the same way."""
    try:
        storage = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except (NotImplementedError, RuntimeError):
        return (id(tensor),)
    return (
        storage,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def _persistent_names(module: nn.Module) -> set[str]:
    names: set[str] = set()
    for path, child in named_modules(module, remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = buffers_of(child).keys() - unsaved_buffers_of(child)
        names.update(prefix + name for name in kept)
    return names


def module_tensors(
    module: nn.Module, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Every parameter, then every buffer, each once.

    The name is that of the first registration, the others are ``aliases``. Two
    registrations are the same tensor if they share storage, offset, shape and strides
    (views of one storage with another shape count as tensors of their own). Floating
    tensors are listed in ``dtype`` if given.

    Raises:
        PassError: a parameter whose shape is not known yet (lazy modules).
    """
    persistent = _persistent_names(module)
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    kinds: dict[str, TensorKind] = {}
    sources = (
        (TensorKind.PARAMETER, module.named_parameters(remove_duplicate=False)),
        (TensorKind.BUFFER, module.named_buffers(remove_duplicate=False)),
    )
    for kind, named in sources:
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise PassError(
                    "parameter without a shape", name, "Run the model once first"
                )
            owner = first.setdefault(_key(tensor), name)
            if owner != name:
                aliases[owner].append(name)
                continue
            found[name], kinds[name], aliases[name] = tensor, kind, []
    return tuple(
        Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_dtype_name(name, tensor, dtype),
            kind=kinds[name],
            trainable=kinds[name] is TensorKind.PARAMETER and tensor.requires_grad,
            persistent=kinds[name] is TensorKind.PARAMETER or name in persistent,
            aliases=tuple(aliases[name]),
            requires_grad=tensor.requires_grad,
        )
        for name, tensor in found.items()
    )


def _dtype_name(name: str, tensor: torch.Tensor, cast: torch.dtype | None) -> str:
    kind = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
    text = str(kind).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise PassError(
            f"{name} has a dtype that can not be planned", text, "Cast the model first"
        )
    return text
