"""Predicted against measured, table by table.

    python -m benchmarks.accuracy --table train_llm --data FILE.csv[.gz] [--plot P.svg]

A table of errors by source goes to stderr; one JSON document comes last, on stdout: n,
skipped (with the reasons), mape, median_ape, p90_ape, bias, rank_correlation, and the
same by group; train_llm has memory figures beside the times, its sweeps have regret.
Without ``--data`` the rows kept in the project are priced. ``--docs FILE`` rewrites the
accuracy page from all tables.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import (
    accuracy_collectives,
    accuracy_kernels,
    accuracy_memory,
    accuracy_train,
    accuracy_vision,
    kernel_rows,
)
from benchmarks.row_models import Graphs
from benchmarks.scatter import Point, save

DATA = Path(__file__).parent / "data"
Document = dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """The JSON document, the points of the plot and the worst rows."""

    document: Document
    points: list[Point] = field(default_factory=lambda: [])
    worst: Sequence[Mapping[str, Any]] = ()


def _kernels(table: str, path: Path, _: Graphs) -> Outcome:
    rows = kernel_rows.read_rows(path)
    document = accuracy_kernels.evaluate(table, rows)
    worst = document.pop("worst")
    report = accuracy_kernels.price_rows(table, rows)
    points = [(r.groups[0], r.predicted_s, r.measured_s) for r in report.results]
    return Outcome(document, points, worst)


def _collectives(_: str, path: Path, __: Graphs) -> Outcome:
    rows = accuracy_collectives.read_rows(path)
    points: list[Point] = []
    for row in rows:
        try:
            case = accuracy_collectives.case_of(row)
        except accuracy_collectives.CanNotPriceError:
            continue
        predicted = accuracy_collectives.predict_s(case)
        points.append((case.op, predicted, case.measured_s))
    return Outcome(accuracy_collectives.evaluate(rows), points)


def _megatron_ci(_: str, path: Path, __: Graphs) -> Outcome:
    """Memory only: times of these launch-bound, deterministic runs say little."""
    found = accuracy_memory.evaluate(accuracy_memory.read_rows(path))
    by_group = found.pop("by_group")
    skipped = found.pop("skipped")
    return Outcome({**found, "skipped": skipped, "memory": found, "by_group": by_group})


def _llm(_: str, path: Path, graphs: Graphs) -> Outcome:
    rows = accuracy_train.rows_of(path)
    document, report = accuracy_train.evaluate(rows, graphs)
    good = [r for r in report.results if r.case.quality in ("A", "B")]
    points = [(r.case.group, r.predicted_s, r.case.measured_s) for r in good]
    return Outcome(document, points, accuracy_train.worst(good))


def _vision(_: str, path: Path, graphs: Graphs) -> Outcome:
    rows = accuracy_train.rows_of(path)
    document, results = accuracy_vision.evaluate(rows, graphs)
    points = [(r.source, r.predicted_s, r.measured_s) for r in results]
    return Outcome(document, points, accuracy_vision.worst(results))


def _inference(table: str, path: Path, graphs: Graphs) -> Outcome:
    module = importlib.import_module("benchmarks.accuracy_inference")
    document = module.evaluate(accuracy_train.rows_of(path))
    return Outcome(document)


TABLES: Mapping[str, Callable[[str, Path, Graphs], Outcome]] = {
    "micro_gemm": _kernels,
    "micro_attention": _kernels,
    "micro_conv": _kernels,
    "micro_layer": _kernels,
    "micro_collectives": _collectives,
    "train_megatron_ci": _megatron_ci,
    "train_llm": _llm,
    "train_vision": _vision,
    "inference": _inference,
}

COLUMNS = ("n", "median_ape", "mape", "p90_ape", "bias", "rank_correlation",
           "regret_mean", "regret_max")  # fmt: skip


def table_text(document: Document) -> str:
    """Rows of figures: all rows first, then by group."""
    rows: list[tuple[str, Mapping[str, Any]]] = [("all", document)]
    rows += list(document.get("by_group", {}).items())
    if "memory" in document and document["memory"] is not document:
        rows.append(("memory", document["memory"]))
    width = max(len(name) for name, _ in rows)
    lines = [" ".join([" " * width, *(f"{c:>17s}" for c in COLUMNS)])]
    for name, figures in rows:
        cells = [f"{_cell(figures.get(c)):>17s}" for c in COLUMNS]
        lines.append(" ".join([name.ljust(width), *cells]))
    lines += [f"skipped: {reason}" for reason in document.get("skipped", ())]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def run(table: str, path: Path | None, graphs: Graphs) -> Outcome:
    """Prices one table's rows."""
    return TABLES[table](table, path or DATA / f"{table}.csv.gz", graphs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=sorted(TABLES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of predicted over measured")
    parser.add_argument("--docs", type=Path, help="write the page of all tables here")
    parser.add_argument("--graphs", type=Path, help="folder that keeps traced models")
    args = parser.parse_args(argv)
    graphs = Graphs(args.graphs)
    if args.docs:
        docs = importlib.import_module("benchmarks.accuracy_docs")
        docs.write(args.docs, graphs)
        return
    if not args.table:
        parser.error("--table is needed")
    outcome = run(args.table, args.data, graphs)
    print(table_text(outcome.document), file=sys.stderr)
    if args.plot:
        save(args.plot, outcome.points, f"{args.table}: predicted and measured")
    print(json.dumps(outcome.document))


if __name__ == "__main__":
    main()
