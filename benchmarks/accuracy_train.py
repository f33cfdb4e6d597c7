"""Predicted against measured step time: the tables ``train_llm`` and ``train_vision``.

Rows become a model, a cluster and a layout (:mod:`benchmarks.rows`); the price is the
product's own (:func:`planner.api.price_configuration`, which ``predict`` calls). Memory
figures of the same rows come from :mod:`benchmarks.accuracy_memory`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import accuracy_memory
from benchmarks.row_models import Graphs
from benchmarks.rows import Case, Row, SkipRowError, case_of, read_rows
from cost_models.errors import SpecError
from cost_models.hardware import ClusterSpec, parse_cluster
from cost_models.stacks import StackProfile, load_stack
from passes.errors import PassError
from passes.ir import OpGraph
from planner.api import price_configuration
from planner.errors import PlannerError
from planner.search.job import Job, Priced

#: Sweeps of many plans of one model: apart from the pooled figures, with regret.
SWEEPS = ("ultrascale", "vtrain-multi", "vtrain-single")
POOLED_QUALITY = ("A", "B")
Stacks = Callable[[str], StackProfile]


@dataclass(frozen=True, slots=True)
class Result:
    """One priced row; ``terms``: predicted seconds by cause."""

    case: Case
    predicted_s: float
    terms: Mapping[str, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.case.measured_s - 1


@dataclass(slots=True)
class Report:
    """Priced rows and the reasons of those that are not."""

    results: list[Result] = field(default_factory=lambda: [])
    skipped: list[tuple[str, str, str]] = field(default_factory=lambda: [])


class RowPricer:
    """Prices cases; jobs are shared by rows of one model, machine and stack."""

    def __init__(self, graphs: Graphs, stacks: Stacks = load_stack) -> None:
        self.graphs, self.stacks = graphs, stacks
        self._jobs: dict[tuple[object, ...], Job] = {}
        self._clusters: dict[tuple[tuple[str, Any], ...], ClusterSpec] = {}

    def cluster(self, case: Case) -> ClusterSpec:
        if case.cluster not in self._clusters:
            self._clusters[case.cluster] = parse_cluster(dict(case.cluster))
        return self._clusters[case.cluster]

    def stack(self, case: Case) -> StackProfile:
        stack = self.stacks(case.stack)
        if stack.attention_kernel != case.attention:
            stack = replace(stack, attention_kernel=case.attention)
        return stack

    def job(self, case: Case) -> Job:
        cluster, stack = self.cluster(case), self.stack(case)
        key = (case.spec, case.cluster, stack, case.precision, case.recipe)
        if key not in self._jobs:

            def at_cp(cp: int) -> OpGraph:
                return self.graphs.at_cp(case.spec, cp)

            self._jobs[key] = Job(
                self.graphs.get(case.spec),
                cluster,
                stack,
                precision=case.precision,
                optimizer=case.optimizer,
                recipe=case.recipe,
                graph_at_cp=at_cp,
            )
        return self._jobs[key]

    def price(self, case: Case) -> Priced:
        """Raises PlannerError, SpecError or PassError where it has no price."""
        return price_configuration(self.job(case), case.parallelism)


TERMS = (
    "compute",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "dp_comm_exposed",
    "pp_p2p",
    "pp_bubble",
    "recompute",
    "optimizer",
    "launch",
)


def price_rows(rows: Iterable[Row], pricer: RowPricer) -> Report:
    """Every row priced or skipped with its reason."""
    report = Report()
    for row in rows:
        try:
            case = case_of(row)
            priced = pricer.price(case)
        except SkipRowError as reason:
            report.skipped.append((row["id"], row["quality"] or "A", str(reason)))
            continue
        except (PlannerError, SpecError, PassError) as error:
            why = f"{row['config_group']}: {error.what}"
            report.skipped.append((row["id"], row["quality"] or "A", why))
            continue
        terms = {name: getattr(priced.terms, name) for name in TERMS}
        report.results.append(Result(case, priced.terms.total_s, terms))
    return report


# --- figures ----------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks with ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def rank_correlation(predicted: np.ndarray, measured: np.ndarray) -> float | None:
    """Spearman's, None below three rows or without spread."""
    if len(measured) < 3 or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
        return None
    return float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1])


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """n, mape, median_ape, p90_ape, bias (median error); rank_correlation is the mean
    inside groups of one model, GPU and count (throughput by plan)."""
    if not results:
        return {"n": 0}
    error = np.array([r.error for r in results])
    ape = np.abs(error)
    found: dict[str, Any] = {
        "n": len(results),
        "mape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "max_ape": round(float(ape.max()), 4),
        "bias": round(float(np.median(error)), 4),
    }
    inside = [rank_of(part) for part in by_model(results)]
    known = [(x, n) for x, n in inside if x is not None]
    if known:
        weight = sum(n for _, n in known)
        mean = sum(x * n for x, n in known) / weight
        found["rank_correlation"] = round(mean, 4)
    return found


def by_model(results: Sequence[Result]) -> list[list[Result]]:
    """Rows of one model, GPU and number of GPUs."""
    groups: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for r in results:
        groups[r.case.model_key].append(r)
    return list(groups.values())


def rank_of(part: Sequence[Result]) -> tuple[float | None, int]:
    """Rank correlation of tokens per second, and the number of rows."""
    tokens = np.array([r.case.tokens_per_step for r in part])
    predicted = tokens / np.array([r.predicted_s for r in part])
    measured = tokens / np.array([r.case.measured_s for r in part])
    return rank_correlation(predicted, measured), len(part)


def regrets(results: Sequence[Result]) -> list[float]:
    """Per model and GPUs: measured time per token of the plan that the price picks over
    the best measured, less one."""
    found: list[float] = []
    for part in by_model(results):
        if len(part) < 3:
            continue
        best = min(r.case.measured_s / r.case.tokens_per_step for r in part)
        chosen = min(part, key=lambda r: r.predicted_s / r.case.tokens_per_step)
        found.append(chosen.case.measured_s / chosen.case.tokens_per_step / best - 1)
    return found


def with_regret(results: Sequence[Result]) -> dict[str, Any]:
    """Figures of a sweep."""
    found, regret = figures(results), regrets(results)
    if regret:
        found["regret_mean"] = round(float(np.mean(regret)), 4)
        found["regret_max"] = round(float(np.max(regret)), 4)
    return found


def evaluate(
    rows: Sequence[Row], graphs: Graphs, stacks: Stacks = load_stack
) -> tuple[dict[str, Any], Report]:
    """The document of ``train_llm`` and the priced rows behind it."""
    report = price_rows(rows, RowPricer(graphs, stacks))
    good = [r for r in report.results if r.case.quality in POOLED_QUALITY]
    pooled = [r for r in good if r.case.group not in SWEEPS]
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in good:
        groups[r.case.group].append(r)
        groups[f"gpu:{r.case.gpu}"] += [] if r.case.group in SWEEPS else [r]
    by_group = {
        name: (with_regret if name in SWEEPS else figures)(part)
        for name, part in sorted(groups.items())
        if part
    }
    reasons = Counter(f"{q}: {why}" for _, q, why in report.skipped)
    quality_a = sum((row["quality"] or "A") == "A" for row in rows)
    skipped_a = sum(q == "A" for _, q, _ in report.skipped)
    return {
        **figures(pooled),
        "skipped": [f"{n} x {why}" for why, n in sorted(reasons.items())],
        "skipped_quality_a_fraction": round(skipped_a / max(1, quality_a), 4),
        "memory": accuracy_memory.evaluate(rows),
        "by_group": by_group,
    }, report


def worst(results: Sequence[Result], count: int = 20) -> list[dict[str, Any]]:
    """The rows that are furthest off, with the largest term of the prediction."""
    chosen = sorted(results, key=lambda r: -abs(r.error))[:count]
    return [
        {
            "id": r.case.id,
            "group": r.case.group,
            "what": describe(r.case),
            "measured_s": r.case.measured_s,
            "predicted_s": r.predicted_s,
            "why": reason_of(r.case, r.terms, r.error),
            "terms": {k: v for k, v in r.terms.items() if v > 0.05 * r.predicted_s},
        }
        for r in chosen
    ]


def reason_of(case: Case, terms: Mapping[str, float], error: float) -> str:
    """Why a row is far off, as far as the row and its price say it."""
    shape = case.parallelism
    per_node = dict(case.cluster).get("gpus_per_node", shape.tp)
    if shape.tp > per_node:
        return "tensor parallelism over nodes: beyond what the stack's constants cover"
    if not case.micro_batch_given:
        return "the source does not state micro-batch, chunks or recompute"
    if case.group == "ultrascale" and error < -0.4:
        return (
            "measured far slower than the price, not explained (most 512-GPU runs are)"
        )
    if case.spec.experts:
        return "experts: routing, permutation and all-to-all, and releases that differ"
    if case.group in SWEEPS and case.measured_s < 0.5:
        return "a short step: host time decides"
    largest = max(terms, key=lambda k: terms[k])
    return f"mostly {largest.replace('_', ' ')}; no single cause found"


def describe(case: Case) -> str:
    """Short text of a row: model, GPUs, layout."""
    shape = case.parallelism
    return (
        f"{case.model_name} on {case.num_gpus} {case.gpu}, {shape.label()}, "
        f"{case.precision}, {case.spec.seq_len} tokens"
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """Rows of the table's file."""
    return read_rows(path)
