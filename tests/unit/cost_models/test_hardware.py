from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.catalog import device_from, records
from cost_models.errors import SpecError
from cost_models.hardware import (
    MAX_GPUS,
    ClusterSpec,
    LinkKind,
    NetworkKind,
    device_names,
    link_names,
    load_device,
    load_link,
    load_network,
    network_names,
    parse_cluster,
)
from cost_models.link_fits import load_link_fit, load_net_fit

GIB = 2**30
PIECES = ["8", "64", "0", "10", "1e9", "\u0661", "x", "*", "@", "+", ",", "=", ".", "/"]
PIECES += ["A100", "H100", "4090", "GB", "80GB", "-40GB", "SXM", "PCIe", ".json"]
PIECES += ["nodes", "of", "inter", "Gbps", "ethernet", "mem", "per", "node", "ib-400"]


def shape(cluster: ClusterSpec) -> list[tuple[str, int, int]]:
    return [(g.device.name, g.nodes, g.gpus_per_node) for g in cluster.groups]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64xA100", [("A100-SXM-80GB", 8, 8)]),
        ("8x8xH100", [("H100-SXM-80GB", 8, 8)]),
        ("16xA100-40GB", [("A100-SXM-40GB", 2, 8)]),
        ("64xA100@100Gbps", [("A100-SXM-80GB", 8, 8)]),
        ("8xL4-PCIe", [("L4", 1, 8)]),
        ("8xH100-SXM", [("H100-SXM-80GB", 1, 8)]),
        ("8xH100-PCIe", [("H100-PCIe-80GB", 1, 8)]),
        ("2xV100-PCIE-16GB", [("V100-PCIe-16GB", 1, 2)]),
        ("6xA6000-48GB", [("RTX-A6000", 1, 6)]),
        ("7xRTX4090", [("RTX-4090", 1, 7)]),
        ("2x4090", [("RTX-4090", 1, 2)]),
        ("2xA10G", [("A10G", 1, 2)]),
        ("64xV100-16GB", [("V100-SXM2-16GB", 8, 8)]),
        ("8xA800-80GB", [("A800-SXM-80GB", 1, 8)]),
        ("2xNVIDIA H100 SXM5 80GB", [("H100-SXM-80GB", 1, 2)]),
        ("8xH100-96GB", [("H100-SXM-96GB", 1, 8)]),
        ("32xA100+32xH100", [("A100-SXM-80GB", 4, 8), ("H100-SXM-80GB", 4, 8)]),
        ("2 nodes x 8xA100-40GB, inter=10Gbps ethernet", [("A100-SXM-40GB", 2, 8)]),
        ("3 nodes of A100", [("A100-SXM-80GB", 3, 8)]),
        ("A100", [("A100-SXM-80GB", 1, 1)]),
        ("1x12xA100", [("A100-SXM-80GB", 1, 12)]),
        ("64 \u00d7 A100", [("A100-SXM-80GB", 8, 8)]),
        ("72xGB200", [("GB200", 1, 72)]),
        ("256xGB200", [("GB200", 4, 64)]),
        ("4x4xGB200", [("GB200", 1, 16)]),
    ],
)
def test_grammar(text: str, expected: list[tuple[str, int, int]]) -> None:
    cluster = parse_cluster(text)
    assert shape(cluster) == expected
    assert cluster.num_gpus == sum(n * k for _, n, k in expected)
    assert cluster.text == text.replace("\u00d7", "\u00d7").strip()


def test_the_default_a100_cluster() -> None:
    cluster = parse_cluster("64xA100")
    assert cluster.link.bytes_per_s == 300e9
    assert cluster.link.kind is LinkKind.NVSWITCH
    assert cluster.network.bytes_per_s == 25e9
    assert cluster.device.peak("bf16") == 312e12
    assert cluster.homogeneous


@pytest.mark.parametrize(
    ("text", "per_gpu", "port"),
    [
        ("64xA100@100Gbps", 12.5e9, 12.5e9),
        ("16xH100", 50e9, 50e9),
        ("16xV100", 6.25e9, 12.5e9),  # four 100 Gb/s ports for eight GPUs
        ("16xA100@10Gbps ethernet", 1.25e9 / 8, 1.25e9),
        ("16xA100@400Gb/s roce", 50e9, 50e9),
        ("16xA100@25GB/s per node", 25e9 / 8, 25e9),
        ("16xA100@100Gbps ethernet per gpu", 12.5e9, 12.5e9),
        ("16xA100@efa-50", 6.25e9, 6.25e9),
        ("128xGB300", 100e9, 100e9),
    ],
)
def test_a_network_is_per_gpu_and_an_ethernet_port_is_shared(
    text: str, per_gpu: float, port: float
) -> None:
    network = parse_cluster(text).network
    assert network.bytes_per_s == pytest.approx(per_gpu)
    assert network.flow_bytes_per_s == pytest.approx(port)


def test_gb_and_gib_and_bits_and_bytes_stay_apart() -> None:
    found = [
        parse_cluster({"gpu": "A100", "mem": memory, "inter": rate})
        for memory in ("80GB", "80GiB")
        for rate in ("400Gb/s", "400GB/s")
    ]
    assert [c.device.memory_bytes for c in found] == [
        80_000_000_000,
        80_000_000_000,
        85_899_345_920,
        85_899_345_920,
    ]
    assert [c.network.bytes_per_s for c in found] == [50e9, 400e9, 50e9, 400e9]


def test_a_stated_memory_picks_the_variant() -> None:
    assert parse_cluster("8xA100, mem=40GB").device.hbm_bytes_per_s == 1555e9
    assert parse_cluster({"gpu": "A100-PCIe", "mem": "40GiB"}).device.name == (
        "A100-PCIe-40GB"
    )


@pytest.mark.parametrize(
    ("name", "gib"),
    [("A100", 79.1), ("H100", 79.1), ("A100-40GB", 39.4), ("L4", 22.0), ("4090", 23.6)],
)
def test_memory_is_what_the_driver_reports(name: str, gib: float) -> None:
    assert load_device(name).memory_bytes / GIB == pytest.approx(gib, abs=0.1)


def test_peaks_are_dense_and_dtypes_are_refused() -> None:
    h100, v100 = load_device("H100"), load_device("V100")
    assert h100.peak("bf16") == 989.4e12
    assert h100.peak("fp8") == 1978.9e12
    assert load_device("A100").peak("int8") == 624e12
    assert not v100.supports("bf16")
    assert not v100.supports("fp8")
    with pytest.raises(SpecError, match=r"bf16.*It computes in fp32, fp16"):
        v100.peak("bf16")


def test_consumer_cards_have_no_peer_to_peer() -> None:
    for name in ("RTX4090", "RTX5090", "3090"):
        assert not parse_cluster(f"2x{name}").link.p2p


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12xA100", "Use 8 or 16 GPUs.*1x12xA100"),
        ("100xGB200", "Use 128 GPUs"),
        ("8xA1000", "unknown GPU.*Nearest known: A100"),
        ("8xH10O", "Nearest known: .*H100"),
        ("16xA100@efa-40", "unknown network|not a network|not a bandwidth"),
        ("16xA100@100", "unknown network"),
        ("16xA100@100Gbps carrier pigeon", "not a network"),
        ("", "no GPU named"),
        ("8x", "no GPU named"),
        ("0xA100", "whole number"),
        ("2x2x2xA100", "too many counts"),
        ("9999999xA100", "too large"),
        ("900000x8xA100", "no such number"),
        ("500000x1xA100+600000x1xA100", "too many GPUs"),
        ("8xA100, colour=red", "unknown key"),
        ("8xA100, red", "not a key=value"),
        ("8xA100@1Gbps, inter=2Gbps", "given twice"),
        ("8xA100, oversubscription=0.5", "oversubscription"),
        ("8xA100, mem=0GB", "memory"),
        ("8xA100, intra=nvlink9", "unknown link"),
        ("8xA100, price=free", "must be a number"),
        ("8xA100, nodes=3", "counts stand before"),
        ("x" * 2000, "too long"),
        ("missing.json", "can not read"),
    ],
)
def test_a_mistake_says_what_and_how(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.compile(message, re.S)):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"gpu": "A100", "num_gpus": 64}, ("A100-SXM-80GB", 8, 8)),
        ({"gpu": "A100", "nodes": 2, "gpus_per_node": 4}, ("A100-SXM-80GB", 2, 4)),
        ({"gpu": "A100", "nodes": 2}, ("A100-SXM-80GB", 2, 8)),
        ({"gpu": "A100", "gpus": 8, "per_node": 4}, ("A100-SXM-80GB", 2, 4)),
        ({"gpu": "A100", "num_gpus": 6, "nodes": 2}, ("A100-SXM-80GB", 2, 3)),
        ({"cluster": "16xH100", "inter": "200Gb/s"}, ("H100-SXM-80GB", 2, 8)),
    ],
)
def test_a_mapping(mapping: dict[str, object], expected: tuple[str, int, int]) -> None:
    assert shape(parse_cluster(mapping)) == [expected]


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"gpu": "A100", "num_gpus": 7, "nodes": 2},
        {"gpu": "A100", "num_gpus": "many"},
        {"gpu": "A100", "inter": ["fast"]},
        {"gpu": 5},
    ],
)
def test_a_mapping_that_is_no_cluster(mapping: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        parse_cluster(mapping)


def test_links_and_prices_can_be_stated() -> None:
    cluster = parse_cluster("8xA100, intra=pcie4-x16, price=1.5")
    assert cluster.link.kind is LinkKind.PCIE
    assert cluster.device.price_per_hour == 1.5
    assert parse_cluster("8xA100, intra=100GB/s").link.bytes_per_s == 100e9


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"gpu": "H100", "num_gpus": 16, "inter": "ib-400"}))
    assert shape(parse_cluster(file)) == [("H100-SXM-80GB", 2, 8)]
    assert shape(parse_cluster(str(file))) == [("H100-SXM-80GB", 2, 8)]
    for content in ("[1, 2]", "{", '"' + "x" * 10, "[" * 100_000):
        file.write_text(content)
        with pytest.raises(SpecError):
            parse_cluster(file)
    file.write_text('"8xA100"')
    assert parse_cluster(file).num_gpus == 8


def test_yaml_without_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gpu: A100\nnum_gpus: 16\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SpecError, match="PyYAML"):
        parse_cluster(file)


def test_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "c.yaml"
    file.write_text("gpu: A100\nnum_gpus: 16\n")
    assert parse_cluster(file).num_gpus == 16
    file.write_text("gpu: [A100\n")
    with pytest.raises(SpecError, match="not a cluster file"):
        parse_cluster(file)


def test_a_single_node_has_no_network_and_a_ready_cluster_passes_through() -> None:
    cluster = parse_cluster("8xA100")
    assert cluster.network.kind is NetworkKind.NONE
    assert parse_cluster(cluster) is cluster


def test_the_slowest_network_joins_unlike_nodes() -> None:
    cluster = parse_cluster("8xA100+8xH100")
    assert not cluster.homogeneous
    assert cluster.network.bytes_per_s == 25e9


@pytest.mark.parametrize("name", device_names())
def test_every_device_is_whole(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.source
    assert load_link(device.link).bytes_per_s < device.hbm_bytes_per_s
    assert load_network(device.network).bytes_per_s > 0
    peaks = dict(device.peak_flops)
    assert peaks["fp32"] <= max(peaks.values())
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    assert 0.85 < device.memory_bytes / (device.nominal_gb * 1e9) < 1.1
    assert parse_cluster(f"2x{name}").device == device
    assert 0 < device.kernel_s < device.launch_s < 20e-6


def test_every_link_and_network_has_its_constants() -> None:
    for name in link_names():
        assert load_link_fit(load_link(name).fit).source
    for name in network_names():
        if name != "none":
            assert load_net_fit(load_network(name).fit).source
    with pytest.raises(SpecError, match="Known"):
        load_link_fit("string")
    with pytest.raises(SpecError, match="Known"):
        load_net_fit("string")


def test_a_gpu_is_one_file_and_needs_a_source() -> None:
    record = next(r for r in records("gpu_") if r["name"] == "L4")
    assert device_from(record).sm_count == 58
    with pytest.raises(SpecError, match="source"):
        device_from({**record, "source": []})


@given(st.text(max_size=60))
def test_any_text_is_a_cluster_or_a_spec_error(text: str) -> None:
    check(text)


@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.sampled_from(["", " "]),
)
def test_any_pieces_are_a_cluster_or_a_spec_error(words: list[str], gap: str) -> None:
    check(gap.join(words))


def check(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except SpecError:
        return
    assert 1 <= cluster.num_gpus <= MAX_GPUS
