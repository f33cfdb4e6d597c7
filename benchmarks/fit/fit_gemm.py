"""Fits the GEMM surfaces: ``python -m benchmarks.fit.fit_gemm [--data FILE]``.

For each (GPU, dtype): constants of the analytic model by robust least squares on log
time, then a smooth correction over (log2 rows, log2 n, log2 k). Sources that do not
report average kernel time get one ratio and one offset (``measurement_bias.json``),
found where the same GPU has an unbiased source. Prints the error in sample, with whole
families of n held out, and with the GPU held out; writes both files.
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false
import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from benchmarks.fit.surface_fit import (
    Array,
    Knots,
    design,
    errors,
    fit_constants,
    fit_grid,
)
from benchmarks.kernel_rows import (
    BIAS_FILE,
    DATA,
    Bias,
    GemmRow,
    SkipRow,
    gemm_row,
    read_rows,
)
from cost_models.gemm_core import (
    GemmConstants,
    joined_s,
    limit_s,
    machine,
    mainloop_s,
    quantise_s,
)
from cost_models.roofline import dtype_bytes
from cost_models.surfaces import ALIKE, RELATIVES

OUT = Path(__file__).parents[2] / "cost_models" / "utilization" / "gemm.json"
SUSTAINED = OUT.with_name("sustained.json")
SOURCE = "benchmarks/fit/fit_gemm.py on benchmarks/data/micro_gemm.csv.gz"
NAMES = tuple(f.name for f in fields(GemmConstants))
#: name: (start, low, high)
RANGES: dict[str, tuple[float, float, float]] = {
    "eff": (0.85, 0.2, 1.0),
    "k0": (96, 1, 2000),
    "waves": (0.7, 0.001, 1),
    "mem": (0.85, 0.3, 1),
    "sm_load": (2.5, 0.5, 20),
    "step_ns": (30, 1, 600),
    "floor": (1.3, 0.3, 6),
    "k_split": (256, 64, 1 << 15),
    "split": (1, 0.01, 4),
    "align32": (0.1, 0.001, 0.5),
    "align16": (0.7, 0.001, 2),
    "align4": (1.5, 0.001, 4),
    "norm": (3, 1.2, 20),
    "quant_floor": (1, 0.01, 6),
    "quant_row_ns": (2, 0.01, 20),
}
START, LOW, HIGH = (np.array([RANGES[n][i] for n in NAMES]) for i in range(3))
#: Knots of the correction, log2 of rows (m x batch), n and k.
KNOTS: Knots = (
    (0, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 17),
    (5, 8, 10, 11, 12, 13, 14, 17),
    (9, 10, 11, 12, 13, 14, 17),
)
SMOOTH, RIDGE = 0.3, 0.05

Grid = tuple[Knots, Array]

REASONS = {
    "vidur": "median of profiled operator calls, with profiler overhead and 1 us steps",
    "cookbook": "the source prints the worst of 200 iterations, not the mean",
    "simumax:B200": "efficiencies of a power-limited machine under sustained load",
}


@dataclass(frozen=True)
class Table:
    """Rows of one device and dtype as columns; ``ratio``, ``delta`` are biases."""

    rows: Sequence[GemmRow]

    def column(self, name: str) -> Array:
        return np.array([float(getattr(r, name)) for r in self.rows])


@dataclass(frozen=True)
class Packed:
    """Columns of rows that share device and dtype."""

    device: object
    dtype: str
    m: Array
    n: Array
    k: Array
    batch: Array
    nbytes: Array
    time_s: Array
    ratio: Array
    delta: Array
    quantised: Array
    source: Array

    def part(self, mask: Array) -> Packed:
        cut = {f.name: getattr(self, f.name)[mask] for f in fields(self)[2:]}
        return Packed(self.device, self.dtype, **cut)

    def points(self) -> Array:
        return np.log2(np.stack([self.m * self.batch, self.n, self.k], axis=1))


def pack(rows: Sequence[GemmRow], bias: dict[str, Bias]) -> Packed:
    """Columns, with the bias of each row's source."""
    table, first = Table(rows), rows[0]
    m, n, k, b, out = (table.column(c) for c in ("m", "n", "k", "batch", "out_bytes"))
    found = [
        bias.get(f"{r.source}:{r.device.family}", bias.get(r.source, Bias()))
        for r in rows
    ]
    nbytes = b * ((m * k + k * n) * dtype_bytes(first.dtype) + m * n * out)
    return Packed(
        first.device,
        first.dtype,
        m,
        n,
        k,
        b,
        nbytes,
        table.column("time_s"),
        np.array([x.ratio for x in found]),
        np.array([x.delta_s for x in found]),
        np.array([float(r.includes_quantisation) for r in rows]),
        np.array([r.source for r in rows]),
    )


def analytic(p: Packed, x: Array) -> tuple[Array, Array]:
    """(GEMM seconds, quantisation seconds) of the analytic model."""
    on = machine(p.device, p.dtype, GemmConstants(*(float(v) for v in x)))  # type: ignore[arg-type]
    t = joined_s(on, mainloop_s(on, p.m, p.n, p.k, p.batch), p.nbytes)
    quant = np.asarray(quantise_s(on, p.m, p.k)) * p.quantised
    return t, quant


def knots_of(parts: Sequence[Packed]) -> Knots:
    """``KNOTS`` cut to the range of the data: beyond it the correction is constant."""
    points = np.concatenate([p.points() for p in parts])
    out: list[tuple[float, ...]] = []
    for axis, low, high in zip(KNOTS, points.min(0), points.max(0), strict=True):
        first = max((i for i, x in enumerate(axis) if x <= low), default=0)
        last = min((i for i, x in enumerate(axis) if x >= high), default=len(axis) - 1)
        first = min(first, len(axis) - 3)
        out.append(axis[first : max(last, first + 2) + 1])
    return tuple(out)


def limited(p: Packed, t: Array) -> Array:
    on = machine(p.device, p.dtype, GemmConstants(*START))  # type: ignore[arg-type]
    return np.maximum(t, limit_s(on, 2 * p.m * p.n * p.k * p.batch, p.nbytes))


def predicted(p: Packed, x: Array, grid: Grid | None) -> Array:
    """What the source would measure, by the model."""
    t, quant = analytic(p, x)
    if grid is not None:
        t = t * np.exp(design(grid[0], p.points()) @ grid[1])
    return p.ratio * (limited(p, t) + quant) + p.delta


def fit(parts: Sequence[Packed], start: Array = START, evals: int = 3000) -> Array:
    """Constants over one or more (device, dtype) parts, each of equal weight."""
    most = max(len(p.time_s) for p in parts)

    def residual(x: Array) -> Array:
        logs = []
        for p in parts:
            r = np.log(predicted(p, x, None) / p.time_s)
            logs.append(np.resize(r, most) if len(parts) > 1 else r)
        return np.concatenate(logs)

    return fit_constants(residual, start, LOW, HIGH, evals)


def bias_from(
    parts: Sequence[tuple[Packed, Array]], offset: bool
) -> tuple[float, float]:
    """(ratio >= 1, delta >= 0) of a source against constants of unbiased rows."""
    pairs = [(sum(analytic(p, x)), p.time_s) for p, x in parts]
    model = np.concatenate([a for a, _ in pairs])
    real = np.concatenate([b for _, b in pairs])

    def loss(z: Array) -> float:
        seen = np.exp(abs(z[0])) * model + (abs(z[1]) * 1e-6 if offset else 0.0)
        r = np.log(seen / real)
        return float(np.mean(np.sqrt(r * r + 0.0025)))

    z = minimize(loss, np.array([0.02, 5.0]), method="Nelder-Mead").x
    ratio, delta_us = float(np.exp(abs(z[0]))), abs(float(z[1])) * offset
    return round(ratio, 4), round(delta_us * 1e-6, 8)


def surface_key(row: GemmRow) -> tuple[str, str]:
    """(family, dtype) of the row's surface; PCIe A100s are a surface of their own."""
    own = row.device.family == "A100" and row.device.form == "PCIE"
    family = "A100-PCIE" if own else row.device.family
    return family, ALIKE.get(row.dtype, row.dtype)


def by_device(rows: Sequence[GemmRow]) -> list[list[GemmRow]]:
    """Rows grouped by (device, dtype as measured)."""
    groups: dict[tuple[str, str], list[GemmRow]] = defaultdict(list)
    for r in rows:
        groups[r.device.name, r.dtype].append(r)
    return list(groups.values())


def fit_biases(groups: dict[tuple[str, str], list[GemmRow]]) -> dict[str, Bias]:
    """Biases of vidur, the cookbook and SimuMax's B200 against unbiased rows."""
    anchors: dict[str, Array] = {}
    for family in ("A100", "H100", "B200"):
        clean = [r for r in groups[family, "fp16"] if r.source == "aiconfigurator"]
        anchors[family] = fit([pack(clean, {})])
    found: dict[str, Bias] = {}
    for source, families, offset in (
        ("vidur", ("A100", "H100"), True),
        ("cookbook", ("A100",), True),
        ("simumax:B200", ("B200",), False),
    ):
        name = source.split(":")[0]
        parts = [
            (pack([r for r in groups[f, "fp16"] if r.source == name], {}), anchors[f])
            for f in families
        ]
        ratio, delta = bias_from(parts, offset)
        found[source] = Bias(ratio, delta, REASONS[source])
    return found


def merged(rows: Sequence[GemmRow], bias: dict[str, Bias]) -> list[Packed]:
    return [pack(part, bias) for part in by_device(rows)]


def grid_of(parts: Sequence[Packed], x: Array) -> Grid:
    """One correction over all parts of a surface: the log of what the residuals leave;
    a biased source counts by the share of the model in its time."""
    knots = knots_of(parts)
    points, target, weight = [], [], []
    for p in parts:
        t, quant = analytic(p, x)
        rest = np.maximum((p.time_s - p.delta) / p.ratio - quant, 0.3 * t)
        points.append(p.points())
        target.append(np.log(rest / t))
        weight.append((p.ratio * t / (p.ratio * (t + quant) + p.delta)) ** 2)
    joined = (np.concatenate(v) for v in (points, target, weight))
    return knots, fit_grid(knots, *joined, SMOOTH, RIDGE)


def evaluate(parts: Sequence[Packed], x: Array, grid: Grid | None) -> dict[str, float]:
    real = np.concatenate([p.time_s for p in parts])
    return errors(np.concatenate([predicted(p, x, grid) for p in parts]), real)


def held_out(parts: Sequence[Packed], x: Array, folds: int = 4) -> dict[str, float]:
    """Error with whole families of n left out of constants and correction."""
    seen, real = [], []
    values = sorted({float(v) for p in parts for v in p.n})
    for fold in range(folds):
        out = set(values[fold::folds])
        masks = [np.isin(p.n, list(out)) for p in parts]
        train = [p.part(~k) for p, k in zip(parts, masks, strict=True) if (~k).any()]
        y = fit(train, x, 800)
        grid = grid_of(train, y)
        for p, mask in zip(parts, masks, strict=True):
            if mask.any():
                seen.append(predicted(p.part(mask), y, grid))
                real.append(p.time_s[mask])
    return errors(np.concatenate(seen), np.concatenate(real))


def write_sustained(bias: dict[str, Bias]) -> None:
    """``sustained.json``: GEMM time under minutes of load over short bursts."""
    b = bias["simumax:B200"]
    raw = {
        "family": "B200",
        "dtype": "fp16",
        "constants": {"ratio": b.ratio},
        "source": f"{SOURCE}; SimuMax rows over aiconfigurator rows; {b.reason}",
        "error": {},
    }
    SUSTAINED.write_text(f"[\n{json.dumps(raw)}\n]\n", "utf-8")


def entry(family: str, dtype: str, x: Array, grid: Grid | None, **extra: object):
    """One surface as it is stored."""
    digits = {n: float(f"{v:.4g}") for n, v in zip(NAMES, x, strict=True)}
    raw: dict[str, object] = {"family": family, "dtype": dtype, "constants": digits}
    if grid is not None:
        raw |= {"knots": grid[0], "grid": [round(float(g), 3) for g in grid[1]]}
    return raw | extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(DATA / "micro_gemm.csv.gz"))
    rows: list[GemmRow] = []
    for raw in read_rows(parser.parse_args().data):
        try:
            rows.append(gemm_row(raw))
        except SkipRow:
            continue
    groups: dict[tuple[str, str], list[GemmRow]] = defaultdict(list)
    for r in rows:
        groups[surface_key(r)].append(r)
    bias = fit_biases(groups)
    stored = {
        k: {"ratio": b.ratio, "delta_s": b.delta_s, "reason": b.reason}
        for k, b in bias.items()
    }
    known = json.loads(BIAS_FILE.read_text("utf-8")) if BIAS_FILE.exists() else {}
    BIAS_FILE.write_text(json.dumps(known | stored, indent=1) + "\n", "utf-8")
    print(json.dumps(stored))
    write_sustained(bias)
    out: list[object] = []
    packed = {key: merged(g, bias) for key, g in groups.items()}
    fitted: dict[tuple[str, str], tuple[Array, Grid]] = {}
    for key, parts in sorted(packed.items()):
        x = fit(parts)
        grid = grid_of(parts, x)
        fitted[key] = x, grid
        figures = {
            "in_sample": evaluate(parts, x, grid),
            "constants_only": evaluate(parts, x, None),
            "n_families_held_out": held_out(parts, x),
        }
        print(*key, json.dumps(figures), flush=True)
        flat = {
            f"{name}_{k}": v
            for name, e in figures.items()
            for k, v in e.items()
            if k in ("median_ape", "p90_ape")
        }
        sources = sorted({str(s) for p in parts for s in set(p.source)})
        note = f"{SOURCE}; {sum(len(p.n) for p in parts)} rows of {', '.join(sources)}"
        out.append(entry(*key, x, grid, source=note, error=flat))
    out += datasheet(packed, fitted)
    text = ",\n".join(json.dumps(e) for e in out)
    OUT.write_text(f"[\n{text}\n]\n", "utf-8")


def datasheet(
    packed: dict[tuple[str, str], list[Packed]],
    fitted: dict[tuple[str, str], tuple[Array, Grid]],
) -> list[object]:
    """Pooled constants per dtype, and the error on each GPU left out."""
    out: list[object] = []
    for dtype in ("fp16", "fp8", "fp32"):
        keys = [k for k in packed if k[1] == dtype]
        left: dict[str, float] = {}
        for key in keys:
            rest = [p for k in keys if k != key for p in packed[k]]
            y = fit(rest, START, 1200)
            left[key[0]] = evaluate(packed[key], y, None)["median_ape"]
            relative = next(
                (
                    fitted[f, dtype]
                    for f in RELATIVES[packed[key][0].device.arch]  # type: ignore[attr-defined]
                    if f != key[0] and (f, dtype) in fitted
                ),
                None,
            )
            near = evaluate(packed[key], *relative)["median_ape"] if relative else None
            print("left out", key, "pooled", left[key[0]], "relative", near, flush=True)
        x = fit([p for k in keys for p in packed[k]], START, 3000)
        note = f"{SOURCE}; pooled over {', '.join(k[0] for k in keys)}, equal weights"
        out.append(entry("datasheet", dtype, x, None, source=note, error=left))
    return out


if __name__ == "__main__":
    main()
