"""When nothing fits: the thriftiest shape, and the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cost_models.hardware import ClusterSpec, NetworkKind, parse_cluster
from planner.search.job import Job, Priced
from planner.search.placements import Placement

if TYPE_CHECKING:
    from planner.search.driver import Search

MEMORY_LINES = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "gather_buffers_bytes",
    "workspace_bytes",
    "reserved_bytes",
)
#: Clusters larger than this many times the user's are not tried.
LARGEST = 64


def thriftiest(search: Search, *, stop_at_fit: bool = False) -> Priced | None:
    """The shape that misses the memory limit by least: smallest micro-batch, as much
    recompute as is allowed, an even split; None if no shape has a placement."""
    best: tuple[float, Priced] | None = None
    smallest = min((c.micro_batch for c in search.configurations()), default=1)
    seen: set[object] = set()
    for c in search.configurations():
        plain = (c.mesh, c.zero, c.state)
        if c.micro_batch > smallest or c.virtual > 1 or plain in seen:
            continue
        if search.job.solutions(c) is None:
            continue
        seen.add(plain)
        for mode in search.recompute_modes():
            layout = search.job.even_layout(c, mode)
            priced = search.job.price(c, layout)
            over = max(lines.over_bytes for lines in priced.memory)
            if best is None or over < best[0]:
                best = (over, priced)
            if stop_at_fit and over <= 0:
                return priced
    return best[1] if best else None


def what_would_fit(search: Search) -> str:
    """The smallest cluster of the same GPUs on which a shape fits, in words."""
    tried: list[ClusterSpec] = []
    for cluster in larger(search.job.cluster):
        found = _fitting(search, cluster)
        if found is None:
            tried.append(cluster)
            continue
        # the sizes grow in steps: the smallest may lie between the last two
        for between in _between(tried[-1] if tried else search.job.cluster, cluster):
            smaller = _fitting(search, between)
            if smaller is not None:
                cluster, found = between, smaller
                break
        return (
            f"{cluster.num_gpus} of these GPUs are enough "
            f"(with {found.configuration.mesh.tp} tensor, "
            f"{found.configuration.mesh.pp} pipeline ranks, "
            f"ZeRO {found.configuration.zero})"
        )
    return f"not even {LARGEST} times as many of these GPUs fit: use larger GPUs"


def _fitting(search: Search, cluster: ClusterSpec) -> Priced | None:
    found = thriftiest(_on(search, cluster), stop_at_fit=True)
    return found if found is not None and found.fits else None


def _between(small: ClusterSpec, large: ClusterSpec) -> Iterator[ClusterSpec]:
    """Clusters of whole nodes of ``large`` with more GPUs than ``small``, growing."""
    group = large.groups[0]
    for nodes in range(1, group.nodes):
        gpus = nodes * group.gpus_per_node
        if gpus > small.num_gpus:
            grown = replace(group, nodes=nodes)
            yield replace(large, groups=(grown,), text=f"{gpus} GPUs")


def conflicts(search: Search, missing: float) -> str:
    """Which pins, with the memory limit, make it infeasible: dropping each alone either
    fits or saves so many bytes. Empty without pins."""
    notes: list[str] = []
    for name in search.limits.pins:
        found = thriftiest(without(search, name), stop_at_fit=True)
        if found is None:
            continue
        over = max(lines.over_bytes for lines in found.memory)
        if over <= 0:
            notes.append(f"without the pin {name}={search.limits.pins[name]} it fits")
        elif over < missing:
            notes.append(
                f"the pin {name}={search.limits.pins[name]} costs "
                f"{missing - over:.0f} of these bytes"
            )
    return "; ".join(notes)


def without(search: Search, name: str) -> Search:
    """The same search with one pin dropped."""
    from planner.search.driver import Limits, Search

    job = search.job
    pins = {k: v for k, v in search.limits.pins.items() if k != name}
    pinned = {k: v for k, v in job.pinned.items() if k != name}
    again = _job(job, job.cluster, pinned)
    return Search(again, search.global_batch, Limits(pins))


def larger(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Clusters of the same nodes, growing."""
    if len(cluster.groups) != 1:
        return
    group = cluster.groups[0]
    if group.nodes == 1:
        for gpus in (2, 4, 8):
            if gpus > group.gpus_per_node:
                grown = replace(group, gpus_per_node=gpus)
                yield replace(cluster, groups=(grown,), text=f"{gpus} GPUs")
    network = cluster.network
    if network.kind is NetworkKind.NONE:
        network = parse_cluster(f"16x{group.device.name}").network
    each = max(group.gpus_per_node, 8 if group.nodes == 1 else 1)
    nodes = group.nodes
    while nodes * each < LARGEST * cluster.num_gpus:
        nodes = nodes + 1 if nodes < 4 else nodes + nodes // 2
        grown = replace(group, nodes=nodes, gpus_per_node=each)
        yield replace(
            cluster, groups=(grown,), network=network, text=f"{nodes * each} GPUs"
        )


def _on(search: Search, cluster: ClusterSpec) -> Search:
    """The same search on another cluster; the batch grows with data parallelism."""
    from planner.search.driver import Search

    batch = search.global_batch
    if batch % cluster.num_gpus:
        batch = cluster.num_gpus * -(-batch // cluster.num_gpus)
    job = _job(search.job, cluster, search.job.pinned)
    return Search(job, batch, search.limits)


def _job(job: Job, cluster: ClusterSpec, pinned: Mapping[str, Placement]) -> Job:
    return Job(
        job.graph,
        cluster,
        job.stack,
        precision=job.precision,
        optimizer=job.optimizer,
        training=job.training,
        recipe=job.recipe,
        memory_limit_bytes=job.limit_bytes,
        graph_at_cp=job.graph_at_cp,
        pinned=pinned,
    )
