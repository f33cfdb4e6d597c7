"""Predicted against measured time of collectives: the table ``micro_collectives``.

Every row becomes a cluster in the product's own grammar (GPU, link, nodes, network) and
is priced by ``collective_time`` or ``p2p_time``. A row that can not be priced is listed
with its reason.

    python -m benchmarks.accuracy_collectives [FILE.csv[.gz]]
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.collectives import Group, collective_time, p2p_time
from cost_models.errors import SpecError
from cost_models.hardware import ClusterSpec, load_device, parse_cluster
from cost_models.link_fits import issue_time

Row = Mapping[str, str]
DATA = Path(__file__).parent / "data" / "micro_collectives.csv.gz"
OPS = {
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "send_recv": "p2p",
    "sendrecv": "p2p",
    "p2p": "p2p",
}
_KINDS = (("efa", "efa"), ("ethernet", "ethernet"), ("tcp", "ethernet"))
_KINDS += (("roce", "roce"), ("infiniband", "infiniband"), ("omni-path", "infiniband"))
_PER_GPU = re.compile(r"([\d.]+)\s*GB/s per GPU", re.I)
_PORTS = re.compile(r"(\d+)\s*x\s*(\d+)\s*G(?:b/s|bps|bit)", re.I)
_PORT = re.compile(r"(\d+)\s*G(?:b/s|bps|bit)", re.I)
_BUS_ONLY_BYTES = 2**30  # size assumed where a source prints a bandwidth alone


class CanNotPriceError(Exception):
    """A row whose hardware or operation is outside the model; its text says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row as the product sees it."""

    cluster: ClusterSpec
    op: str  # a collective, or p2p
    size_bytes: float
    ranks: int
    per_node: int
    issue_s: float
    measured_s: float


def _number(row: Row, key: str) -> float | None:
    text = (row.get(key) or "").strip()
    return float(text) if text and text.lower() != "nan" else None


def _link(row: Row) -> str | None:
    """Name of the link that the row states, if it is not the GPU's usual one."""
    text, device = (row.get("link") or "").lower(), load_device(row["gpu"])
    hopper = device.arch in ("hopper", "blackwell")
    if "pair" in text:
        return "pcie5-nvlink-pairs" if hopper else "pcie4-nvlink-pairs"
    usual_is_pcie = device.link.startswith("pcie")
    if "pcie" in text and not usual_is_pcie:
        match = re.search(r"pcie\s*(?:gen)?\s*([345])", text)
        default = {"volta": "3", "pascal": "3"}.get(device.arch, "4")
        return f"pcie{match[1] if match else default}-x16"
    if "nvlink2" in text and "switch" in text:
        return "nvswitch-v100"
    return None


def _network(row: Row, per_node: int) -> str | None:
    """The network that the row states, in the grammar; None: the GPU's usual one."""
    text = (row.get("inter_node_net") or "").strip()
    unknown = not text or "not documented" in text
    if unknown and "azure" in (text + row.get("link", "")).lower():
        return "azure-a100"  # what vidur's own send_recv shows of it
    if unknown:
        return None
    kind = next((k for word, k in _KINDS if word in text.lower()), "infiniband")
    each, ports, port = _PER_GPU.search(text), _PORTS.search(text), _PORT.search(text)
    if each:
        return f"{each[1]}GB/s {kind} per gpu"
    if ports:
        return f"{int(ports[1]) * int(ports[2]) / per_node}Gb/s {kind} per gpu"
    if port:
        shared = kind == "ethernet" or "per node" in text.lower()
        return f"{port[1]}Gb/s {kind} per {'node' if shared else 'gpu'}"
    return None


def case_of(row: Row) -> Case:
    """The case that a row describes; CanNotPriceError with the reason if none."""
    op = OPS.get(row["op"].strip().lower())
    if op is None:
        raise CanNotPriceError(f"{row['op']} is not a collective")
    if not (row.get("gpu") or "").strip():
        raise CanNotPriceError("the source does not state the GPU")
    ranks, nodes = int(_number(row, "num_gpus") or 0), int(_number(row, "nodes") or 1)
    if ranks < 2 or ranks % nodes:
        raise CanNotPriceError(f"{ranks} ranks on {nodes} nodes")
    try:
        device = load_device(row["gpu"])
        nodes = 1 if ranks <= device.node_gpus > 16 else nodes  # one NVLink domain
        per_node = ranks // nodes
        width = max(per_node, int(_number(row, "gpus_per_node") or 1))
        if nodes > 1:  # part of a node was used: the ports are those of a whole one
            width = max(width, min(device.node_gpus, 8))
        described = {"gpu": row["gpu"], "nodes": nodes, "gpus_per_node": width}
        extra = {"intra": _link(row), "inter": _network(row, width)}
        cluster = parse_cluster(described | {k: v for k, v in extra.items() if v})
    except SpecError as error:
        raise CanNotPriceError(str(error)) from None
    size_bytes, measured_s = _measured(row, op, ranks)
    issue_s = issue_time((row.get("library") or "").strip())
    return Case(cluster, op, size_bytes, ranks, per_node, issue_s, measured_s)


def _measured(row: Row, op: str, ranks: int) -> tuple[float, float]:
    """Bytes of the full tensor and measured seconds.

    Where a source prints a bus bandwidth alone, the time of 1 GiB at that bandwidth."""
    size, time_us = _number(row, "bytes"), _number(row, "time_us")
    busbw = _number(row, "busbw_gbps")
    if size and time_us:
        return size, time_us * 1e-6
    if not busbw:
        raise CanNotPriceError("neither a time nor a bandwidth")
    size = size or _BUS_ONLY_BYTES
    if "bidirectional" in (row.get("notes") or ""):
        busbw /= 2
    share = 1.0 if op in ("p2p", "broadcast") else (ranks - 1) / ranks
    factor = 2 * share if op == "all_reduce" else share
    return size, size * factor / (busbw * 1e9)


def predict_s(case: Case) -> float:
    """Seconds by the product's own model."""
    if case.op == "p2p":
        time = p2p_time(case.cluster, case.size_bytes, case.per_node > 1)
        return time.time_s
    group = Group(case.ranks, case.per_node)
    return collective_time(
        case.cluster, case.op, case.size_bytes, group, issue_s=case.issue_s
    ).time_s


def figures(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float | int]:
    """Errors of a set: absolute percentage errors as fractions, and rank order."""
    if len(measured) == 0:
        return {"n": 0}
    error = predicted / measured - 1
    ape = np.abs(error)
    found: dict[str, float | int] = {
        "n": len(measured),
        "mape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "bias": round(float(error.mean()), 4),
    }
    if len(measured) > 2 and np.ptp(measured) > 0 and np.ptp(predicted) > 0:
        both = np.corrcoef(_ranks(predicted), _ranks(measured))
        found["rank_correlation"] = round(float(both[0, 1]), 4)
    return found


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks with ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def evaluate(rows: Iterable[Row]) -> dict[str, Any]:
    """Errors over ``rows`` of the table, in all and by GPU, operation and nodes."""
    skipped: Counter[str] = Counter()
    predicted: list[float] = []
    measured: list[float] = []
    labels: list[tuple[str, str, str]] = []
    for row in rows:
        try:
            case = case_of(row)
        except CanNotPriceError as reason:
            skipped[str(reason)] += 1
            continue
        predicted.append(predict_s(case))
        measured.append(case.measured_s)
        nodes = case.ranks // case.per_node
        labels.append((row["gpu"], case.op, "one node" if nodes == 1 else "many nodes"))
    p, m = np.array(predicted), np.array(measured)
    groups = sorted({name for label in labels for name in label})
    by_group = {}
    for name in groups:
        mask = np.array([name in label for label in labels])
        by_group[name] = figures(p[mask], m[mask])
    reasons = [f"{count} rows: {reason}" for reason, count in skipped.most_common()]
    return {**figures(p, m), "skipped": reasons, "by_group": by_group}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, gzipped or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def main(argv: list[str]) -> None:
    path = Path(argv[0]) if argv else DATA
    print(json.dumps(evaluate(read_rows(path)), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
