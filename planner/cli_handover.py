"""Commands that explain a plan and hand it on: explain, diff, report, trace, export;
and what ``predict --from`` and ``optimize --compare-to`` read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli_io import print_json, progress, say, show
from planner.cli_options import AsJson, PlanFile, Quiet
from planner.errors import PlannerError
from planner.workload import Training

if TYPE_CHECKING:
    from planner.importers import Imported
    from planner.plan import Plan
    from planner.plan.documents import Document


def explain(
    plan_file: PlanFile,
    op: Annotated[
        str | None,
        typer.Option(
            "--op", help="One op: its placement, price, and its other placements'."
        ),
    ] = None,
    reprice: Annotated[
        bool | None,
        typer.Option(
            "--reprice/--no-reprice",
            help="Price the model again to say what more hardware would buy (default: "
            "where the model has a name).",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Say in words why a plan (or a prediction) is as it is."""
    from planner.explain import explain as sections_of
    from planner.explain import gain_section, op_sections, render
    from planner.plan import load_document

    document = load_document(plan_file)
    nameless = document.model.source.startswith("object:")
    trains = document.workload.kind == "training"
    with progress(quiet) as report:
        report("pricing the model again")
        if op is not None:
            sections = op_sections(document, op)
        else:
            sections = sections_of(document)
            if reprice or (reprice is None and not nameless and trains):
                sections = (*sections, gain_section(document))
    if as_json:
        print_json({s.title: list(s.lines) for s in sections})
    else:
        show(render(sections))
    return 0


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan or prediction.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> int:
    """Compare two plans term by term: A, B and what B changes."""
    from planner.diff import diff as compare
    from planner.diff import render
    from planner.plan import load_document

    sections = compare(load_document(first), load_document(second))
    if as_json:
        print_json(
            {
                section.title: [
                    {"name": r.name, "a": r.a, "b": r.b, "change": r.change}
                    for r in section.rows
                ]
                for section in sections
            }
        )
    else:
        show(render(sections, str(first), str(second)))
    return 0


def report(
    plan_file: PlanFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Write the HTML page here.")
    ] = Path("report.html"),
    reprice: Annotated[
        bool,
        typer.Option(
            "--reprice/--no-reprice",
            help="Price the ops again from the model, for the roofline.",
        ),
    ] = True,
) -> int:
    """Write one self-contained HTML page that opens offline."""
    from planner.plan import load_document
    from planner.plan.documents import write_atomic
    from planner.report.html import page

    _check_output(output)
    text = page(load_document(plan_file), reprice=reprice)
    write_atomic(output, text)
    show(f"wrote {output} ({len(text.encode()) / 1e6:.2f} MB)")
    return 0


def trace(
    plan_file: PlanFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Write the timeline here.")
    ] = Path("timeline.json"),
) -> int:
    """Write the step's timeline for ui.perfetto.dev or chrome://tracing."""
    from planner.plan import load_document
    from planner.plan.documents import write_atomic
    from planner.report.perfetto import trace_json

    _check_output(output)
    document = load_document(plan_file)
    write_atomic(output, trace_json(document))
    show(f"wrote {output}: open it at ui.perfetto.dev")
    return 0


def export(
    plan_file: PlanFile,
    to: Annotated[
        str | None,
        typer.Option("--to", help="The target; without it the targets are listed."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write into this folder.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write a plan in another framework's words, and say what it can not say."""
    from planner.export import export as write
    from planner.export import targets
    from planner.plan import load_plan

    if to is None:
        show("\n".join(f"{name:<13} {what}" for name, what in targets()))
        return 0
    found = write(load_plan(plan_file), to)
    written = found.write(output) if output is not None else ()
    if as_json:
        print_json(
            {
                "target": found.target,
                "files": dict(found.files),
                "written": [str(p) for p in written],
                "gaps": [{"what": g.what, "instead": g.instead} for g in found.gaps],
                "notes": list(found.notes),
                "command": found.command,
            }
        )
        return 0
    if output is None:
        show("\n".join(f"# {name}\n{text}" for name, text in found.files))
        show(found.readme())
    else:
        show(found.readme())
        show("wrote " + ", ".join(map(str, written)))
    return 0


def _check_output(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PlannerError(
            "can not write there", path, "give a file in a folder that exists"
        )


# ---- what a team runs today ------------------------------------------------------


def imported(path: Path, cluster: str, format: str | None = None) -> Imported:
    """The configuration in a file of another framework; says what was not read."""
    from cost_models.hardware import parse_cluster
    from planner.importers import read

    found = read(path, parse_cluster(cluster).num_gpus, format)
    if found.ignored:
        say(f"note: not read from {path}: {', '.join(found.ignored)}")
    return found


def filled(workload: Training, found: Imported) -> Training:
    """The workload with what the file says where the command line does not."""
    return replace(
        workload,
        global_batch=workload.global_batch or found.global_batch,
        seq_len=workload.seq_len or found.seq_len,
        precision=found.precision or workload.precision,
    )


def today(path: Path, model: str, cluster: str, workload: Training) -> Document:
    """The price of the plan or configuration in ``path`` for the same job."""
    from planner.api import predict
    from planner.plan import load_document

    if path.suffix.lower() == ".json" and _is_document(path):
        return load_document(path)
    found = imported(path, cluster)
    job = replace(workload, global_batch=workload.global_batch or found.global_batch)
    return predict(model, cluster, job, found.parallelism)


def _is_document(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'"schema_version"' in file.read(64 * 2**20)
    except OSError as error:
        raise PlannerError(
            f"can not read the file ({error.strerror})", path, "give another path"
        ) from error


def gain(plan: Plan, today: Document) -> str:
    """What the plan gains over ``today``, and the terms that make it."""
    from planner.diff import diff as compare
    from planner.diff import render as text

    now, then = today.estimate.step_time_s, plan.estimate.step_time_s
    worst = max(m.total_bytes - m.limit_bytes for m in today.estimate.memory_per_stage)
    fits = "" if worst <= 0 else f" (but misses the memory by {worst / 2**30:.1f} GiB)"
    head = f"\nagainst {today.parallelism.label()}{fits}: {now / then:.3g} x as fast\n"
    return head + text(compare(today, plan), "what you gave", "the plan")


def both_json(plan: Plan, today: Document) -> str:
    """One document with both."""
    both = {"plan": json.loads(plan.to_json()), "today": json.loads(today.to_json())}
    return json.dumps(both, indent=2, sort_keys=True, ensure_ascii=False)
