"""Time of a collective: alpha, hops and bytes over the slowest part of the path.

Letters: S the full tensor in bytes, n ranks, k of them in each node, m = n / k nodes.

    all_gather, reduce_scatter   wire W = (n-1)/n S,   steps = n - 1
    all_reduce                   wire W = 2 (n-1)/n S, steps = 2 (n - 1)
    broadcast                    wire W = S,           steps = n - 1
    all_to_all                   wire W = (n-1)/n S,   one exchange

A ring of one protocol takes  base + steps x hop + W / (efficiency x link), and with the
``simple`` protocol  + (S/n) / copy  for the rank's own share. LL and LL128 are the
latency protocols: the better of the two runs until a rank holds ``simple_from_bytes``.
Eight ranks or more on a switch that reduces (NVLS) may send S once instead of W. Between
nodes the k ranks of a node drive their ports together, so the network's part is
W / min(k x port, node's ports / concurrent groups), times the oversubscription, and the
slower of link and network sets the pace of the ring; latency is that of the ring or of a
tree (2 log2 m crossings), whichever is less. Left out: congestion between jobs, adaptive
routing, in-network reduction outside a node.

Sources: Hockney's alpha-beta model; Thakur, Rabenseifner and Gropp 2005 for the counts
of steps; the constants are fitted, see ``link_fits.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from cost_models._compat import StrEnum
from cost_models.catalog import load_link
from cost_models.errors import SpecError
from cost_models.link_fits import (
    LinkFit,
    NetFit,
    Protocol,
    load_link_fit,
    load_net_fit,
)
from cost_models.records import (
    ClusterSpec,
    LinkKind,
    LinkSpec,
    NetworkKind,
    NetworkSpec,
    NodeGroup,
)

_NVLS_RANKS = 8  # fewer ranks keep the ring: measured on H100 and B200 nodes


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
) -> CollectiveTime:
    """Time of one collective of ``nbytes`` over ``group``.

    ``nbytes`` is the full tensor: all_gather's output, reduce_scatter's input,
    all_reduce's and broadcast's tensor, all_to_all's send buffer of one rank.
    ``concurrent`` groups run at once through one node's ports and share them. On a
    cluster of unlike nodes the slowest kind of node sets the time. Raises SpecError for
    an unknown kind, negative bytes, or a group that the cluster can not hold."""
    try:
        kind = Collective(kind)
    except ValueError:
        known = ", ".join(Collective)
        raise SpecError("unknown collective", repr(kind), f"Known: {known}") from None
    if not (math.isfinite(nbytes) and nbytes >= 0) or concurrent < 1:
        what = "bytes must be finite and >= 0, concurrent groups >= 1"
        raise SpecError(what, f"{nbytes}, {concurrent}")
    _check(cluster, group)
    if group.size == 1:
        return CollectiveTime(0.0, 0.0, 0.0, "none", 0.0)
    times = [
        _on_nodes(node, cluster.network, kind, nbytes, group, concurrent)
        for node in dict.fromkeys(cluster.groups)
    ]
    return max(times, key=_seconds)


def p2p_time(
    cluster: ClusterSpec, nbytes: float, same_node: bool, *, concurrent: int = 1
) -> CollectiveTime:
    """Time to send ``nbytes`` from one GPU to another, one way.

    ``concurrent`` senders of one node share its ports. Raises SpecError for negative
    bytes and for two nodes on a cluster that has one."""
    if not (math.isfinite(nbytes) and nbytes >= 0) or concurrent < 1:
        what = "bytes must be finite and >= 0, concurrent senders >= 1"
        raise SpecError(what, f"{nbytes}, {concurrent}")
    group = Group(2, 2) if same_node else Group(2, 1)
    _check(cluster, group)
    times: list[CollectiveTime] = []
    for node in dict.fromkeys(cluster.groups):
        link = _effective(node.link, 2)
        fit = load_link_fit(link.fit)
        if same_node:
            path = _Path(link, fit, 2, _link_rate(link, fit, 2), None)
        else:
            net = _port_rate(cluster.network, node, group, concurrent)
            path = _Path(link, fit, 1, math.inf, _Net(cluster.network, net, 2))
        times.append(_exchange(path, nbytes, 1.0, 0.0))
    return max(times, key=_seconds)


def _seconds(time: CollectiveTime) -> float:
    return time.time_s


def _check(cluster: ClusterSpec, group: Group) -> None:
    if group.size == 1:
        return
    if group.nodes > cluster.num_nodes:
        raise SpecError(
            "the cluster has fewer nodes than the group",
            f"{cluster.num_nodes} < {group.nodes}",
            "Give the cluster a network: 16xA100@200Gbps",
        )
    most = max(g.gpus_per_node for g in cluster.groups)
    if group.ranks_per_node > most:
        raise SpecError(
            "a node has fewer GPUs than the group's ranks in it",
            f"{most} < {group.ranks_per_node}",
        )


@dataclass(frozen=True, slots=True)
class _Net:
    """The network's part of a path: bytes/s of a node's ports that the group gets."""

    spec: NetworkSpec
    bytes_per_s: float
    nodes: int

    @property
    def fit(self) -> NetFit:
        return load_net_fit(self.spec.fit)

    @property
    def hop_s(self) -> float:
        return self.spec.latency_s + self.fit.hop_s


@dataclass(frozen=True, slots=True)
class _Path:
    """What a group's bytes go over: the link, and the network between nodes if any."""

    link: LinkSpec
    fit: LinkFit
    per_node: int
    link_bytes_per_s: float
    net: _Net | None

    def seconds_per_byte(self, protocol: Protocol, low: bool) -> float:
        link = 1.0 / (self.link_bytes_per_s * protocol.efficiency)
        if self.net is None:
            return link
        fit = self.net.fit
        share = fit.low_efficiency if low else fit.efficiency
        return max(link, 1.0 / (self.net.bytes_per_s * share))


def _effective(link: LinkSpec, ranks: int) -> LinkSpec:
    """The bridge where the ranks of a node fit on one, the link itself otherwise."""
    if link.bridge_size and ranks <= link.bridge_size:
        return load_link(link.bridge)
    return link


def _link_rate(link: LinkSpec, fit: LinkFit, ranks: int) -> float:
    """Bytes/s per GPU and direction that ``ranks`` of a node have among themselves."""
    rate = link.bytes_per_s
    if link.pair_bytes_per_s:
        peers = ranks - 1 if link.kind is LinkKind.XGMI else ranks / 2
        rate = min(rate, link.pair_bytes_per_s * max(peers, 1.0))
    return rate * _contention(fit, ranks)


def _contention(fit: LinkFit, ranks: int) -> float:
    """Share of the link left when ``ranks`` use it at once, linear in log(ranks)."""
    table = fit.contention
    if not table:
        return 1.0
    if ranks <= table[0][0]:
        return table[0][1]
    for (a, low), (b, high) in pairwise(table):
        if ranks <= b:
            x = math.log(ranks / a) / math.log(b / a)
            return math.exp(math.log(low) * (1 - x) + math.log(high) * x)
    return table[-1][1] * table[-1][0] / ranks


def _port_rate(
    network: NetworkSpec, node: NodeGroup, group: Group, concurrent: int
) -> float:
    """Bytes/s out of one node that the group gets."""
    if network.kind is NetworkKind.NONE:
        raise SpecError(
            "a group over several nodes needs a network",
            network.name,
            "Give the cluster one: 16xA100@200Gbps",
        )
    rails = group.rails or group.ranks_per_node
    mine = rails * network.flow_bytes_per_s
    node_total = network.bytes_per_s * node.gpus_per_node
    return min(mine, node_total / concurrent) / network.oversubscription


def _on_nodes(
    node: NodeGroup,
    network: NetworkSpec,
    kind: Collective,
    nbytes: float,
    group: Group,
    concurrent: int,
) -> CollectiveTime:
    n, k, m = group.size, group.ranks_per_node, group.nodes
    link = _effective(node.link, k)
    fit = load_link_fit(link.fit)
    net = None
    if m > 1:
        net = _Net(network, _port_rate(network, node, group, concurrent), m)
    rate = _link_rate(link, fit, k) if k > 1 else math.inf
    path = _Path(link, fit, k, rate, net)
    wire = bus_factor(kind, n) * nbytes
    if kind is Collective.ALL_TO_ALL:
        return _all_to_all(path, nbytes, n)
    ring = _ring(path, kind, nbytes, n, wire)
    if kind is Collective.ALL_REDUCE and link.nvls and k >= _NVLS_RANKS:
        return min(ring, _nvls(path, nbytes, n, wire), key=_seconds)
    return ring


def _time(latency: float, bandwidth: float, wire: float, name: str) -> CollectiveTime:
    total = latency + bandwidth
    return CollectiveTime(total, bandwidth, latency, name, wire / total)


def _crossings(path: _Path, kind: Collective, steps: float) -> tuple[float, float, str]:
    """Link hops and network latency of the ring or, for all-reduce, of a tree."""
    if path.net is None:
        return steps, 0.0, "ring"
    m, k, net = path.net.nodes, path.per_node, path.net
    twice = 2 if kind is Collective.ALL_REDUCE else 1
    hops = twice * (m * k - 1 - (m - 1))
    ring = (hops, twice * (m - 1) * net.hop_s, "ring")
    if kind not in (Collective.ALL_REDUCE, Collective.BROADCAST):
        return ring
    depth = math.ceil(math.log2(m))
    tree = (twice * (k - 1), twice * depth * net.hop_s, "tree")
    return min(ring, tree, key=lambda way: way[0] * path.fit.ll.hop_s + way[1])


def _ring(
    path: _Path, kind: Collective, nbytes: float, n: int, wire: float
) -> CollectiveTime:
    twice = 2 if kind is Collective.ALL_REDUCE else 1
    hops, crossing_s, name = _crossings(path, kind, twice * (n - 1))
    fixed = crossing_s + (path.net.fit.base_s if path.net else 0.0)
    own = nbytes / n if kind is not Collective.BROADCAST else 0.0

    def low(protocol: Protocol, label: str, wire: float) -> CollectiveTime:
        latency = fixed + protocol.base_s + hops * protocol.hop_s
        byte_s = path.seconds_per_byte(protocol, True)
        return _time(latency, wire * byte_s, wire, f"{name}-{label}")

    def best_low(wire: float) -> CollectiveTime:
        two = (low(path.fit.ll, "ll", wire), low(path.fit.ll128, "ll128", wire))
        return min(two, key=_seconds)

    limit = path.fit.simple_from_bytes * n
    if nbytes < limit:
        return best_low(wire)
    simple = path.fit.simple
    latency = fixed + simple.base_s + hops * simple.hop_s
    bandwidth = wire * path.seconds_per_byte(simple, False)
    bandwidth += own / path.fit.copy_bytes_per_s
    bandwidth += _ramp_s(path, wire)
    floor = best_low(bus_factor(kind, n) * limit)
    if latency + bandwidth < floor.time_s:
        latency = floor.time_s - bandwidth
    return _time(latency, bandwidth, wire, f"{name}-simple")


def _ramp_s(path: _Path, wire: float) -> float:
    """Filling the pipeline across nodes: at most ``ramp_bytes`` more per port."""
    if path.net is None:
        return 0.0
    ramp = path.net.fit.ramp_bytes * path.per_node
    extra = ramp * wire / (wire + ramp) if ramp else 0.0
    return extra / path.net.bytes_per_s


def _nvls(path: _Path, nbytes: float, n: int, wire: float) -> CollectiveTime:
    """The switch reduces: every rank sends and receives S once, in any node count."""
    protocol = path.fit.nvls
    latency, byte_s = protocol.base_s, 1 / (path.link_bytes_per_s * protocol.efficiency)
    if path.net is not None:
        _, crossing_s, _ = _crossings(path, Collective.ALL_REDUCE, 2.0 * (n - 1))
        latency += crossing_s + path.net.fit.base_s
        network_s = wire / (path.net.bytes_per_s * path.net.fit.efficiency)
        bandwidth = max(nbytes * byte_s, network_s) + _ramp_s(path, wire)
        return _time(latency, bandwidth, wire, "nvls-tree")
    return _time(latency, nbytes * byte_s, wire, "nvls")


def _all_to_all(path: _Path, nbytes: float, n: int) -> CollectiveTime:
    """Each rank sends S/n to every other; the ports carry what leaves the node."""
    wire, own = (n - 1) / n * nbytes, nbytes / n
    if path.net is None:
        return replace(_exchange(path, wire, n - 1, own), algorithm="exchange")
    k = path.per_node
    inside = (k - 1) / n * nbytes
    outside = (n - k) / n * nbytes * k  # all of the node's ranks through its ports
    net_s = outside / (path.net.bytes_per_s * path.net.fit.efficiency)
    local = replace(path, net=None)
    near = _exchange(local, inside, max(k - 1, 1), own) if k > 1 else None
    latency = path.fit.exchange.base_s + path.net.fit.base_s
    latency += (n - k) * path.fit.exchange.hop_s + path.net.hop_s
    bandwidth = max(net_s, near.bandwidth_s if near else 0.0)
    return _time(latency, bandwidth, wire, "exchange")


def _exchange(path: _Path, wire: float, peers: float, own: float) -> CollectiveTime:
    """Send and receive at once with ``peers``: the faster of the two protocols."""
    extra = path.net.hop_s + path.net.fit.base_s if path.net else 0.0
    times: list[CollectiveTime] = []
    for protocol, low in ((path.fit.exchange, True), (path.fit.exchange_simple, False)):
        latency = extra + protocol.base_s + peers * protocol.hop_s
        bandwidth = wire * path.seconds_per_byte(protocol, low)
        bandwidth += own / path.fit.copy_bytes_per_s
        times.append(_time(latency, bandwidth, wire, "p2p"))
    return min(times, key=_seconds)
