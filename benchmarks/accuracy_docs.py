"""Writes ``docs/accuracy.md`` from the benchmark's own output.

python -m benchmarks.accuracy --docs docs/accuracy.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import accuracy
from benchmarks.row_models import Graphs

#: The bar of each table: figure, limit.
BARS: Mapping[str, Mapping[str, float]] = {
    "micro_gemm": {"median_ape": 0.08, "p90_ape": 0.25},
    "micro_collectives": {"median_ape": 0.10, "p90_ape": 0.30},
    "micro_attention": {"median_ape": 0.10},
    "micro_conv": {"median_ape": 0.15},
    "micro_layer": {"median_ape": 0.08},
    "train_megatron_ci": {"median_ape": 0.06, "under_3pct_fraction": 0.05},
    "train_llm": {"median_ape": 0.08, "p90_ape": 0.25, "bias": 0.03},
    "train_vision": {"median_ape": 0.12},
}
GROUP_BARS: Mapping[str, Mapping[str, float]] = {
    "ultrascale": {"median_ape": 0.12, "regret_mean": 0.01, "regret_max": 0.05},
    "vtrain-multi": {"median_ape": 0.08, "regret_mean": 0.01, "regret_max": 0.05},
    "vtrain-single": {"median_ape": 0.15, "regret_mean": 0.01, "regret_max": 0.05},
    **{
        name: {"mape": 0.05, "max_ape": 0.12}
        for name in ("megatron-sc21", "korthikanti", "megatron-h100", "nemo-launcher")
    },
}
SHOWN = ("n", "median_ape", "mape", "p90_ape", "max_ape", "bias", "rank_correlation",
         "regret_mean", "regret_max", "under_3pct_fraction")  # fmt: skip
_WORDS = {
    "n": "rows",
    "median_ape": "median error",
    "mape": "mean error",
    "p90_ape": "p90 error",
    "max_ape": "worst",
    "bias": "bias",
    "rank_correlation": "rank",
    "regret_mean": "regret",
    "regret_max": "worst regret",
    "under_3pct_fraction": "under by > 3 %",
}


def _row(name: str, figures: Mapping[str, Any], bars: Mapping[str, float]) -> str:
    cells: list[str] = []
    for column in SHOWN:
        value = figures.get(column)
        if value is None:
            cells.append("")
        elif column == "n":
            cells.append(str(value))
        elif column == "rank_correlation":
            cells.append(f"{value:.3f}")
        else:
            text = f"{100 * value:.1f} %"
            limit = bars.get(column)
            if limit is not None:
                kept = abs(value) <= limit
                text += "" if kept else f" (bar {100 * limit:g} %)"
            cells.append(text)
    return "| " + " | ".join([name, *cells]) + " |"


def _table(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, float]]]) -> str:
    used = [c for c in SHOWN if any(c in figures for _, figures, _ in rows)]
    keep = [SHOWN.index(c) for c in used]
    head = "| | " + " | ".join(_WORDS[c] for c in used) + " |"
    lines = [head, "|---" * (len(used) + 1) + "|"]
    for name, figures, bars in rows:
        cells = [c.strip() for c in _row(name, figures, bars).strip("|").split("|")]
        chosen = [cells[0], *(cells[k + 1] for k in keep)]
        lines.append("| " + " | ".join(chosen) + " |")
    return "\n".join(lines)


def section(table: str, outcome: accuracy.Outcome) -> str:
    """One table's figures, skips and worst rows."""
    document = outcome.document
    rows: list[tuple[str, Mapping[str, Any], Mapping[str, float]]] = [
        ("all", document, BARS.get(table, {}))
    ]
    if table == "train_llm":
        rows[0] = ("A and B without the sweeps", document, BARS[table])
    for name, figures in document["by_group"].items():
        rows.append((name, figures, GROUP_BARS.get(name, {})))
    parts = [f"## {table}", "", _table(rows), ""]
    if table == "train_llm":
        memory = document["memory"]
        limits = {"median_ape": 0.06, "under_3pct_fraction": 0.05}
        groups = [(n, f, {}) for n, f in memory["by_group"].items()]
        parts += ["Memory:", "", _table([("all", memory, limits), *groups]), ""]
    if document["skipped"]:
        parts += ["Not priced:", ""]
        parts += [f"- {reason}" for reason in document["skipped"]] + [""]
    if outcome.worst:
        parts += ["The rows that are furthest off:", "", *_worst(outcome.worst), ""]
    return "\n".join(parts)


def _worst(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| row | what | measured | predicted | why |", "|---|---|---|---|---|"]
    for row in rows[:20]:
        cells = (
            row["id"],
            row.get("what", ""),
            f"{row['measured_s']:.4g} s",
            f"{row['predicted_s']:.4g} s",
            row.get("why", ""),
        )
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return lines


INTRODUCTION = """\
# Accuracy

Predicted against measured times and memory, written by
`python -m benchmarks.accuracy --docs docs/accuracy.md`; do not edit. Errors are of
predicted over measured; the bias is their median; the rank correlation is that of
throughput among plans of one model on one machine, and the regret is how much slower
than the best measured plan the one is that the price would pick. Where a figure misses
its bar, the bar stands beside it.

The constants that training rows fit are in `cost_models/specs/stacks.json` (per
software stack, and sustained clocks per GPU), each with its error and source;
`python -m benchmarks.fit.fit_stacks --hold-out` fits on two thirds of the models and
machines and prints the error on the rest.
"""


def write(path: Path, graphs: Graphs, tables: Sequence[str] = tuple(BARS)) -> None:
    """Prices all tables and writes the page; the hold-out note beside it is kept."""
    parts = [INTRODUCTION]
    note = path.with_name("accuracy-holdout.txt")
    if note.exists():
        parts += ["## Hold-out", "", "```", note.read_text("utf-8").rstrip(), "```", ""]
    for table in tables:
        parts.append(section(table, accuracy.run(table, None, graphs)))
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
