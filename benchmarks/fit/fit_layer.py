"""Fits what layers take beyond kernels: ``python -m benchmarks.fit.fit_layer``

micro_layer times one eager GPT-NeoX layer in a loop. Three numbers, all of that
source's code and not of the product: the ratio of its GEMM times to prices (clocks
under load), the elementwise passes over (tokens, hidden) that its eager code makes, and
its fused attention's cost per score. Written to ``measurement_bias.json`` with the
error. Run it after fit_gemm and fit_attention.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from benchmarks.fit.surface_fit import SOFT, Array, errors
from benchmarks.kernel_rows import (
    BIAS_FILE,
    DATA,
    LayerRow,
    SkipRow,
    layer_row,
    measured_layer_s,
    read_rows,
)

FOLDS = 4


def predict(rows: Sequence[LayerRow], z: Array) -> Array:
    ratio, passes, score_ps = np.abs(z)
    score_s = score_ps * 1e-12
    return np.array([measured_layer_s(r, ratio, passes, score_s) for r in rows])


def fit(rows: Sequence[LayerRow]) -> Array:
    real = np.array([r.time_s for r in rows])

    def loss(z: Array) -> float:
        r = np.log(predict(rows, z) / real)
        return float(np.mean(np.sqrt(r * r + SOFT**2)))

    start = np.array([1.0, 30.0, 3.0])
    return np.abs(minimize(loss, start, method="Nelder-Mead").x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(DATA / "micro_layer.csv.gz"))
    rows: list[LayerRow] = []
    for raw in read_rows(parser.parse_args().data):
        try:
            rows.append(layer_row(raw))
        except SkipRow:
            continue
    rows.sort(key=lambda r: r.hidden)
    z = fit(rows)
    real = np.array([r.time_s for r in rows])
    inside = errors(predict(rows, z), real)
    seen: list[Array] = []
    took: list[float] = []
    for fold in range(FOLDS):  # contiguous ranges of hidden size
        cut = slice(fold * len(rows) // FOLDS, (fold + 1) * len(rows) // FOLDS)
        test = rows[cut]
        seen.append(predict(test, fit([r for r in rows if r not in test])))
        took += [r.time_s for r in test]
    outside = errors(np.concatenate(seen), np.array(took))
    print("ratio, passes, ps per score:", z, inside, "hidden sizes held out", outside)
    stored = json.loads(BIAS_FILE.read_text("utf-8"))
    stored["layer"] = {
        "ratio": round(float(z[0]), 4),
        "delta_s": 0.0,
        "passes": round(float(z[1]), 2),
        "score_s": float(f"{z[2] * 1e-12:.4g}"),
        "reason": "eager GPT-NeoX layer in a loop: sustained clocks, unfused"
        f" elementwise ops; median error {inside['median_ape']},"
        f" held out {outside['median_ape']}",
    }
    BIAS_FILE.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
