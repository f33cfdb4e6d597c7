"""Fits attention constants: ``python -m benchmarks.fit.fit_attention [--data FILE]``.

Prefill and decode constants of each GPU by robust least squares on log time. The rows
time a loop over one KV cache, so a cache smaller than L2 is read from L2: ``warm`` is
the time of such reads over reads from HBM (``measurement_bias.json``); prices are cold.
Backward rates are not in this table: ``backward`` is the ratio that the FlashAttention
papers report for each generation (backward over forward FLOP rate at long sequences).
"""

from __future__ import annotations

# pyright: reportArgumentType=false
import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks.fit.surface_fit import Array, errors, fit_constants
from benchmarks.kernel_rows import (
    BIAS_FILE,
    DATA,
    AttentionRow,
    SkipRow,
    attention_row,
    measured_attention_s,
    read_rows,
)
from cost_models.attention import AttentionConstants

OUT = Path(__file__).parents[2] / "cost_models" / "utilization" / "attention.json"
SOURCE = "benchmarks/fit/fit_attention.py on benchmarks/data/micro_attention.csv.gz"

#: Backward over forward FLOP rate: FlashAttention-2 on A100 (196/230), FlashAttention-3
#: on H100 (about 550/650); the same assumed elsewhere.
BACKWARD = {"A100": 0.83, "H100": 0.83, "B200": 0.8}
#: Memory-efficient kernels over flash on Ampere (xFormers/CUTLASS: about half).
EFFICIENT = 0.55

BASE = AttentionConstants(0.6, 0.83, 64, 1, 3, 5, 0.85, 1.5, 2, 1, 0.8, EFFICIENT)
#: name: (low, high), fitted on prefill rows and on decode rows.
PREFILL = {
    "eff": (0.2, 1),
    "ramp": (1, 1500),
    "io": (0.001, 4),
    "floor": (0.5, 12),
    "cache": (0.1, 1),
}
DECODE = {
    "decode_floor": (0.5, 12),
    "mem": (0.3, 1),
    "sm_load": (0.5, 20),
    "combine": (0.01, 20),
    "warm": (0.05, 1),
}


def predict(rows: Sequence[AttentionRow], c: AttentionConstants, warm: float) -> Array:
    return np.array([measured_attention_s(r, c, warm) for r in rows])


def fit_part(
    rows: Sequence[AttentionRow],
    base: AttentionConstants,
    warm: float,
    ranges: dict[str, tuple[float, float]],
    evaluations: int = 500,
) -> tuple[AttentionConstants, float]:
    """Constants named in ``ranges`` fitted on ``rows``, the others kept."""
    real = np.array([r.time_s for r in rows])
    names = list(ranges)
    low, high = (np.array([r[i] for r in ranges.values()]) for i in (0, 1))
    start = np.array([warm if n == "warm" else getattr(base, n) for n in names])

    def unpack(x: Array) -> tuple[AttentionConstants, float]:
        values = dict(zip(names, (float(v) for v in x), strict=True))
        heat = values.pop("warm", warm)
        return replace(base, **values), heat

    def residual(x: Array) -> Array:
        return np.log(predict(rows, *unpack(x)) / real)

    return unpack(fit_constants(residual, start, low, high, evaluations))


def fit(rows: Sequence[AttentionRow], base: AttentionConstants):
    """Constants and warmth of one GPU; splitting without groups is tried both ways."""
    prefill = [r for r in rows if r.sizes[3] > 1]
    decode = [r for r in rows if r.sizes[3] == 1]
    c, warm = fit_part(prefill, base, 0.5, PREFILL) if prefill else (base, 0.5)
    if not decode:
        return c, warm
    tried = [
        fit_part(decode, replace(c, split_mha=s), warm, DECODE) for s in (1.0, 0.0)
    ]
    real = np.array([r.time_s for r in decode])
    return min(
        tried, key=lambda f: float(np.abs(np.log(predict(decode, *f) / real)).mean())
    )


def held_out(rows: Sequence[AttentionRow], key: Callable[[AttentionRow], object]):
    """Error with each value of ``key`` left out in turn."""
    seen: list[Array] = []
    real: list[float] = []
    for value in sorted({str(key(r)) for r in rows}):
        test = [r for r in rows if str(key(r)) == value]
        found = fit([r for r in rows if str(key(r)) != value], BASE)
        seen.append(predict(test, *found))
        real += [r.time_s for r in test]
    return errors(np.concatenate(seen), np.array(real))


def rounded(c: AttentionConstants) -> dict[str, float]:
    return {n: float(f"{v:.4g}") for n, v in asdict(c).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(DATA / "micro_attention.csv.gz"))
    groups: dict[str, list[AttentionRow]] = defaultdict(list)
    for raw in read_rows(parser.parse_args().data):
        try:
            row = attention_row(raw)
        except SkipRow:
            continue
        groups[row.device.family].append(row)
    stored = json.loads(BIAS_FILE.read_text("utf-8"))
    out: list[dict[str, object]] = []
    constants: list[dict[str, float]] = []
    for family, rows in sorted(groups.items()):
        base = replace(BASE, backward=BACKWARD.get(family, BASE.backward))
        c, warm = fit(rows, base)
        real = np.array([r.time_s for r in rows])
        inside = errors(predict(rows, c, warm), real)
        by_heads = held_out(rows, lambda r: r.sizes[1:3])
        print(family, inside, "heads held out", by_heads, "warm", round(warm, 3))
        for phase in (True, False):
            part = [r for r in rows if (r.sizes[3] > 1) is phase]
            took = np.array([r.time_s for r in part])
            name = "  prefill" if phase else "  decode"
            print(name, errors(predict(part, c, warm), took))
        stored[f"attention-warm:{family}"] = {
            "ratio": round(warm, 3),
            "delta_s": 0.0,
            "reason": "decode rows loop over one KV cache; below L2 it is read from L2",
        }
        error = {f"in_sample_{k}": inside[k] for k in ("median_ape", "p90_ape")}
        error |= {f"heads_held_out_{k}": by_heads[k] for k in ("median_ape", "p90_ape")}
        constants.append(rounded(c))
        out.append(
            {
                "family": family,
                "dtype": "fp16",
                "constants": constants[-1],
                "source": f"{SOURCE}; {len(rows)} rows; backward and efficient: papers",
                "error": error,
            }
        )
    middle = {
        n: float(f"{np.median([c[n] for c in constants]):.4g}") for n in constants[0]
    }
    left: dict[str, float] = {}
    for i, (family, rows) in enumerate(sorted(groups.items())):
        rest = [c for j, c in enumerate(constants) if j != i]
        others = {n: float(np.median([c[n] for c in rest])) for n in rest[0]}
        real = np.array([r.time_s for r in rows])
        seen = predict(rows, AttentionConstants(**others), 0.5)
        left[family] = errors(seen, real)["median_ape"]
    print("left out, datasheet fallback:", left)
    out.append(
        {
            "family": "datasheet",
            "dtype": "fp16",
            "constants": middle,
            "source": f"{SOURCE}; median of {', '.join(sorted(groups))}",
            "error": left,
        }
    )
    text = ",\n".join(json.dumps(e) for e in out)
    OUT.write_text(f"[\n{text}\n]\n", "utf-8")
    BIAS_FILE.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
