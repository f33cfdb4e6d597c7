"""Commands that run a plan: audit on paper, validate under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli_io import CHECK_FAILED, print_json, say, show
from planner.cli_options import AsJson, PlanFile
from planner.errors import PlannerError


def audit(
    plan_file: PlanFile,
    rank: Annotated[int, typer.Option("--rank", "-r", help="Which rank to run.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Run one step of a rank without GPUs; exit code 4 if it does not issue the plan.

    The rank runs on a fake process group of the plan's size, on tensors without data.
    """
    from dataclasses import asdict

    from planner.plan import load_document
    from planner.runtime.audit import audit as run

    found = run(load_document(plan_file), rank)
    if as_json:
        rows = [{**asdict(r), "differs": r.differs} for r in found.rows]
        print_json({**asdict(found), "rows": rows, "ok": found.ok})
    else:
        show(found.text())
    if not found.ok:
        say(f"error: rank {rank} differs from {plan_file}")
        return CHECK_FAILED
    return 0


def validate(
    plan_file: PlanFile,
    steps: Annotated[int, typer.Option("--steps", help="Measured steps.")] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that a rank waits for another.")
    ] = 120.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the JSON here too.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a plan under torchrun: parity, then time and memory beside the prediction.

    Start it as `torchrun --nproc-per-node N -m planner validate plan.json`; exit code 4
    if the numbers are not those of one process.
    """
    import json

    from planner.plan import load_document, write_atomic
    from planner.runtime.validate import run

    if steps < 1:
        raise PlannerError("steps must be at least 1", steps)
    report = run(load_document(plan_file), steps=steps, timeout_s=timeout)
    if report is None:
        return 0  # another rank reports
    if output is not None:
        write_atomic(output, json.dumps(report.data(), indent=2, sort_keys=True))
    if as_json:
        print_json(report.data())
    else:
        show(report.text())
    if not report.ok:
        say(f"error: {report.failure}")
        return CHECK_FAILED
    return 0
