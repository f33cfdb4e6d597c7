"""Fits convolution weights: ``python -m benchmarks.fit.fit_conv [--data FILE]``.

Per (GPU, dtype) and direction: the log of measured time over the price of the GEMM of
the same shape (both beyond the kernel floor) is linear in ``FEATURES``; ridge fit with
robust reweighting. Errors in sample, with whole shapes held out, and by the other
GPU. Run it after fit_gemm, whose surfaces it builds on.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.fit.surface_fit import SOFT, Array, errors
from benchmarks.kernel_rows import DATA, ConvRow, SkipRow, conv_rows, read_rows
from cost_models.conv import DIRECTIONS, FEATURES, corrected, features
from cost_models.gemm import priced

OUT = Path(__file__).parents[2] / "cost_models" / "utilization" / "conv.json"
SOURCE = "benchmarks/fit/fit_conv.py on benchmarks/data/micro_conv.csv.gz"
RIDGE, POOLED_RIDGE = 2.0, 8.0
FOLDS = 5

Fit = dict[str, Array]


def ratios(rows: Sequence[ConvRow]) -> Array:
    """Log of measured over GEMM time, beyond the floor of a kernel."""
    out: list[float] = []
    for r in rows:
        s = r.shape
        op = priced(r.device, s.m, s.n, s.k, s.groups, r.dtype, s.nbytes)
        measured = max(r.time_s - op.launch_s, 0.3 * r.time_s)
        out.append(float(np.log(measured / (op.time_s - op.launch_s))))
    return np.array(out)


def fit(rows: Sequence[ConvRow], ridge: float = RIDGE) -> Fit:
    """Weights of each direction; a pooled fit takes more ``ridge``."""
    found: Fit = {}
    for direction in DIRECTIONS:
        part = [r for r in rows if r.direction == direction]
        a = np.array([features(r.device, r.dtype, r.shape) for r in part])
        y, weight = ratios(part), np.ones(len(part))
        penalty = ridge * np.eye(len(FEATURES))
        penalty[0, 0] = 1e-6
        x = np.zeros(len(FEATURES))
        for _ in range(20):
            normal = a.T @ (weight[:, None] * a) + penalty
            x = np.linalg.solve(normal, a.T @ (weight * y))
            weight = 1 / np.sqrt(1 + ((y - a @ x) / SOFT) ** 2)
            weight *= len(weight) / weight.sum()
        found[direction] = x
    return found


def predict(rows: Sequence[ConvRow], weights: Fit) -> Array:
    return np.array(
        [
            corrected(
                r.device,
                r.dtype,
                r.shape,
                tuple(float(w) for w in weights[r.direction]),
            ).time_s
            for r in rows
        ]
    )


def measured(rows: Sequence[ConvRow]) -> Array:
    return np.array([r.time_s for r in rows])


def held_out(rows: Sequence[ConvRow]) -> dict[str, float]:
    """Error with fifths of the shapes left out."""
    seen, real = [], []
    for fold in range(FOLDS):
        test = [zlib.crc32(r.shape_name.encode()) % FOLDS == fold for r in rows]
        train = [r for r, t in zip(rows, test, strict=True) if not t]
        rest = [r for r, t in zip(rows, test, strict=True) if t]
        if rest:
            seen.append(predict(rest, fit(train)))
            real.append(measured(rest))
    return errors(np.concatenate(seen), np.concatenate(real))


def entry(family: str, dtype: str, weights: Fit, note: str, error: dict[str, float]):
    constants = {
        f"{d}_{f}": round(float(w), 4)
        for d in DIRECTIONS
        for f, w in zip(FEATURES, weights[d], strict=True)
    }
    raw = {"family": family, "dtype": dtype, "constants": constants}
    return raw | {"source": f"{SOURCE}; {note}", "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(DATA / "micro_conv.csv.gz"))
    groups: dict[tuple[str, str], list[ConvRow]] = defaultdict(list)
    for raw in read_rows(parser.parse_args().data):
        try:
            for row in conv_rows(raw):
                groups[row.device.family, row.dtype].append(row)
        except SkipRow:
            continue
    out: list[dict[str, object]] = []
    for (family, dtype), rows in sorted(groups.items()):
        weights = fit(rows)
        inside = errors(predict(rows, weights), measured(rows))
        outside = held_out(rows)
        print(family, dtype, inside, "shapes held out", outside)
        flat = {f"in_sample_{k}": inside[k] for k in ("median_ape", "p90_ape")}
        flat |= {f"shapes_held_out_{k}": outside[k] for k in ("median_ape", "p90_ape")}
        out.append(entry(family, dtype, weights, f"{len(rows)} times", flat))
    for dtype in ("fp16", "fp32"):
        families = sorted(f for f, d in groups if d == dtype)
        left = {}
        for family in families:
            rest = [r for f in families if f != family for r in groups[f, dtype]]
            rows = groups[family, dtype]
            if rest:
                seen = predict(rows, fit(rest, POOLED_RIDGE))
                left[family] = errors(seen, measured(rows))["median_ape"]
        print("left out", dtype, left)
        pooled = fit([r for f in families for r in groups[f, dtype]], POOLED_RIDGE)
        out.append(
            entry("datasheet", dtype, pooled, f"pooled {', '.join(families)}", left)
        )
    text = ",\n".join(json.dumps(e) for e in out)
    OUT.write_text(f"[\n{text}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
