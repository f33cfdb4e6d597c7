"""Meshes: how a cluster's ranks factor into pipeline, data, context and tensor axes.

Ranks are row-major over ``pp, dp_replicate, dp_shard, cp, tp``: tensor ranks are
neighbours, so they share a node while their degree allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cost_models.collectives import Group, collective_time, p2p_time
from cost_models.hardware import ClusterSpec

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of one mesh; their product is the number of GPUs it uses."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel replicas: ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on ``axis``."""
        result = 1
        for name in AXES[AXES.index(axis) + 1 :]:
            result *= getattr(self, name)
        return result


@lru_cache(maxsize=4096)
def axis_group(size: int, stride: int, gpus_per_node: int) -> tuple[Group, int]:
    """The process group of an axis and how many such groups share a node's ports."""
    span = size * stride
    if span <= gpus_per_node:
        return Group(size, size), 1
    # the group spans this many nodes; ranks of one node count as equally many
    nodes = -(-span // gpus_per_node)
    least = -(-size // nodes)
    whole = [d for d in divisors(size) if d <= gpus_per_node]
    per_node = min((d for d in whole if d >= least), default=whole[-1])
    return Group(size, per_node), max(1, gpus_per_node // per_node)


class MeshComm:
    """Seconds of collectives on the axes of one mesh over a cluster."""

    def __init__(self, cluster: ClusterSpec, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        self._cache: dict[tuple[str, str, float], float] = {}

    def seconds(self, axis: str, kind: str, nbytes: float) -> float:
        """Time of one collective over ``axis`` ("dp" joins both data axes)."""
        if nbytes <= 0 or not kind:
            return 0.0
        size, stride = self._extent(axis)
        if size == 1:
            return 0.0
        key = (axis, kind, nbytes)
        found = self._cache.get(key)
        if found is None:
            group, concurrent = axis_group(size, stride, self.cluster.gpus_per_node)
            found = collective_time(
                self.cluster, kind, nbytes, group, concurrent=concurrent
            ).time_s
            self._cache[key] = found
        return found

    def _extent(self, axis: str) -> tuple[int, int]:
        mesh = self.mesh
        if axis == "dp":
            return mesh.dp * mesh.cp, mesh.tp
        if axis == "dp_shard":
            return mesh.dp_shard * mesh.cp, mesh.tp
        if axis == "dp_replicate":
            return mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp
        if axis == "ep":
            # experts spread over data ranks first, over tensor ranks beyond them
            return mesh.ep, mesh.tp if mesh.ep <= mesh.dp_shard * mesh.cp else 1
        return getattr(mesh, axis), mesh.stride(axis)

    def p2p(self, nbytes: float) -> float:
        """Time to send ``nbytes`` from one pipeline stage to the next."""
        if self.mesh.pp == 1 or nbytes <= 0:
            return 0.0
        same_node = self.mesh.stride("pp") < self.cluster.gpus_per_node
        return p2p_time(self.cluster, nbytes, same_node).time_s


def divisors(n: int) -> list[int]:
    """Divisors of ``n`` in increasing order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted(set(small + [n // d for d in small]))


def meshes(
    gpus: int, *, max_pp: int, max_tp: int, max_dp: int, pins: dict[str, int]
) -> Iterator[tuple[int, int, int]]:
    """All (pp, tp, dp) with product ``gpus`` inside the limits, in a fixed order."""
    for tp in divisors(gpus):
        if tp > max_tp or ("tp" in pins and tp != pins["tp"]):
            continue
        for pp in divisors(gpus // tp):
            if pp > max_pp or ("pp" in pins and pp != pins["pp"]):
                continue
            dp = gpus // (tp * pp)
            if dp <= max_dp and ("dp" not in pins or dp == pins["dp"]):
                yield pp, tp, dp
