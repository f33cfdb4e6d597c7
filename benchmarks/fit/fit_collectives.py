"""Fits the constants of collectives: ``cost_models/specs/fit_*.json``.

    python -m benchmarks.fit.fit_collectives [FILE.csv[.gz]] [--write]

One set of constants per link generation and per network, on the rows of one-node and of
many-node collectives. The fit minimises soft-L1 of log(predicted / measured), starts
from the estimates in the files (``start``) and is drawn weakly towards them: a constant
that no row speaks of stays where it is, and a second run changes nothing. The threshold
of the ``simple`` protocol is a step in time, so it is searched on a grid. Without
``--write`` nothing changes and the error on held-out settings is printed: fit on one
half of the (GPU, nodes, ranks, operation) sets, test on the other, both ways. Needs
scipy.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy_collectives import (
    DATA,
    CanNotPriceError,
    Case,
    Row,
    case_of,
    figures,
    read_rows,
)
from cost_models.collectives import Collective, path_p2p_time, path_time
from cost_models.link_fits import link_fit_from, net_fit_from
from cost_models.paths import network_path, node_path

SPECS = Path(__file__).parents[2] / "cost_models" / "specs"
PROTOCOLS = ("ll", "ll128", "simple", "exchange", "exchange_simple")
FIELDS = ("base_s", "hop_s", "efficiency")
RING = [f"{p}.{f}" for p in PROTOCOLS for f in FIELDS] + ["copy_bytes_per_s"]
NVLS = ["nvls.base_s", "nvls.efficiency"]
P2P = ["p2p.base_s", "p2p.efficiency"]
THRESHOLDS = (0.15e6, 0.3e6, 0.5e6, 0.8e6, 1.2e6, 2e6, 4e6)
PULL = 0.02  # weight of a factor e away from the start, in units of log error
LINKS = {
    "nvlink3": RING + P2P,
    "nvlink4": RING + NVLS,
    "nvlink5": RING + NVLS,
    "pcie": ["simple.efficiency"],
    "pcie_l40s": [*RING, "contention.1.1", "contention.2.1"],
    "xgmi": ["simple.efficiency"],
}
NETWORKS = {
    "efa": ["base_s", "efficiency", "low_efficiency"],
    "azure": ["base_s", "efficiency", "low_efficiency", "p2p_efficiency"],
    "rdma": ["base_s", "efficiency", "low_efficiency"],
}
UNNAMED = {"gpu": "A100-80GB", "inter_node_net": "8x100Gb/s InfiniBand"}

Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A row that a fit may use: its case, and which half of the settings it is in."""

    case: Case
    half: int
    fit: str


def samples(rows: Sequence[Row]) -> list[Sample]:
    """Rows with the name of the constants that they speak of.

    The one table whose source names no GPU (four nodes, busbw just under 100 GB/s) is
    taken for eight 100 Gb/s ports: it tells the latency and share of RDMA ports."""
    found: list[Sample] = []
    for row in rows:
        if not row["gpu"] and row["op"] == "all_reduce":
            row = {**row, **UNNAMED}
        try:
            case = case_of(row)
        except CanNotPriceError:
            continue
        key = "|".join(row[k] for k in ("gpu", "nodes", "num_gpus", "op", "library"))
        nodes = case.ranks // case.per_node
        link = node_path(case.cluster.link, case.per_node).link
        name = link.fit if nodes == 1 else case.cluster.network.fit
        found.append(Sample(case, zlib.crc32(key.encode()) % 2, name))
    return found


def _seconds(case: Case, record: Constants, links: Mapping[str, Constants]) -> float:
    """As the product prices the case, with the constants of ``record`` for its network
    or, on one node, for its link; other links have those of ``links``."""
    node = case.cluster.groups[0]
    path = node_path(node.link, case.per_node)
    nodes = case.ranks // case.per_node
    link = record if nodes == 1 else links.get(path.fit.name)
    if link is not None:
        path = node_path(node.link, case.per_node, link_fit_from(link))
    if nodes > 1:
        network, rails, fit = case.cluster.network, case.per_node, net_fit_from(record)
        path = network_path(path, network, node, nodes, rails, 1, fit)
    if case.op == "p2p":
        return path_p2p_time(path, case.size_bytes).time_s
    time = path_time(path, Collective(case.op), case.size_bytes).time_s
    return time + case.issue_s


def _get(record: Constants, dotted: str) -> float:
    value: Any = record["constants"]
    for part in dotted.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return float(value)


def _put(record: Constants, dotted: str, number: float) -> None:
    *parts, last = dotted.split(".")
    value: Any = record["constants"]
    for part in parts:
        value = value[int(part)] if isinstance(value, list) else value[part]
    if isinstance(value, list):
        value[int(last)] = number
    else:
        value[last] = number


def _upper(name: str, link: str) -> float:
    """What is physically out of reach: shares over 1, hops of many microseconds."""
    if name == "simple.efficiency":
        return 0.88
    if "efficiency" in name or "contention" in name:
        return 0.98
    if name.endswith("hop_s") and link.startswith("nvlink"):
        return 3e-6
    return np.inf


def fit(
    start: Constants,
    free: Sequence[str],
    cases: Sequence[Case],
    links: Mapping[str, Constants],
) -> Constants:
    """The record with its ``free`` constants fitted to ``cases``, from ``start`` on."""
    start = start | {"constants": copy.deepcopy(start["start"])}
    best, lowest = start, np.inf
    stepped = len(free) > len(NVLS) + 3
    grid = THRESHOLDS if stepped else (None,)
    for threshold in grid:
        record = copy.deepcopy(start)
        if threshold is not None:
            record["constants"]["simple_from_bytes"] = threshold
        cost = _descend(record, free, cases, links)
        if cost < lowest:
            best, lowest = record, cost
    return best


def _descend(
    record: Constants,
    free: Sequence[str],
    cases: Sequence[Case],
    links: Mapping[str, Constants],
) -> float:
    """Fits in place; returns the cost."""
    floor = 1e-9
    at = np.log([max(_get(record, name), floor) for name in free])
    top = np.log([_upper(name, record["name"]) for name in free])
    measured = np.array([case.measured_s for case in cases])

    def residuals(x: np.ndarray) -> np.ndarray:
        for name, value in zip(free, np.exp(x), strict=True):
            _put(record, name, float(value))
        predicted = np.array([_seconds(c, record, links) for c in cases])
        return np.concatenate([np.log(predicted / measured), PULL * (x - at)])

    start = np.minimum(at, top - 1e-3)
    bounds = (np.full(len(free), np.log(floor) - 1), top)
    found = least_squares(
        residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1, max_nfev=40
    )
    residuals(found.x)
    return float(found.cost)


def _load(name: str) -> Constants:
    return json.loads((SPECS / f"fit_{name}.json").read_text("utf-8"))


def _errors(
    record: Constants, cases: Sequence[Case], links: Mapping[str, Constants]
) -> dict[str, float | int]:
    predicted = np.array([_seconds(c, record, links) for c in cases])
    return figures(predicted, np.array([c.measured_s for c in cases]))


def _all_fits(
    found: Sequence[Sample], keep: Callable[[Sample], bool]
) -> dict[str, Constants]:
    fitted: dict[str, Constants] = {}
    for name, free in (LINKS | NETWORKS).items():
        cases = [s.case for s in found if s.fit == name and keep(s)]
        record = _load(name)
        estimates = record | {"constants": record["start"]}
        fitted[name] = fit(record, free, cases, fitted) if cases else estimates
    return fitted


def hold_out(found: Sequence[Sample]) -> dict[str, Any]:
    """Errors on each half of the settings of constants fitted on the other."""
    predicted: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    for half in (0, 1):
        fitted = _all_fits(found, lambda s, h=half: s.half != h)
        for sample in found:
            if sample.half != half:
                continue
            case, name = sample.case, sample.fit
            record = fitted.get(name) or _load(name)
            for key in ("all", name):
                seconds = _seconds(case, record, fitted)
                predicted.setdefault(key, []).append(seconds)
                measured.setdefault(key, []).append(case.measured_s)
    return {
        key: figures(np.array(predicted[key]), np.array(measured[key]))
        for key in predicted
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(fitted: dict[str, Constants], found: Sequence[Sample]) -> None:
    """Writes the constants with their error and what they were fitted on."""
    for record in fitted.values():
        record["constants"] = _rounded(record["constants"])
    for name, record in fitted.items():
        cases = [s.case for s in found if s.fit == name]
        if not cases:
            continue
        record["error"] = _errors(record, cases, fitted)
        free = (LINKS | NETWORKS)[name]
        record["fitted"] = [*free, *(["simple_from_bytes"] if len(free) > 5 else [])]
        record["source"] = [
            "python -m benchmarks.fit.fit_collectives --write on "
            f"benchmarks/data/micro_collectives.csv.gz, {len(cases)} rows",
            "constants that 'fitted' does not name: estimates, no row speaks of them",
        ]
        text = json.dumps(record, indent=2) + "\n"
        (SPECS / f"fit_{name}.json").write_text(text, "utf-8")


def main(argv: Sequence[str]) -> None:
    paths = [a for a in argv if not a.startswith("-")]
    found = samples(read_rows(Path(paths[0]) if paths else DATA))
    if "--write" in argv:
        fitted = _all_fits(found, lambda s: True)
        write(fitted, found)
        print(json.dumps({n: r.get("error") for n, r in fitted.items()}, indent=2))
    else:
        before = [s for s in found if s.fit not in LINKS | NETWORKS]
        print(json.dumps({**hold_out(found), "not fitted": len(before)}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
