"""Predicted against measured time of kernels: the tables ``micro_gemm``,
``micro_attention``, ``micro_conv`` and ``micro_layer``.

Rows are priced with the product's own functions. Where a source does not time an
average cold kernel, its documented measurement bias (``data/measurement_bias.json``) is
applied to the price, per source and never per row. A row that can not be priced is
listed with its reason. No price is below the physical limit max(FLOPs / peak, bytes /
HBM); measured rows can be, where a loop over one small operand reads it from L2.

    python -m benchmarks.accuracy_kernels micro_gemm [FILE.csv[.gz]]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.kernel_rows import (
    BIAS_FILE,
    DATA,
    Row,
    SkipRow,
    attention_row,
    bias_of,
    biases,
    conv_rows,
    gemm_row,
    layer_row,
    measured_attention_s,
    measured_layer_s,
    read_rows,
)
from cost_models.attention import attention_constants
from cost_models.conv import WINOGRAD_GAIN, conv_constants, corrected
from cost_models.gemm import gemm_time, measured, quantise_time


@dataclass(frozen=True, slots=True)
class Result:
    """One priced row: seconds, and the groups that it counts in."""

    id: str
    predicted_s: float
    measured_s: float
    limit_s: float  # max(FLOPs / peak, bytes / HBM); 0 where several kernels ran
    groups: tuple[str, ...]


@dataclass(slots=True)
class Report:
    """Priced rows and the reasons of those that are not."""

    results: list[Result] = field(default_factory=lambda: [])
    skipped: Counter[str] = field(default_factory=lambda: Counter())


def _gemm(row: Row) -> Iterable[Result]:
    r = gemm_row(row)
    op = gemm_time(r.device, r.m, r.n, r.k, r.batch, r.dtype, r.layout, r.out_bytes)
    time_s = op.time_s
    if r.includes_quantisation:
        time_s += quantise_time(r.device, r.m, r.k, r.dtype).time_s
    bias = bias_of(r.source, r.device.family)
    limit = max(op.flops / r.device.peak(r.dtype), op.memory_s)
    own = "surface" if measured(r.device, r.dtype) else "fallback"
    yield Result(
        r.id,
        bias.ratio * time_s + bias.delta_s,
        r.time_s,
        limit,
        (f"gpu:{r.device.name}", f"{r.device.name}/{r.dtype}", r.source, own),
    )


def _attention(row: Row) -> Iterable[Result]:
    r = attention_row(row)
    constants = attention_constants(r.device, r.dtype)
    warm = biases().get(f"attention-warm:{r.device.family}")
    seconds = measured_attention_s(r, constants, warm.ratio if warm else 0.5)
    phase = "prefill" if r.sizes[3] > 1 else "decode"
    groups = (f"gpu:{r.device.name}", f"{r.device.name}/{phase}", phase)
    yield Result(r.id, seconds, r.time_s, 0.0, groups)


def _conv(row: Row) -> Iterable[Result]:
    for r in conv_rows(row):
        weights = getattr(conv_constants(r.device, r.dtype), r.direction)
        op = corrected(r.device, r.dtype, r.shape, weights)
        groups = (f"gpu:{r.device.name}", f"{r.device.name}/{r.dtype}", r.direction)
        gain = WINOGRAD_GAIN if r.shape.winograd else 1.0
        flops_s = op.flops / (r.device.peak(r.dtype) * gain)
        limit = max(flops_s, op.memory_s)
        yield Result(f"{r.id}.{r.direction}", op.time_s, r.time_s, limit, groups)


def _layer(row: Row) -> Iterable[Result]:
    r = layer_row(row)
    raw = json.loads(BIAS_FILE.read_text("utf-8"))["layer"]
    seconds = measured_layer_s(r, raw["ratio"], raw["passes"], raw["score_s"])
    flash = "flash" if r.flash else "unfused"
    yield Result(r.id, seconds, r.time_s, 0.0, (f"gpu:{r.gpu}", flash))


TABLES: Mapping[str, Callable[[Row], Iterable[Result]]] = {
    "micro_gemm": _gemm,
    "micro_attention": _attention,
    "micro_conv": _conv,
    "micro_layer": _layer,
}


def price_rows(table: str, rows: Iterable[Row]) -> Report:
    """Every row priced or skipped with its reason."""
    report = Report()
    for row in rows:
        try:
            report.results += TABLES[table](row)
        except SkipRow as reason:
            report.skipped[str(reason)] += 1
    return report


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.argsort(np.argsort(values)).astype(float)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """n, mape, median_ape, p90_ape, bias (median), rank_correlation (Spearman)."""
    if not results:
        return {"n": 0}
    seen = np.array([r.predicted_s for r in results])
    real = np.array([r.measured_s for r in results])
    ape = np.abs(seen / real - 1)
    rank = 1.0
    if len(results) > 2 and np.ptp(seen) > 0 and np.ptp(real) > 0:
        rank = float(np.corrcoef(_ranks(seen), _ranks(real))[0, 1])
    return {
        "n": len(results),
        "mape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "bias": round(float(np.median(seen / real - 1)), 4),
        "rank_correlation": round(rank, 4),
    }


def evaluate(table: str, rows: Iterable[Row]) -> dict[str, Any]:
    """The figures of a table over ``rows``, by group, with skips and limits."""
    report = price_rows(table, rows)
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in report.results:
        for name in r.groups:
            groups[name].append(r)
    limited = [r for r in report.results if r.limit_s > 0]
    worst = sorted(report.results, key=lambda r: -abs(r.predicted_s / r.measured_s - 1))
    return {
        **figures(report.results),
        "skipped": [f"{n} x {why}" for why, n in sorted(report.skipped.items())],
        "priced_below_limit": sum(
            r.predicted_s < r.limit_s * (1 - 1e-9) for r in limited
        ),
        "measured_below_limit": sum(r.measured_s < r.limit_s for r in limited),
        "by_group": {name: figures(part) for name, part in sorted(groups.items())},
        "worst": [
            {"id": r.id, "predicted_s": r.predicted_s, "measured_s": r.measured_s}
            for r in worst[:20]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("data", nargs="?")
    args = parser.parse_args()
    path = args.data or DATA / f"{args.table}.csv.gz"
    print(json.dumps(evaluate(args.table, read_rows(path)), indent=1))


if __name__ == "__main__":
    main()
