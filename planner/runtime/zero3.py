"""ZeRO-3: a block's parameters are gathered while it runs.

One all-gather brings all of a block's parameters before its forward; what autograd
would keep of them is kept as a name, and the first one that backward asks for gathers
the block again. One reduce-scatter returns the gradients of the whole block.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from planner.runtime.comm import Recorder
from planner.runtime.store import Store


@dataclass(frozen=True, slots=True)
class _Kept:
    """A view of a gathered parameter."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class BlockParameters:
    """Gathers the parameters ``names`` of one block."""

    store: Store
    recorder: Recorder
    block: int
    names: tuple[str, ...]

    def collect(self, shards: Sequence[Tensor], phase: str) -> dict[str, Tensor]:
        """Whole tensor-parallel parts from this rank's shards and the others'."""
        result: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, shard in zip(self.names, shards, strict=True):
            by_dtype.setdefault(shard.dtype, {})[name] = shard
        for group in by_dtype.values():
            flat = self.store.topology.shard.gather_flat(
                self.store.pack_shards(group), phase, "parameters",
                self.store.elements(group),
            )  # fmt: skip
            result |= self.store.unpack(flat, list(group))
        return result

    def enter(self) -> None:
        """Gather and keep the block's parameters."""
        shards = [self.store.parameters[n].leaf for n in self.names]
        fulls: Any = _Gather.apply(self, *shards)
        self.store.hold(self.block, dict(zip(self.names, fulls, strict=True)))

    def leave(self) -> None:
        self.store.release(self.block)

    def again(self) -> dict[str, Tensor]:
        """The gathered parameters during backward."""
        found = self.store.gathered(self.block)
        if found is None:
            with torch.no_grad():
                shards = [self.store.parameters[n].leaf for n in self.names]
                found = self.collect(shards, "backward")
            self.store.hold(self.block, found)
        return found

    def before_backward(self, made: Iterable[Tensor]) -> None:
        """Gather again when the first gradient of the block's results arrives."""

        def gather(_: Tensor) -> None:
            self.again()

        for tensor in made:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(gather)

    def hooks(self) -> AbstractContextManager[Any]:
        """Autograd keeps names in place of gathered parameters."""
        held = self.store.gathered(self.block) or {}
        owner = {t.untyped_storage()._cdata: n for n, t in held.items()}

        def pack(x: Tensor) -> Any:
            name = owner.get(x.untyped_storage()._cdata)
            if name is None:
                return x
            return _Kept(name, tuple(x.shape), x.stride(), int(x.storage_offset()))

        def unpack(kept: Any) -> Tensor:
            if not isinstance(kept, _Kept):
                return kept
            base = self.again()[kept.name]
            return base.as_strided(kept.size, kept.stride, kept.offset)

        return saved_tensors_hooks(pack, unpack)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: BlockParameters, *shards: Tensor) -> Any:
        ctx.job = job
        ctx.set_materialize_grads(False)
        phase = "backward" if job.recorder.in_backward else "forward"
        fulls = job.collect(shards, phase)
        return tuple(fulls[n].contiguous() for n in job.names)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        job: BlockParameters = ctx.job
        store = job.store
        job.leave()
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, grad in zip(job.names, grads, strict=True):
            stored = store.parameters[name]
            if not stored.trainable:
                continue
            dtype = store.gradient_dtype or stored.leaf.dtype
            if grad is None:
                grad = torch.zeros(stored.local, dtype=dtype, device=stored.leaf.device)
            by_dtype.setdefault(dtype, {})[name] = grad.to(dtype)
        result: dict[str, Tensor] = {}
        for group in by_dtype.values():
            mine = store.topology.shard.scatter_sum_flat(
                store.pack(group), "backward", "gradients", store.elements(group)
            )
            result |= store.unpack_shards(mine, list(group))
        out: list[Tensor | None] = [None]
        for name in job.names:
            grad = result.get(name)
            leaf = store.parameters[name].leaf
            out.append(
                None if grad is None else grad.reshape(leaf.shape).to(leaf.dtype)
            )
        return tuple(out)
