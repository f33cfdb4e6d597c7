from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest

from benchmarks.accuracy_collectives import DATA, evaluate, read_rows
from cost_models.collectives import (
    Collective,
    Group,
    bus_factor,
    collective_time,
    p2p_time,
)
from cost_models.errors import SpecError
from cost_models.hardware import parse_cluster
from cost_models.link_fits import issue_time

A100 = parse_cluster("64xA100")


def seconds(text: str, kind: str, nbytes: float, group: Group, **more: int) -> float:
    return collective_time(parse_cluster(text), kind, nbytes, group, **more).time_s


def test_one_gigabyte_through_one_100_gigabit_port_takes_80_ms_one_way() -> None:
    time = p2p_time(parse_cluster("16xA100@100Gbps"), 1e9, same_node=False).time_s
    assert 0.080 <= time <= 0.088


def test_a_ring_all_reduce_moves_twice_the_share() -> None:
    assert bus_factor(Collective.ALL_REDUCE, 4) == 1.5
    assert bus_factor(Collective.ALL_GATHER, 4) == 0.75
    assert bus_factor(Collective.BROADCAST, 4) == 1.0
    time = collective_time(A100, "all_reduce", 1e9, Group(8, 8))
    assert time.busbw_bytes_per_s == pytest.approx(1.75 * 1e9 / time.time_s)
    assert time.time_s == pytest.approx(time.latency_s + time.bandwidth_s)


@pytest.mark.parametrize(
    ("text", "kind", "ranks", "low", "high"),
    [
        ("8xA100", "all_reduce", 8, 200e9, 245e9),
        ("8xH100", "all_reduce", 8, 420e9, 500e9),
        ("8xH100", "all_gather", 8, 310e9, 370e9),
        ("8xB200", "all_gather", 8, 560e9, 720e9),
        ("8xV100", "all_reduce", 8, 110e9, 140e9),
        ("8xV100", "all_reduce", 2, 30e9, 50e9),  # two of the six links join a pair
        ("8xA800", "all_reduce", 8, 125e9, 175e9),
        ("2x4090", "all_reduce", 2, 8e9, 20e9),  # staged in host memory
        ("4x4090", "all_reduce", 4, 5e9, 20e9),
        ("8xMI300X", "all_reduce", 8, 280e9, 340e9),
    ],
)
def test_large_messages_reach_the_published_bus_bandwidth(
    text: str, kind: str, ranks: int, low: float, high: float
) -> None:
    group = Group(ranks, ranks)
    time = collective_time(parse_cluster(text), kind, 1e9, group)
    assert low < time.busbw_bytes_per_s < high


def test_small_messages_are_latency() -> None:
    time = collective_time(A100, "all_reduce", 1024, Group(8, 8))
    assert 10e-6 < time.time_s < 40e-6
    assert time.latency_s > 0.9 * time.time_s
    assert collective_time(A100, "all_reduce", 0, Group(8, 8)).time_s > 0


def test_the_switch_reduces_where_it_can() -> None:
    large = collective_time(parse_cluster("8xH100"), "all_reduce", 1e9, Group(8, 8))
    assert large.algorithm == "nvls"
    assert collective_time(A100, "all_reduce", 1e9, Group(8, 8)).algorithm == (
        "ring-simple"
    )
    many = collective_time(parse_cluster("64xH100"), "all_reduce", 1e9, Group(64, 8))
    assert many.algorithm == "nvls-tree"


def test_a_lone_rank_waits_for_nobody() -> None:
    assert collective_time(A100, "all_gather", 1e9, Group(1, 1)).time_s == 0


def test_a_slow_port_paces_the_ring_of_all_ranks() -> None:
    """1.3 G parameters fully sharded over two nodes on one 10 Gb/s port each."""
    text = "2 nodes x 8xA100-40GB, inter=10Gbps ethernet"
    nbytes = 2 * 1_311_213_568
    sharded = seconds(text, "all_gather", nbytes, Group(16, 8))
    assert 3 * sharded == pytest.approx(5.9, rel=0.12)
    replicas = Group(2, 1)  # one of eight groups, each with an eighth of the bytes
    hybrid = seconds(text, "all_reduce", nbytes / 8, replicas, concurrent=8)
    assert hybrid == pytest.approx(2.1, rel=0.12)


def test_groups_share_the_ports_of_their_node() -> None:
    group = Group(8, 1)
    alone = collective_time(A100, "all_gather", 1e9, group).bandwidth_s
    assert collective_time(
        A100, "all_gather", 1e9, group, concurrent=8
    ).bandwidth_s == pytest.approx(alone)  # a port for each
    shared = parse_cluster("64xA100@25GB/s per node")
    alone = collective_time(shared, "all_gather", 1e9, group).bandwidth_s
    eight = collective_time(shared, "all_gather", 1e9, group, concurrent=8).bandwidth_s
    assert eight == pytest.approx(8 * alone, rel=0.05)


def test_rails_and_oversubscription() -> None:
    group, one_rail = Group(16, 8), Group(16, 8, rails=1)
    all_rails = collective_time(A100, "all_gather", 1e9, group).bandwidth_s
    one = collective_time(A100, "all_gather", 1e9, one_rail).bandwidth_s
    assert one > 5 * all_rails
    thin = parse_cluster("64xA100, oversubscription=4")
    assert collective_time(thin, "all_gather", 1e9, group).bandwidth_s > 3 * all_rails


def test_an_all_to_all_pays_for_what_leaves_the_node() -> None:
    inside = collective_time(A100, "all_to_all", 1e8, Group(8, 8)).time_s
    across = collective_time(A100, "all_to_all", 1e8, Group(16, 8)).time_s
    apart = collective_time(A100, "all_to_all", 1e8, Group(16, 2)).time_s
    assert inside < across < apart
    port = 25e9
    assert across > 0.5 * 1e8 / port
    assert collective_time(A100, "all_to_all", 1e8, Group(8, 1)).time_s > 0.8e8 / port


def test_a_tree_beats_a_ring_of_many_nodes_on_latency() -> None:
    cluster = parse_cluster("1024xA100")
    time = collective_time(cluster, "all_reduce", 1024, Group(1024, 8))
    assert time.algorithm.startswith("tree")
    ring = collective_time(cluster, "all_gather", 1024, Group(1024, 8))
    assert ring.time_s > 2 * time.time_s


def test_a_bridge_joins_its_pair_alone() -> None:
    text = "4xA100-PCIe, intra=pcie4-nvlink-pairs"
    pair = seconds(text, "all_reduce", 1e9, Group(2, 2))
    four = seconds(text, "all_reduce", 1e9, Group(4, 4))
    assert four > 5 * pair


def test_the_slowest_node_of_an_unlike_pair_sets_the_time() -> None:
    mixed = seconds("8xA100+8xH100", "all_reduce", 1e9, Group(8, 8))
    assert mixed == seconds("8xA100", "all_reduce", 1e9, Group(8, 8))


def test_a_stack_that_waits_adds_its_launch() -> None:
    base = collective_time(A100, "all_reduce", 1024, Group(8, 8)).time_s
    more = collective_time(A100, "all_reduce", 1024, Group(8, 8), issue_s=1e-5).time_s
    assert more == pytest.approx(base + 1e-5)
    assert issue_time("torch all_reduce_bench, NCCL 2.27.7") > 10e-6
    assert issue_time("NCCL 2.29.2") == 0


@pytest.mark.parametrize(
    ("kind", "nbytes", "group", "message"),
    [
        ("all_scatter", 1, Group(8, 8), "unknown collective.*Known: all_reduce"),
        ("all_reduce", -1, Group(8, 8), "bytes must be"),
        ("all_reduce", float("nan"), Group(8, 8), "bytes must be"),
        ("all_reduce", 1, Group(128, 8), "fewer nodes"),
        ("all_reduce", 1, Group(16, 16), "fewer GPUs"),
    ],
)
def test_mistakes_are_named(
    kind: str, nbytes: float, group: Group, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        collective_time(A100, kind, nbytes, group)


def test_groups_and_senders_that_can_not_be() -> None:
    with pytest.raises(SpecError, match="spread evenly"):
        Group(12, 8)
    with pytest.raises(SpecError, match="at least one rank"):
        Group(0, 1)
    with pytest.raises(SpecError, match="fewer nodes"):
        p2p_time(parse_cluster("8xA100"), 1, same_node=False)
    with pytest.raises(SpecError, match="at least one group"):
        collective_time(A100, "all_reduce", 1, Group(8, 8), concurrent=0)


def test_a_message_inside_a_node_is_faster_than_between_nodes() -> None:
    near = p2p_time(A100, 1e8, same_node=True).time_s
    far = p2p_time(A100, 1e8, same_node=False).time_s
    assert near < far < p2p_time(A100, 1e8, same_node=False, concurrent=1).time_s * 1.01


def test_published_measurements_are_met() -> None:
    """The pledge of the model, on every row it has: see the benchmark for details."""
    found = evaluate(read_rows(DATA))
    assert found["n"] > 1400
    assert found["median_ape"] < 0.08
    assert found["p90_ape"] < 0.30
    assert abs(found["bias"]) < 0.05
    assert found["rank_correlation"] > 0.97
    assert all("not" in reason for reason in found["skipped"])


def test_the_benchmark_reads_plain_files_and_names_what_it_skips(
    tmp_path: Path,
) -> None:
    lines = gzip.decompress(DATA.read_bytes()).decode().splitlines()
    header = next(csv.reader(io.StringIO(lines[0])))
    row = next(csv.DictReader(io.StringIO("\n".join(lines[:2]))))
    strange = {**row, "gpu": "Z900"}
    host = {**row, "op": "memcpy"}
    bandwidth = {**row, "bytes": "", "time_us": "", "busbw_gbps": "150"}
    nothing = {**bandwidth, "busbw_gbps": ""}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows([row, strange, host, bandwidth, nothing])
    found = evaluate(read_rows(path))
    assert found["n"] == 2
    assert len(found["skipped"]) == 3
    assert any("Z900" in reason for reason in found["skipped"])
    assert evaluate([])["n"] == 0
