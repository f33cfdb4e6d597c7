"""Fits the constants of ``planner/serving/engines.json``, engine by engine.

    python -m benchmarks.fit.fit_serving [--data FILE] [--holdout] [-o FILE]

A step is linear in an engine's rates, so every row is priced once with unit constants
and the constants are found by least squares on log ratios (soft L1) of time per token,
time to first token and throughput, each engine alone. Constants are physical and
bounded: no product is cheaper than its roofline. A release with enough rows gets
constants of its own, held near its engine's by a prior. ``--holdout``: fits without the
configurations (model, GPU, precision, degrees) whose hash falls in a quarter, and
prints the errors on both sides; nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy_inference import (
    DATA,
    QUANTITIES,
    Figures,
    Steps,
    document,
    figures,
    measured,
    price,
    steps_of,
)
from benchmarks.rows import SkipRowError, read_rows
from benchmarks.serving_rows import Case, case_of
from cost_models.errors import SpecError
from planner.errors import PlannerError
from planner.serving.engines import FITTED, Engine, unfitted
from planner.serving.phases import PARTS, Step

TARGET = Path(__file__).parents[2] / "planner" / "serving" / "engines.json"
#: field: lowest, highest, how far the prior lets it wander (log or linear scale)
BOUNDS = {
    "step_s": (1e-5, 2e-2),
    "sequence_s": (1e-8, 1e-4),
    "launch_s": (1e-8, 1e-4),
    "matrix": (0.02, 6.0),
    "experts": (0.02, 6.0),
    "attention": (0.9, 3.0),
    "comm": (0.2, 4.0),
    "request_s": (1e-4, 1.0),
    "prefill": (0.5, 4.0),
    "burst": (1e-4, 1.0),
    "overlap": (1e-4, 0.95),
    "token_s": (1e-8, 1e-4),
    "wait": (1e-2, 10.0),
}
LEAST_ROWS = 8
#: Pull towards the defaults, and of a release towards its engine.
PRIOR, RELEASE_PRIOR = 0.3, 1.0
RELEASE_ROWS = 20
#: A row of a quantity that makes fewer rows counts more, to at most this.
MOST_WEIGHT = 3.0
PART_RATE = {
    "products_over": "matrix",
    "experts_over": "experts",
    "attention": "attention",
    "pointwise": "stream",
    "tp_comm": "comm",
    "ep_comm": "comm",
    "host": "launch_s",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A case with its steps at unit constants."""

    case: Case
    steps: Steps
    seen: dict[str, float]


def unit(engine: Engine) -> Engine:
    return replace(
        engine, step_s=0.0, sequence_s=0.0, launch_s=1.0, matrix=1.0, experts=1.0,
        attention=1.0, stream=1.0, comm=1.0,
    )  # fmt: skip


def facts(rows: Sequence[dict[str, str]]) -> dict[str, list[Fact]]:
    """Rows of quality A and B by engine."""
    found: dict[str, list[Fact]] = defaultdict(list)
    for row in rows:
        if row["quality"] not in ("A", "B"):
            continue
        try:
            case = case_of(row)
            steps = steps_of(case, unit(unfitted(case.family)))
        except (SkipRowError, SpecError, PlannerError):
            continue
        found[case.family].append(Fact(case, steps, measured(case)))
    return found


def rescaled(step: Step, engine: Engine, pp: int, sequences: float) -> Step:
    """A unit step with an engine's constants."""
    host = engine.step_s + engine.sequence_s * sequences
    parts = {
        name: value * (getattr(engine, PART_RATE[name]) if name in PART_RATE else 1.0)
        for name, value in step.parts
    }
    stage = sum(parts.values())
    parts["host"] += host
    return replace(
        step,
        parts=tuple((name, parts[name]) for name in PARTS),
        latency_s=stage * pp + host,
    )


def quick(fact: Fact, engine: Engine) -> Figures:
    c, s = fact.case, fact.steps
    decode = rescaled(s.decode, engine, c.pp, c.batch / s.waves)
    prefill = rescaled(s.prefill, engine, c.pp, s.prompts)
    return figures(c, replace(s, decode=decode, prefill=prefill), engine)


def fit_engine(
    name: str, known: Sequence[Fact], base: Engine, prior: float
) -> dict[str, Any]:
    """Constants of one engine or release, with rows and error; ``prior`` pulls towards
    ``base``."""
    names = list(FITTED)
    low = np.log([BOUNDS[n][0] for n in names])
    high = np.log([BOUNDS[n][1] for n in names])
    start = np.clip(
        np.log([max(getattr(base, n), BOUNDS[n][0]) for n in names]), low, high
    )
    counts = {q: sum(q in f.seen for f in known) for q in QUANTITIES}
    most = max(counts.values())
    weight = {
        q: min(MOST_WEIGHT, (most / n) ** 0.5) if n else 0.0 for q, n in counts.items()
    }

    def engine_of(x: np.ndarray) -> Engine:
        values = np.exp(x)
        return replace(
            base, **{n: float(v) for n, v in zip(names, values, strict=True)}
        )

    def residuals(x: np.ndarray) -> np.ndarray:
        engine = engine_of(x)
        out: list[float] = []
        for fact in known:
            found = quick(fact, engine)
            values = {
                "tpot": found.tpot_s,
                "ttft": found.ttft_s,
                "throughput": found.tokens_per_s,
            }
            for quantity in QUANTITIES:
                if quantity in fact.seen:
                    ratio = values[quantity] / fact.seen[quantity]
                    out.append(weight[quantity] * float(np.log(ratio)))
        out.extend(prior * (x - start))
        return np.array(out)

    found = least_squares(
        residuals, start, bounds=(low - 1e-9, high + 1e-9), loss="soft_l1",
        f_scale=0.1, max_nfev=60,
    )  # fmt: skip
    engine = engine_of(found.x)
    errors = np.abs(np.expm1(np.abs(residuals(found.x)[: -len(names)])))
    return {
        "values": {n: float(f"{getattr(engine, n):.4g}") for n in names},
        "rows": len(known),
        "median_error": float(f"{np.median(errors):.3g}"),
        "source": "benchmarks/fit/fit_serving.py on inference.csv",
    }


def held_out(case: Case) -> bool:
    key = (
        f"{case.key}{case.weights}{case.tp}{case.pp}{case.ep}{case.attention_dp}"
        f"{case.engine}"
    )
    return hashlib.sha256(key.encode()).digest()[0] < 64


def fit(by_engine: dict[str, list[Fact]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in sorted(by_engine):
        known = by_engine[name]
        if len(known) < LEAST_ROWS:
            continue
        base = unfitted(name)
        result[name] = fit_engine(name, known, base, PRIOR)
        print(name, result[name], file=sys.stderr)
        family = replace(base, **result[name]["values"])
        for release in sorted({f.case.engine for f in known} - {name}):
            mine = [f for f in known if f.case.engine == release]
            if len(mine) >= RELEASE_ROWS:
                result[release] = fit_engine(release, mine, family, RELEASE_PRIOR)
    return result


def show(title: str, doc: dict[str, Any]) -> None:
    for quantity in QUANTITIES:
        f = doc[quantity]
        if f["n"]:
            print(
                f"{title:9s} {quantity:10s} n {f['n']:5d} median {f['median_ape']:.3f} "
                f"p90 {f['p90_ape']:.3f} bias {f['bias']:+.3f} "
                f"rank {f['rank_correlation'] or 0:.3f}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--holdout", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=TARGET)
    chosen = parser.parse_args(argv)
    rows = read_rows(chosen.data)
    by_engine = facts(rows)
    if not chosen.holdout:
        text = json.dumps(fit(by_engine), indent=1, sort_keys=True)
        chosen.output.write_text(text + "\n", encoding="utf-8")
        return
    kept = {
        name: [f for f in found if not held_out(f.case)]
        for name, found in by_engine.items()
    }
    values = fit(kept)
    known = {f.case.name: f for found in by_engine.values() for f in found}

    def predict(case: Case) -> Figures:
        entry = values.get(case.engine) or values.get(case.family)
        engine = unfitted(case.family)
        if entry:
            engine = replace(engine, **entry["values"])
        return figures(case, steps_of(case, engine), engine)

    results, skipped = price([r for r in rows if r["id"] in known], predict)
    for title, side in (("fitted", False), ("held out", True)):
        mine = [r for r in results if held_out(r.case) is side]
        show(title, document(mine, skipped))


if __name__ == "__main__":
    main()
