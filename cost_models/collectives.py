"""Time of a collective: alpha, hops and bytes over the slowest part of the path.

Letters: S the full tensor in bytes, n ranks, k of them in each node, m = n / k nodes.

    all_gather, reduce_scatter   wire W = (n-1)/n S,   steps = n - 1
    all_reduce                   wire W = 2 (n-1)/n S, steps = 2 (n - 1)
    broadcast                    wire W = S,           steps = n - 1
    all_to_all                   wire W = (n-1)/n S,   one exchange

A ring of one protocol takes  base + steps x hop + W / (efficiency x link), with the
``simple`` protocol  + (S/n) / copy  for the rank's own share. LL and LL128 are the
latency protocols: the better of the two runs until a rank holds ``simple_from_bytes``
(eight ranks' worth at most; across nodes the fastest of the three runs).
Eight ranks or more on a switch that reduces (NVLS) may send S once instead of W.

Between nodes the k ranks of a node drive their ports together: the network's part is
W x oversubscription / min(k x port, ports of the node / concurrent groups), the slower
of link and network sets the pace, and the latency is that of the ring or of a tree
(2 log2 m crossings), whichever is less. Left out: congestion between jobs, adaptive
routing, in-network reduction outside a node.

Sources: Hockney's alpha-beta model; Thakur, Rabenseifner and Gropp 2005 for the counts
of steps; NCCL's documentation for the protocols. The constants are fitted: see
``link_fits.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cost_models._compat import StrEnum
from cost_models.errors import SpecError
from cost_models.paths import Path, network_path, node_path
from cost_models.records import ClusterSpec

_NVLS_RANKS = 8  # fewer ranks keep the ring: so measured on H100 and B200 nodes


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: ``size`` ranks, ``per_node`` of them in each node it touches.

    ``rails`` are the ports that its ranks of one node drive; 0 means one per rank."""

    size: int
    per_node: int
    rails: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.per_node < 1 or self.rails < 0:
            raise SpecError("a group needs at least one rank", f"{self}")
        if self.size > self.per_node and self.size % self.per_node:
            raise SpecError(
                "a group's ranks must spread evenly over its nodes",
                f"{self.size} ranks, {self.per_node} per node",
            )

    @property
    def ranks_per_node(self) -> int:
        return min(self.size, self.per_node)

    @property
    def nodes(self) -> int:
        return self.size // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds, and the bus bandwidth (nccl-tests convention) that they amount to."""

    time_s: float
    bandwidth_s: float  # the part that grows with the bytes
    latency_s: float  # the part that does not
    algorithm: str
    busbw_bytes_per_s: float


def bus_factor(kind: Collective, size: int) -> float:
    """Bytes on the wire per byte of the full tensor, as nccl-tests counts them."""
    if kind is Collective.BROADCAST:
        return 1.0
    share = (size - 1) / size
    return 2 * share if kind is Collective.ALL_REDUCE else share


def collective_time(
    cluster: ClusterSpec,
    kind: Collective | str,
    nbytes: float,
    group: Group,
    *,
    concurrent: int = 1,
    issue_s: float = 0.0,
) -> CollectiveTime:
    """Time of one collective of ``nbytes`` over ``group``.

    ``nbytes`` is the full tensor: all_gather's output, reduce_scatter's input,
    all_reduce's and broadcast's tensor, all_to_all's send buffer of one rank.
    ``concurrent`` groups run at once through one node's ports and share them;
    ``issue_s`` is what the caller's stack adds when nothing hides the launch. On a
    cluster of unlike nodes the slowest kind of node sets the time. Raises SpecError for
    an unknown kind, negative bytes, or a group that the cluster can not hold."""
    try:
        kind = Collective(kind)
    except ValueError:
        known = ", ".join(Collective)
        raise SpecError("unknown collective", repr(kind), f"Known: {known}") from None
    _check_load(nbytes, concurrent)
    _check_group(cluster, group)
    if group.size == 1:
        return CollectiveTime(0.0, 0.0, 0.0, "none", 0.0)
    k, m, rails = group.ranks_per_node, group.nodes, group.rails or group.ranks_per_node
    times: list[CollectiveTime] = []
    for node in dict.fromkeys(cluster.groups):
        path = node_path(node.link, k)
        if m > 1:
            path = network_path(path, cluster.network, node, m, rails, concurrent)
        times.append(path_time(path, kind, nbytes))
    slowest = max(times, key=_seconds)
    if issue_s == 0:
        return slowest
    wire = bus_factor(kind, group.size) * nbytes
    latency = slowest.latency_s + issue_s
    return _time(latency, slowest.bandwidth_s, wire, slowest.algorithm)


def p2p_time(
    cluster: ClusterSpec, nbytes: float, same_node: bool, *, concurrent: int = 1
) -> CollectiveTime:
    """Time to send ``nbytes`` from one GPU to another, one way.

    ``concurrent`` senders of one node share its ports. Raises SpecError for negative
    bytes and for two nodes on a cluster that has one."""
    _check_load(nbytes, concurrent)
    _check_group(cluster, Group(2, 2) if same_node else Group(2, 1))
    times: list[CollectiveTime] = []
    for node in dict.fromkeys(cluster.groups):
        path = node_path(node.link, 2 if same_node else 1)
        if not same_node:
            path = network_path(path, cluster.network, node, 2, 1, concurrent)
        times.append(path_p2p_time(path, nbytes))
    return max(times, key=_seconds)


def path_time(path: Path, kind: Collective, nbytes: float) -> CollectiveTime:
    """Time of a collective of all ranks of ``path``."""
    if kind is Collective.ALL_TO_ALL:
        return _all_to_all(path, nbytes)
    ring = _ring(path, kind, nbytes)
    nvls = path.link.nvls and path.per_node >= _NVLS_RANKS
    if kind is Collective.ALL_REDUCE and nvls:
        return min(ring, _nvls(path, nbytes), key=_seconds)
    return ring


def path_p2p_time(path: Path, nbytes: float) -> CollectiveTime:
    """Time of one message between two ranks of ``path``, one way."""
    latency, rate = path.fit.p2p.base_s, path.link_bytes_per_s * path.fit.p2p.efficiency
    if path.net is not None:
        latency += path.net.fit.base_s + path.net.hop_s
        rate = path.net.bytes_per_s * path.net.fit.p2p_efficiency
    return _time(latency, nbytes / rate, nbytes, "p2p")


def _seconds(time: CollectiveTime) -> float:
    return time.time_s


def _check_load(nbytes: float, concurrent: int) -> None:
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise SpecError("bytes must be finite and >= 0", nbytes)
    if concurrent < 1:
        raise SpecError("at least one group is at work", concurrent)


def _check_group(cluster: ClusterSpec, group: Group) -> None:
    if group.size == 1:
        return
    if group.nodes > cluster.num_nodes:
        raise SpecError(
            "the cluster has fewer nodes than the group",
            f"{cluster.num_nodes} < {group.nodes}",
            "Name more nodes, as in 2x8xA100",
        )
    most = max(g.gpus_per_node for g in cluster.groups)
    if group.ranks_per_node > most:
        raise SpecError(
            "a node has fewer GPUs than the group's ranks in it",
            f"{most} < {group.ranks_per_node}",
        )


def _time(latency: float, bandwidth: float, wire: float, name: str) -> CollectiveTime:
    total = latency + bandwidth
    return CollectiveTime(total, bandwidth, latency, name, wire / total)


def _crossings(path: Path, kind: Collective) -> tuple[float, float, str]:
    """Hops over the link and seconds between nodes, of the ring or of a tree."""
    twice = 2 if kind is Collective.ALL_REDUCE else 1
    k, net = path.per_node, path.net
    if net is None:
        return twice * (k - 1), 0.0, "ring"
    base = net.fit.base_s
    crossed = base + twice * (net.nodes - 1) * net.hop_s
    ring = (twice * (net.nodes * (k - 1)), crossed, "ring")
    if kind not in (Collective.ALL_REDUCE, Collective.BROADCAST):
        return ring
    depth = math.ceil(math.log2(net.nodes))
    tree = (twice * (k - 1), base + twice * depth * net.hop_s, "tree")
    return min(ring, tree, key=lambda way: way[0] * path.fit.ll.hop_s + way[1])


def _ring(path: Path, kind: Collective, nbytes: float) -> CollectiveTime:
    """The protocol that the library would choose: latency ones below a size.

    In a node the switch to ``simple`` comes at a threshold, often too early; then no
    time is below the latency protocols' at the threshold, for a byte more is never
    faster. Across nodes the fastest protocol is taken."""
    if path.net is not None:
        return min(_low(path, kind, nbytes), _simple(path, kind, nbytes), key=_seconds)
    limit = path.fit.simple_from_bytes * min(path.ranks, _NVLS_RANKS)
    if nbytes < limit:
        return _low(path, kind, nbytes)
    time, floor = _simple(path, kind, nbytes), _low(path, kind, limit)
    if time.time_s >= floor.time_s:
        return time
    wire = bus_factor(kind, path.ranks) * nbytes
    latency = floor.time_s - time.bandwidth_s
    return _time(latency, time.bandwidth_s, wire, time.algorithm)


def _low(path: Path, kind: Collective, nbytes: float) -> CollectiveTime:
    """The better of the two latency protocols."""
    hops, fixed, name = _crossings(path, kind)
    wire = bus_factor(kind, path.ranks) * nbytes
    times: list[CollectiveTime] = []
    for label, protocol in (("ll", path.fit.ll), ("ll128", path.fit.ll128)):
        latency = fixed + protocol.base_s + hops * protocol.hop_s
        bandwidth = wire * path.seconds_per_byte(protocol, True)
        times.append(_time(latency, bandwidth, wire, f"{name}-{label}"))
    return min(times, key=_seconds)


def _simple(path: Path, kind: Collective, nbytes: float) -> CollectiveTime:
    """The bulk protocol, with the copy of a rank's own share."""
    hops, fixed, name = _crossings(path, kind)
    wire, simple = bus_factor(kind, path.ranks) * nbytes, path.fit.simple
    latency = fixed + simple.base_s + hops * simple.hop_s
    bandwidth = wire * path.seconds_per_byte(simple, False)
    if kind is not Collective.BROADCAST:
        bandwidth += nbytes / path.ranks / path.fit.copy_bytes_per_s
    return _time(latency, bandwidth, wire, f"{name}-simple")


def _nvls(path: Path, nbytes: float) -> CollectiveTime:
    """The switch reduces: every rank sends and receives S once, whatever n."""
    nvls, wire = path.fit.nvls, bus_factor(Collective.ALL_REDUCE, path.ranks) * nbytes
    bandwidth = nbytes / (path.link_bytes_per_s * nvls.efficiency)
    if path.net is None:
        return _time(nvls.base_s, bandwidth, wire, "nvls")
    _, crossing_s, _ = _crossings(path, Collective.ALL_REDUCE)
    latency = nvls.base_s + crossing_s
    network_s = wire / (path.net.bytes_per_s * path.net.fit.efficiency)
    return _time(latency, max(bandwidth, network_s), wire, "nvls-tree")


def _all_to_all(path: Path, nbytes: float) -> CollectiveTime:
    """Every rank sends S/n to every other; ports carry what leaves the node."""
    n, k = path.ranks, path.per_node
    wire, own = (n - 1) / n * nbytes, nbytes / n
    if path.net is None:
        return _exchange(path, wire, n - 1, own)
    outside = (n - k) / n * nbytes * k  # of all the node's ranks
    network_s = outside / (path.net.bytes_per_s * path.net.fit.efficiency)
    latency = path.net.fit.base_s + path.net.hop_s
    if k == 1:
        latency += path.fit.exchange.base_s + (n - 1) * path.fit.exchange.hop_s
        return _time(latency, network_s, wire, "exchange")
    inside = _exchange(replace(path, net=None), (k - 1) / n * nbytes, n - 1, own)
    latency += inside.latency_s
    return _time(latency, max(network_s, inside.bandwidth_s), wire, "exchange")


def _exchange(path: Path, wire: float, peers: int, own: float) -> CollectiveTime:
    """Send and receive with ``peers`` at once: the faster of the two protocols."""
    times: list[CollectiveTime] = []
    for protocol in (path.fit.exchange, path.fit.exchange_simple):
        latency = protocol.base_s + peers * protocol.hop_s
        bandwidth = wire / (path.link_bytes_per_s * protocol.efficiency)
        bandwidth += own / path.fit.copy_bytes_per_s
        times.append(_time(latency, bandwidth, wire, "exchange"))
    return min(times, key=_seconds)
