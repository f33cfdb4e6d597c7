"""Checkpoints that move between plans, by ``torch.distributed.checkpoint``.

Tensors are stored under the model's own names in the model's own element order, so any
plan of the model, or one process, reads them. Masters whose DTensor is in that order
are written by every rank in parts; others (fused projections that take a share of
every part) are made whole first, one tensor at a time on every rank of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from planner.runtime.store import Stored

_dcp: Any = checkpoint

if TYPE_CHECKING:
    from planner.runtime.apply import Parallel


def save(
    parallel: Parallel, path: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write parameters, buffers and the optimizer's states. Every rank calls it."""
    state = _state(parallel, optimizer)
    for name, aliases in parallel.plan.model.tied.items():
        if name in state["model"]:
            state["model"] |= dict.fromkeys(aliases, state["model"][name])
    _dcp.save(state, checkpoint_id=str(path))


def load(
    parallel: Parallel, path: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what any plan of the model saved. Every rank calls it.

    The optimizer must be of the kind that was saved; its states are made where it has
    none yet.
    """
    if optimizer is not None:
        _make_states(parallel, optimizer)
    state = _state(parallel, optimizer)
    _dcp.load(state, checkpoint_id=str(path))
    with torch.no_grad():
        for stored in parallel.store.parameters.values():
            _put(parallel, stored, stored.master, state["model"][stored.name])
            for key, value in _states_of(optimizer, stored):
                _put(
                    parallel, stored, value, state["optimizer"][f"{stored.name}.{key}"]
                )
        for name in _buffers(parallel):
            buffer = parallel.store.buffers[name]
            buffer.copy_(_cut(parallel, name, state["model"][name]))
    parallel.store.stale = True


def _permuted(stored: Stored) -> bool:
    p = stored.placement
    return p.kind == "S" and bool(p.parts or p.outer > 1)


def _states_of(
    optimizer: torch.optim.Optimizer | None, stored: Stored
) -> Iterator[tuple[str, Any]]:
    if optimizer is None or stored.master not in optimizer.state:
        return
    for key, value in optimizer.state[stored.master].items():
        if isinstance(value, Tensor):
            yield key, value


def _state(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Tensor]]:
    model: dict[str, Tensor] = {}
    states: dict[str, Tensor] = {}
    for stored in parallel.store.parameters.values():
        model[stored.name] = _portable(parallel, stored, stored.master)
        for key, value in _states_of(optimizer, stored):
            states[f"{stored.name}.{key}"] = _portable(parallel, stored, value)
    for name in _buffers(parallel):
        model[name] = _whole_buffer(parallel, name)
    return {"model": model, "optimizer": states}


def _portable(parallel: Parallel, stored: Stored, value: Tensor) -> Tensor:
    """``value`` in the model's element order."""
    if not isinstance(value, DTensor):
        return value
    value = value.detach()
    assert isinstance(value, DTensor)
    if _permuted(stored):
        return parallel.store.full(stored.name, value.to_local()).clone()
    return value


def _put(parallel: Parallel, stored: Stored, target: Tensor, value: Tensor) -> None:
    """Write what was loaded into ``target`` (where it is not the same memory)."""
    if not isinstance(target, DTensor):
        target.copy_(value)
    elif _permuted(stored):
        store = parallel.store
        part = store.cut_parameter(value, stored.placement)
        local = target.detach()
        assert isinstance(local, DTensor)
        local.to_local().copy_(store.my_rows(stored, part))


def _buffers(parallel: Parallel) -> list[str]:
    """Buffers that a state dict has."""
    kept = {t.name for t in parallel.graph.tensors if t.persistent}
    return [n for n in parallel.store.buffers if n in kept]


def _whole_buffer(parallel: Parallel, name: str) -> Tensor:
    from planner.runtime.comm import convert
    from planner.search.placements import REPLICATED

    shape = parallel.graph.tensor(name).shape
    place = parallel.table.stored.get(name, REPLICATED)
    tp = parallel.topology.tp
    local = parallel.store.buffers[name]
    return convert(local, place, REPLICATED, shape, tp, "step").clone()


def _cut(parallel: Parallel, name: str, whole: Tensor) -> Tensor:
    from planner.search.placements import REPLICATED

    place = parallel.table.stored.get(name, REPLICATED)
    return parallel.store.cut_parameter(whole, place)


def _make_states(parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    """A step that changes nothing, for optimizers that make their states in it."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(
            group["lr"], Tensor
        ) else 0.0  # fmt: skip
    for p in parallel.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
