"""What a group's bytes go over: the link in the node and the ports out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

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
    LinkKind,
    LinkSpec,
    NetworkKind,
    NetworkSpec,
    NodeGroup,
)


@dataclass(frozen=True, slots=True)
class Net:
    """The network's part of a path: bytes/s out of one node that the group gets."""

    fit: NetFit
    hop_s: float
    bytes_per_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Path:
    """``per_node`` ranks on ``link``, on as many nodes as ``net`` joins.

    ``link_bytes_per_s`` is per rank and direction while all of them send."""

    link: LinkSpec
    fit: LinkFit
    per_node: int
    link_bytes_per_s: float
    net: Net | None = None

    @property
    def ranks(self) -> int:
        return self.per_node * (self.net.nodes if self.net else 1)

    def seconds_per_byte(self, protocol: Protocol, low: bool) -> float:
        """Of one ring: the slower of link and network; ``low`` latency or bulk."""
        link = 1.0 / (self.link_bytes_per_s * protocol.efficiency)
        if self.net is None:
            return link
        fit = self.net.fit
        share = fit.low_efficiency if low else fit.efficiency
        return max(link, 1.0 / (self.net.bytes_per_s * share))


def node_path(link: LinkSpec, ranks: int, fit: LinkFit | None = None) -> Path:
    """``ranks`` GPUs of one node: over their bridge if one joins them all."""
    if link.bridge_size and ranks <= link.bridge_size:
        link = load_link(link.bridge)
    fit = fit or load_link_fit(link.fit)
    rate = link.bytes_per_s * _contention(fit, ranks)
    if link.pair_bytes_per_s:
        peers = ranks - 1 if link.kind is LinkKind.XGMI else ranks / 2
        rate = min(rate, link.pair_bytes_per_s * max(peers, 1.0))
    return Path(link, fit, ranks, rate if ranks > 1 else math.inf)


def _contention(fit: LinkFit, ranks: int) -> float:
    """Share of the link left when ``ranks`` use it, log-linear between the entries."""
    table = fit.contention
    if not table or ranks <= table[0][0]:
        return 1.0
    for (a, low), (b, high) in pairwise(table):
        if ranks <= b:
            x = math.log(ranks / a) / math.log(b / a)
            return low ** (1 - x) * high**x
    last, share = table[-1]
    return share * last / ranks


def network_path(
    path: Path,
    network: NetworkSpec,
    node: NodeGroup,
    nodes: int,
    rails: int,
    concurrent: int,
    fit: NetFit | None = None,
) -> Path:
    """``path`` on ``nodes`` nodes, its ranks of a node driving ``rails`` ports while
    ``concurrent`` groups share all ports. Raises SpecError if there is no network."""
    if network.kind is NetworkKind.NONE:
        raise SpecError(
            "a group over several nodes needs a network",
            network.name,
            "Give the cluster one: 16xA100@200Gbps",
        )
    fit = fit or load_net_fit(network.fit)
    mine = rails * network.flow_bytes_per_s
    of_node = network.bytes_per_s * node.gpus_per_node / concurrent
    rate = min(mine, of_node) / network.oversubscription
    return replace(path, net=Net(fit, network.latency_s + fit.hop_s, rate, nodes))
