"""The intra-operator solver on public sharding problems, in their own format.

    python -m benchmarks.sharding FILE.json.gz [--time-limit S]
    python -m benchmarks.sharding --all

The last line on stdout is one JSON document: name, cost, lower_bound, gap, status,
wall_s (reading included), valid. ``--all`` runs the seven problems of
``data/iopddl`` within the time that the contest gave each and adds the best contest
result and the compiler's own solver's. The choice is checked and priced here, in whole
numbers, by code that knows nothing of the solver: node costs plus edge costs, and use
within the limit at every instant over the nodes that live then.

Exit codes: 0 a valid choice; 2 the input is wrong; 3 no choice was found; 4 the choice
does not pass the check.
"""

from __future__ import annotations

import argparse
import csv
import gc
import gzip
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.search.intra_op import Problem, solve

DATA = Path(__file__).parent / "data" / "iopddl"
FORBIDDEN = 10**18  # the format's infinite cost
CONTEST_TIME_S = {"A": 60, "B": 60, "G": 120, "K": 180, "M": 180, "P": 240, "S": 240}
_MARGIN = 0.03  # share of the limit kept for lifting, checking and printing


class InputError(Exception):
    """The file cannot be read as a sharding problem; its text says why."""


@dataclass(frozen=True, slots=True)
class Document:
    """A problem as the file has it, whole numbers throughout.

    ``costs`` and ``usages`` per node; ``edges`` are (i, j, flat row-major matrix)."""

    name: str
    intervals: tuple[tuple[int, int], ...]
    costs: tuple[np.ndarray, ...]
    usages: tuple[np.ndarray, ...]
    edges: tuple[tuple[int, int, np.ndarray], ...]
    usage_limit: int | None


def read(path: Path) -> Document:
    """Reads plain or gzipped JSON; raises :class:`InputError`."""
    gc.disable()  # millions of small objects, none of them garbage
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        body = json.loads(data)["problem"]
        nodes, edges = body["nodes"], body["edges"]
        costs = _arrays(nodes.pop("costs"))
        usages = _arrays(nodes.pop("usages"))
        intervals = tuple((int(s), int(e)) for s, e in nodes["intervals"])
        tables = _arrays(edges.pop("costs"))
        pairs = [(int(i), int(j)) for i, j in edges["nodes"]]
        joined = tuple((i, j, m) for (i, j), m in zip(pairs, tables, strict=True))
        limit = body.get("usage_limit")
        name = str(body.get("name", path.name))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise InputError(f"{path}: no field {error}") from error
    except (ValueError, TypeError, AttributeError, EOFError, OverflowError) as error:
        raise InputError(f"{path}: not a sharding problem ({error})") from error
    finally:
        gc.enable()
    document = Document(name, intervals, costs, usages, joined, limit)
    _check_shapes(document, path)
    return document


def _arrays(lists: list[list[int]]) -> tuple[np.ndarray, ...]:
    out = tuple(np.array(values, dtype=np.int64) for values in lists)
    lists.clear()
    return out


def _check_shapes(document: Document, path: Path) -> None:
    n = len(document.costs)
    if not n == len(document.usages) == len(document.intervals):
        raise InputError(f"{path}: costs, usages and intervals differ in length")
    for i, (c, u) in enumerate(zip(document.costs, document.usages, strict=True)):
        if c.ndim != 1 or c.size == 0 or c.shape != u.shape:
            raise InputError(f"{path}: node {i} needs as many usages as costs")
    for i, j, m in document.edges:
        if not (0 <= i < n and 0 <= j < n):
            raise InputError(f"{path}: edge ({i}, {j}) names a node that is not there")
        if m.size != document.costs[i].size * document.costs[j].size:
            raise InputError(f"{path}: edge ({i}, {j}) has {m.size} costs")


def to_problem(document: Document) -> Problem:
    """The solver's form: costs at or above the format's infinity become inf."""

    def real(values: np.ndarray) -> np.ndarray:
        return np.where(values >= FORBIDDEN, np.inf, values.astype(np.float64))

    costs = [real(c) for c in document.costs]
    edges = [
        (i, j, real(m).reshape(costs[i].size, costs[j].size))
        for i, j, m in document.edges
    ]
    usages = [u.astype(np.float64) for u in document.usages]
    intervals = np.array(document.intervals, dtype=np.int64).reshape(-1, 2)
    return Problem.make(costs, usages, intervals, edges, document.usage_limit)


def check(document: Document, choice: Sequence[int]) -> tuple[int, bool]:
    """Cost of ``choice`` by the format's rule, and whether it is allowed."""
    cost = sum(int(c[x]) for c, x in zip(document.costs, choice, strict=True))
    for i, j, m in document.edges:
        cost += int(m[choice[i] * document.costs[j].size + choice[j]])
    change: dict[int, int] = {}
    for (start, end), u, x in zip(
        document.intervals, document.usages, choice, strict=True
    ):
        if start < end:
            change[start] = change.get(start, 0) + int(u[x])
            change[end] = change.get(end, 0) - int(u[x])
    level = peak = 0
    for instant in sorted(change):
        level += change[instant]
        peak = max(peak, level)
    fits = document.usage_limit is None or peak <= document.usage_limit
    return cost, fits and cost < FORBIDDEN


def run(path: Path, limit_s: float) -> dict[str, Any]:
    """Reads, solves and checks one file within ``limit_s`` wall-clock seconds."""
    start = time.perf_counter()
    document = read(path)
    problem = to_problem(document)
    left = limit_s * (1 - _MARGIN) - (time.perf_counter() - start)
    solution = solve(problem, max(left, 0.0), deterministic=False)
    cost: int | None = None
    valid = False
    if solution.choice is not None:
        cost, valid = check(document, solution.choice.tolist())
    bound = solution.lower_bound
    return {
        "name": document.name,
        "cost": cost,
        "lower_bound": bound if math.isfinite(bound) else None,
        "gap": solution.gap if math.isfinite(solution.gap) else None,
        "status": solution.status,
        "wall_s": round(time.perf_counter() - start, 3),
        "valid": valid,
        "stages": list(solution.stats.get("stages", ())),
        "loadavg": os.getloadavg()[0],
    }


def run_all(folder: Path, limit_s: float | None) -> dict[str, Any]:
    """Runs every problem of ``folder`` that the contest named."""
    with (folder / "contest_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    results: list[dict[str, Any]] = []
    for letter, contest_s in CONTEST_TIME_S.items():
        path = folder / f"asplos-2025-iopddl-{letter}.json.gz"
        row = run(path, limit_s or contest_s)
        costs = {r["team"]: int(r[letter]) for r in rows if r[letter]}
        row["xla_cost"] = costs.pop("XLA", None)
        row["contest_best"] = min(costs.values())
        row["ratio"] = row["cost"] / row["contest_best"] if row["valid"] else None
        results.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    ratios = [r["ratio"] for r in results]
    mean = None
    if all(ratios):
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {
        "geometric_mean_ratio": mean,
        "valid": all(r["valid"] for r in results),
        "problems": results,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding")
    parser.add_argument("file", nargs="?", type=Path, help="a problem, JSON or gzip")
    parser.add_argument("--data", type=Path, help="the same as FILE")
    parser.add_argument("--time-limit", type=float, help="wall-clock seconds (60)")
    parser.add_argument("--all", action="store_true", help="the seven shipped problems")
    options = parser.parse_args(arguments)
    path = options.file or options.data
    limit_s = options.time_limit
    try:
        if limit_s is not None and not 0 < limit_s < math.inf:
            raise InputError("--time-limit must be a positive number of seconds")
        if options.all == (path is not None):
            raise InputError("give one FILE, or --all")
        result = run_all(DATA, limit_s) if options.all else run(path, limit_s or 60.0)
    except (InputError, PlannerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    if result["valid"]:
        return 0
    return 4 if result.get("cost") is not None else 3


if __name__ == "__main__":
    sys.exit(main())
