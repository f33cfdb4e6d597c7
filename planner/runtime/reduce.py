"""Gradients after the last micro-batch, summed over whatever divided the work."""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.runtime.store import Store, Stored


def _gradient(stored: Stored) -> Tensor:
    """What the micro-batches left, zeros where nothing did."""
    found = stored.gradient if stored.gradient is not None else stored.leaf.grad
    return torch.zeros_like(stored.leaf) if found is None else found


def _by_dtype(names: Iterable[str], grads: dict[str, Tensor]) -> list[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(grads[name].dtype, []).append(name)
    return list(groups.values())


def _flat_sum(
    axis: Any,
    names: Sequence[str],
    grads: dict[str, Tensor],
    where: str,
    shards: Store | None = None,
) -> None:
    """One all-reduce of all ``names``; ``shards``: they are data ranks' shards."""
    if axis.size == 1:
        return
    for group in _by_dtype(names, grads):
        flat = torch.cat([grads[n].reshape(-1) for n in group])
        even = -1
        if shards is not None:  # as the plan counts: an equal share of every rank
            even = -(-shards.elements(group) // shards.topology.shard.size)
        axis.all_reduce_(flat, "step", where, even)
        at = 0
        for n in group:
            size = grads[n].numel()
            grads[n] = flat[at : at + size].view(grads[n].shape)
            at += size


def reduce_gradients(store: Store, tied: Sequence[tuple[str, Any]]) -> None:
    """Sum gradients over every axis that divides the work, into the masters."""
    topology = store.topology
    with torch.no_grad():
        trainable = {n: s for n, s in store.parameters.items() if s.trainable}
        grads = {n: _gradient(s) for n, s in trainable.items()}
        summed = [n for n, s in trainable.items() if s.summed]
        thirds = store if store.gathers else None
        _flat_sum(topology.tp, summed, grads, "replicated gradients", thirds)
        for name, axis in tied:
            flat = grads[name].reshape(-1).contiguous().clone()
            axis.all_reduce_(flat, "step", "tied gradients")
            grads[name] = flat.view(grads[name].shape)
        if not store.divided:
            _flat_sum(topology.dp, list(grads), grads, "gradients")
        else:
            if not store.gathers:
                _scatter(store, grads)
            _flat_sum(topology.replicate, list(grads), grads, "gradients", store)
        for name, stored in trainable.items():
            local = grads[name].reshape(store.local_master(stored).shape)
            master = stored.master
            master.grad = store.distribute(
                local.to(master.dtype), stored.shape, stored.placement
            )
            stored.leaf.grad, stored.gradient = None, None


def _scatter(store: Store, grads: dict[str, Tensor]) -> None:
    for group in _by_dtype(list(grads), grads):
        flat = store.pack({n: grads[n] for n in group})
        mine = store.topology.shard.scatter_sum_flat(
            flat, "step", "gradients", store.elements(group)
        )
        grads.update(store.unpack_shards(mine, group))


def clip_gradients(store: Store, max_norm: float, skip: Collection[str]) -> Tensor:
    """Clip by the norm over all ranks, every element counted once."""
    topology = store.topology
    total = torch.zeros((), dtype=torch.float64, device=topology.device)
    for name, stored in store.parameters.items():
        grad = stored.master.grad
        if grad is None or name in skip:
            continue
        copies = topology.replicate.size
        if stored.placement.kind != "S":
            copies *= topology.tp.size
        if not store.divided:
            copies *= topology.shard.size
        local: Tensor = grad.to_local()  # type: ignore[attr-defined]
        total += local.double().pow(2).sum() / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for stored in store.parameters.values():
        if stored.master.grad is not None:
            stored.master.grad.mul_(factor.to(stored.master.grad.dtype))
    return norm.float()
