"""Collectives never beat the wire, and never get faster by a byte more."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.collectives import Collective, Group, collective_time, p2p_time
from cost_models.hardware import parse_cluster

CLUSTERS = {
    text: parse_cluster(text)
    for text in (
        "64xA100",
        "64xH100",
        "64xB200",
        "64xV100",
        "64xL40S",
        "64xMI300X",
        "128xGB200",
        "16x4090@10Gbps ethernet",
        "64xH100@efa-400",
        "4x8xA100-PCIe, intra=pcie4-nvlink-pairs",
    )
}
clusters = st.sampled_from(sorted(CLUSTERS))
kinds = st.sampled_from(list(Collective))
sizes = st.floats(0, 1e11)
per_nodes = st.sampled_from([1, 2, 3, 4, 6, 8])
node_counts = st.sampled_from([1, 2])


@settings(max_examples=300)
@given(clusters, kinds, sizes, sizes, per_nodes, node_counts)
def test_time_grows_with_bytes(
    text: str, kind: Collective, a: float, b: float, per_node: int, nodes: int
) -> None:
    group = Group(per_node * nodes, per_node)
    few, many = sorted((a, b))
    fast = collective_time(CLUSTERS[text], kind, few, group).time_s
    slow = collective_time(CLUSTERS[text], kind, many, group).time_s
    assert fast <= slow * (1 + 1e-12)


@settings(max_examples=300)
@given(clusters, kinds, sizes, per_nodes, node_counts, st.integers(1, 8))
def test_no_wire_is_beaten(
    text: str,
    kind: Collective,
    nbytes: float,
    per_node: int,
    nodes: int,
    concurrent: int,
) -> None:
    cluster, group = CLUSTERS[text], Group(per_node * nodes, per_node)
    n = group.size
    time = collective_time(cluster, kind, nbytes, group, concurrent=concurrent)
    if n == 1:
        assert time.time_s == 0
        return
    assert time.time_s >= time.latency_s > 0
    fastest_link = max(g.link.bytes_per_s for g in cluster.groups)
    if cluster.link.bridge_size:
        fastest_link = 300e9
    # a rank must receive what it lacks; a switch that reduces spares the second trip
    lacking = nbytes if kind is Collective.ALL_REDUCE else (n - 1) / n * nbytes
    if nodes == 1:
        assert time.time_s >= lacking / fastest_link / (2 if n == 2 else 1)
    else:
        network = cluster.network
        ports = per_node * network.flow_bytes_per_s
        whole = network.bytes_per_s * cluster.gpus_per_node
        leaving = nbytes / nodes if kind is not Collective.ALL_TO_ALL else 0.0
        assert time.time_s >= leaving / min(ports, whole)


@given(clusters, kinds, sizes, per_nodes, node_counts, st.integers(1, 7))
def test_company_at_the_ports_never_helps(
    text: str,
    kind: Collective,
    nbytes: float,
    per_node: int,
    nodes: int,
    concurrent: int,
) -> None:
    group = Group(per_node * nodes, per_node)
    few = collective_time(CLUSTERS[text], kind, nbytes, group, concurrent=concurrent)
    more = collective_time(
        CLUSTERS[text], kind, nbytes, group, concurrent=concurrent + 1
    )
    assert few.time_s <= more.time_s * (1 + 1e-12)


@given(clusters, st.floats(1, 1e10), per_nodes, node_counts)
def test_all_reduce_costs_no_less_than_one_of_its_halves(
    text: str, nbytes: float, per_node: int, nodes: int
) -> None:
    group = Group(per_node * nodes, per_node)
    if group.size == 1:
        return
    whole = collective_time(CLUSTERS[text], "all_reduce", nbytes, group)
    if whole.algorithm.startswith("ring"):
        half = collective_time(CLUSTERS[text], "reduce_scatter", nbytes, group)
        assert whole.time_s >= half.time_s * (1 - 1e-12)


@given(clusters, sizes, st.booleans())
def test_a_message_never_beats_its_port_or_link(
    text: str, nbytes: float, same_node: bool
) -> None:
    cluster = CLUSTERS[text]
    time = p2p_time(cluster, nbytes, same_node)
    rate = max(cluster.link.bytes_per_s, 300e9)
    if not same_node:
        rate = cluster.network.flow_bytes_per_s
    assert time.time_s > nbytes / rate
    assert time.busbw_bytes_per_s <= rate
