"""The plan's mesh as process groups and a device mesh, seen from one rank.

Ranks are numbered as the plan says, row-major over pp, dp_replicate, dp_shard, cp, tp.
Stored tensors live on the mesh ``(pp, dp_replicate, tp, shard)`` of the same ranks,
``shard`` joining dp_shard and cp: ZeRO divides what tensor parallelism left.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planner.errors import PlannerError
from planner.runtime.comm import Axis, Recorder
from planner.workload import Parallelism

STORAGE_AXES = ("pp", "dp_replicate", "tp", "shard")


@dataclass(frozen=True, slots=True)
class Topology:
    """Groups of this rank. ``dp``: all ranks that share its parameters' gradients."""

    parallelism: Parallelism
    rank: int
    coordinates: dict[str, int]
    mesh: DeviceMesh
    tp: Axis
    cp: Axis
    shard: Axis
    replicate: Axis
    dp: Axis
    pp: Axis
    backward_group: Any  # pp again: messages of both directions never wait in one queue
    device: torch.device

    @property
    def stage(self) -> int:
        return self.coordinates["pp"]

    def stage_group(self, stages: tuple[int, ...]) -> Axis:
        """The ranks of ``stages`` that share this rank's other coordinates. Every rank
        calls it, whatever its stage."""
        p = self.parallelism
        ranks = torch.arange(p.num_gpus).view(p.pp, -1)[list(stages)]
        group = _own_group(ranks.T.contiguous(), self.rank)
        line = cast("list[int]", ranks[:, self.rank % ranks.shape[1]].tolist())
        here = line.index(self.rank) if self.rank in line else 0
        return Axis("pp", len(line), here, tuple(line), group, self.pp.recorder)

    @property
    def storage_mesh(self) -> DeviceMesh:
        """The stage's part of the mesh that parameters live on."""
        return self.mesh["dp_replicate", "tp", "shard"]


def check_world(parallelism: Parallelism) -> None:
    """Raises unless torch.distributed runs with the plan's ranks."""
    if not dist.is_initialized():
        raise PlannerError(
            "torch.distributed is not initialized",
            fix="start with torchrun and call torch.distributed.init_process_group",
        )
    world = dist.get_world_size()
    if world != parallelism.num_gpus:
        raise PlannerError(
            "the plan is for another number of ranks",
            f"{world} ranks run, the plan has {parallelism.num_gpus}",
            f"start {parallelism.num_gpus} ranks, or plan for {world} GPUs",
        )


def build_topology(
    parallelism: Parallelism, device: torch.device, recorder: Recorder
) -> Topology:
    """All groups of the plan's mesh. Every rank calls it, in the same order."""
    check_world(parallelism)
    p = parallelism
    world, rank = p.num_gpus, dist.get_rank()
    ranks = torch.arange(world).view(p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp)
    where = cast("list[int]", (ranks == rank).nonzero()[0].tolist())
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    coordinates: dict[str, int] = dict(zip(names, where, strict=True))
    stored = ranks.permute(0, 1, 4, 2, 3).reshape(
        p.pp, p.dp_replicate, p.tp, p.dp_shard * p.cp
    )
    kind = "cpu" if device.type == "meta" else device.type
    mesh = DeviceMesh(kind, stored, mesh_dim_names=STORAGE_AXES)

    def axis(name: str, line: torch.Tensor, group: Any, label: str = "") -> Axis:
        members = tuple(cast("list[int]", line.flatten().tolist()))
        return Axis(
            label or name, len(members), members.index(rank), members, group, recorder
        )

    pp, dr, ds, cp, tp = (coordinates[n] for n in names)
    shard = axis("shard", ranks[pp, dr, :, :, tp], mesh.get_group("shard"), "dp_shard")
    replicate = axis(
        "dp_replicate", ranks[pp, :, ds, cp, tp], mesh.get_group("dp_replicate")
    )
    data = ranks.permute(0, 4, 1, 2, 3).reshape(p.pp * p.tp, -1)
    if p.dp_replicate == 1:
        joint = shard.group
    elif p.dp_shard * p.cp == 1:
        joint = replicate.group
    else:
        joint = _own_group(data, rank)
    context = None
    if p.cp > 1:
        lines = ranks.permute(0, 1, 2, 4, 3).reshape(-1, p.cp)
        context = _own_group(lines, rank)
    backward = None
    if p.pp > 1:
        backward = _own_group(ranks.permute(1, 2, 3, 4, 0).reshape(-1, p.pp), rank)
    return Topology(
        parallelism=p,
        rank=rank,
        coordinates=coordinates,
        mesh=mesh,
        tp=axis("tp", ranks[pp, dr, ds, cp, :], mesh.get_group("tp")),
        cp=axis("cp", ranks[pp, dr, ds, :, tp], context),
        shard=shard,
        replicate=replicate,
        dp=axis("dp", ranks[pp, :, :, :, tp], joint),
        pp=axis("pp", ranks[:, dr, ds, cp, tp], mesh.get_group("pp")),
        backward_group=backward,
        device=device,
    )


def _own_group(lines: torch.Tensor, rank: int) -> Any:
    """One group per line, made by all ranks in order; returns this rank's."""
    mine = None
    for line in cast("list[list[int]]", lines.tolist()):
        group = dist.new_group(line)
        if rank in line:
            mine = group
    return mine
