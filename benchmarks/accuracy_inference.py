"""Serving: predicted against measured time per token, time to first token, throughput.

Rows of quality A and B make the figures; rank correlation is Spearman's within each
(model, GPU), averaged over groups of five rows or more. ``evaluate(rows)`` is what
``benchmarks.accuracy --table inference`` prints.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rows import SkipRowError, read_rows
from benchmarks.serving_rows import Case, case_of
from cost_models.errors import SpecError
from cost_models.hardware import parse_cluster
from planner.errors import PlannerError
from planner.serving.dims import Dims, serving_model
from planner.serving.engines import Engine, load_engine
from planner.serving.kv_cache import Formats
from planner.serving.model import ServingModel
from planner.serving.phases import Layout, Pricer, Step, closed_loop

DATA = Path(__file__).parent / "data" / "inference.csv.gz"
QUANTITIES = ("tpot", "ttft", "throughput")
CHUNK_TOKENS = 8192


@lru_cache(maxsize=64)
def _model(dims: Dims) -> ServingModel:
    return serving_model(dims)


@lru_cache(maxsize=512)
def _pricer(
    dims: Dims, cluster: str, engine: Engine, weights: str, group: int, math8: bool
) -> Pricer:
    formats = Formats(weights, "bf16", group, math8)
    return Pricer(_model(dims), parse_cluster(cluster), engine, formats)


def pricer_of(case: Case, engine: Engine | None = None) -> Pricer:
    return _pricer(
        case.dims, case.cluster, engine or load_engine(case.engine), case.weights,
        case.group, case.eight_bit_math,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that make a case's figures."""

    decode: Step
    prefill: Step  # of one chunk
    prompts: int  # prompts in that chunk
    waves: int


def steps_of(case: Case, engine: Engine | None = None) -> Steps:
    pricer = pricer_of(case, engine)
    layout = Layout(case.tp, case.pp, case.ep, case.attention_dp)
    waves = min(case.pp, case.batch)
    decode = pricer.decode(layout, case.batch / waves, case.isl + case.osl // 2)
    prompts = 1
    if not case.mode.startswith("serving"):
        prompts = max(1, min(case.batch, CHUNK_TOKENS // max(1, case.isl)))
    prefill = pricer.prefill(layout, prompts, max(1, case.isl))
    return Steps(decode, prefill, prompts, waves)


@dataclass(frozen=True, slots=True)
class Figures:
    """Predicted seconds and tokens per second."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    latency_s: float


def figures(case: Case, steps: Steps, engine: Engine) -> Figures:
    """What ``planner.serving`` says of the case: a closed loop of ``batch`` requests
    (serving), or one static batch."""
    passing = max(steps.decode.latency_s, steps.waves * steps.decode.seconds)
    chunk = steps.prefill.latency_s * engine.prefill
    if case.mode.startswith("serving"):
        ttft, tpot = closed_loop(
            steps.decode, steps.prefill, case.batch, steps.waves, case.isl, case.osl,
            engine,
        )  # fmt: skip
        rate = case.batch / tpot
        return Figures(ttft, tpot, rate, ttft + case.osl * tpot)
    chunks = case.batch / steps.prompts
    ttft = engine.request_s + chunk * chunks
    if case.mode == "forward":
        return Figures(ttft, passing, 0.0, ttft)
    latency = ttft + max(0, case.osl - 1) * passing
    return Figures(ttft, passing, case.batch * case.osl / latency, latency)


def predict(case: Case) -> Figures:
    engine = load_engine(case.engine)
    return figures(case, steps_of(case), engine)


def measured(case: Case) -> dict[str, float]:
    """Quantity to measured value (seconds, tokens per second)."""
    found: dict[str, float] = {}
    if case.tpot_s:
        found["tpot"] = case.tpot_s
    if case.ttft_s:
        found["ttft"] = case.ttft_s
    if case.tokens_per_s and case.mode != "decode":
        found["throughput"] = case.tokens_per_s
    elif case.latency_s and case.mode == "forward":
        found["ttft"] = case.latency_s
    elif case.latency_s and case.osl:
        found["throughput"] = case.batch * case.osl / case.latency_s
    return found


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    predicted: dict[str, float]
    measured: dict[str, float]

    def error(self, quantity: str) -> float:
        return self.predicted[quantity] / self.measured[quantity] - 1


def price(
    rows: Sequence[Mapping[str, str]],
    predicting: Callable[[Case], Figures] = predict,
) -> tuple[list[Result], Counter[str]]:
    """Priced rows, and reasons of those that are not."""
    results: list[Result] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            case = case_of(row)
            found = predicting(case)
        except SkipRowError as error:
            skipped[str(error)] += 1
            continue
        except (SpecError, PlannerError) as error:
            skipped[f"{error.what}: {error.value}"] += 1
            continue
        predicted = {
            "tpot": found.tpot_s,
            "ttft": found.ttft_s,
            "throughput": found.tokens_per_s,
        }
        results.append(Result(case, predicted, measured(case)))
    return results, skipped


def summary(results: Sequence[Result], quantity: str) -> dict[str, Any]:
    kept = [r for r in results if quantity in r.measured]
    if not kept:
        return {"n": 0}
    errors = [r.error(quantity) for r in kept]
    sizes = sorted(abs(e) for e in errors)
    ranks = rank_by_group(kept, quantity)
    return {
        "n": len(kept),
        "median_ape": median(sizes),
        "mape": sum(sizes) / len(sizes),
        "p90_ape": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "bias": median(errors),
        "rank_correlation": ranks[0],
        "rank_correlation_worst": ranks[1],
    }


def rank_by_group(
    results: Sequence[Result], quantity: str
) -> tuple[float | None, float | None]:
    """Mean (by rows) and least Spearman correlation within (model, GPU)."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for r in results:
        groups[r.case.key].append((r.predicted[quantity], r.measured[quantity]))
    found = [
        (len(pairs), spearman(pairs)) for pairs in groups.values() if len(pairs) >= 5
    ]
    if not found:
        return None, None
    total = sum(n for n, _ in found)
    return sum(n * c for n, c in found) / total, min(c for _, c in found)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            ranks[i] = (start + stop - 1) / 2
        start = stop
    return ranks


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of pairs; 0 where one side is constant."""
    a, b = _ranks([p for p, _ in pairs]), _ranks([m for _, m in pairs])
    mean = (len(a) - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    left = sum((x - mean) ** 2 for x in a)
    right = sum((y - mean) ** 2 for y in b)
    return top / (left * right) ** 0.5 if left and right else 0.0


def document(results: Sequence[Result], skipped: Counter[str]) -> dict[str, Any]:
    good = [r for r in results if r.case.quality in ("A", "B")]
    by_engine: dict[str, Any] = {}
    for name in sorted({r.case.family for r in good}):
        mine = [r for r in good if r.case.family == name]
        for quantity in QUANTITIES:
            figures_ = summary(mine, quantity)
            if figures_["n"]:
                by_engine[f"{name}/{quantity}"] = figures_
    pooled = {q: summary(good, q) for q in QUANTITIES}
    top = pooled["tpot"]
    return {
        **top,
        "n": len(good),
        "skipped": [f"{n} rows: {reason}" for reason, n in skipped.most_common()],
        **pooled,
        "by_group": by_engine,
    }


def evaluate(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The JSON document: time per token on top, each quantity under its name."""
    return document(*price(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args(argv)
    print(json.dumps(evaluate(read_rows(chosen.data)), indent=1))


if __name__ == "__main__":
    main()
