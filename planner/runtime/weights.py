"""Where parameters get their values: the user's module, or an initialization on demand.

A model on the meta device is initialized module by module, and every rank keeps only
its part, so that a model larger than one rank's memory can be built. Each module draws
from its own seed: all ranks agree, whatever they skip.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false
import copy
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from planner.errors import PlannerError

Init = Callable[[nn.Module], None]


def default_init(module: nn.Module) -> None:
    """``reset_parameters`` where there is one; gains 1, biases 0, else normal 0.02."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return
    with torch.no_grad():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_floating_point():
                continue
            if p.dim() < 2:
                p.fill_(1.0 if "weight" in name or "scale" in name else 0.0)
            else:
                p.normal_(0.0, 0.02)


def values_of(
    model: nn.Module,
    names: Sequence[str],
    *,
    seed: int,
    init: Init | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the parameters and buffers ``names``, one at a time.

    Without ``init`` tensors on the meta device stay there.
    """
    wanted = dict.fromkeys(names)
    meta: dict[str, list[str]] = {}
    for name in wanted:
        tensor = _get(model, name)
        if tensor.device.type != "meta" or init is None:
            yield name, tensor.detach()
        else:
            meta.setdefault(name.rpartition(".")[0], []).append(name)
    for path, inside in meta.items():
        assert init is not None
        module = model.get_submodule(path)
        own = _materialized(module, path, seed, init, dtype)
        for name in inside:
            key = name.rpartition(".")[2]
            found = own.get(key)
            if found is None:
                raise PlannerError(
                    "a buffer on the meta device has no values",
                    name,
                    "build the model on the CPU, or give init=",
                )
            yield name, found


def _get(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key)


def _materialized(
    module: nn.Module, path: str, seed: int, init: Init, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The module's own parameters with values, in a copy without its children."""
    bare = copy.copy(module)
    bare._modules = {}
    bare._buffers = {}
    bare._parameters = {
        key: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype), p.requires_grad)
        for key, p in module._parameters.items()
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + zlib.crc32(path.encode()))
        init(bare)
    return {k: p.detach() for k, p in bare._parameters.items() if p is not None}
