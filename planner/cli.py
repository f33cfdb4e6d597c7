"""The command line: parses, calls the API, prints. The only place that prints.

Exit codes: 0 done, 2 the input is wrong, 3 no plan fits, 4 a check failed, 1 a fault of
our own, 130 interrupted. Heavy modules are imported inside the commands, so that the
light ones answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner import cli_handover, cli_serving
from planner.cli_io import (
    CHECK_FAILED,
    INFEASIBLE,
    INTERRUPTED,
    guarded,
    print_json,
    progress,
    say,
    show,
)
from planner.cli_options import (
    AsJson,
    Cluster,
    Compile,
    GlobalBatch,
    Im2col,
    ImageSize,
    MemoryLimit,
    Model,
    OptimizerName,
    Output,
    PlanFile,
    Precision,
    Quiet,
    SeqLen,
    Stack,
    Strict,
    memory_limit_bytes,
)
from planner.cli_runtime import audit, validate
from planner.errors import PlannerError
from planner.workload import Parallelism, Training, parse_pins

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.plan.documents import Document

app = typer.Typer(
    name="planner",
    help="Choose how to split a PyTorch model over a cluster.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


@app.command()
def optimize(
    model: Model,
    cluster: Cluster,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    precision: Precision = "bf16",
    optimizer: OptimizerName = "adamw",
    compile: Compile = True,
    stack: Stack = None,
    im2col: Im2col = "implicit",
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", help="Samples per rank and micro-batch."),
    ] = None,
    memory_limit: MemoryLimit = None,
    objective: Annotated[
        str, typer.Option("--objective", help="step_time, cost or gpus.")
    ] = "step_time",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds of search."),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Fix a choice, e.g. --pin tp=8. May repeat."),
    ] = None,
    strict: Strict = False,
    dump_passes: Annotated[
        Path | None,
        typer.Option("--dump-passes", help="Write the graph after each pass here."),
    ] = None,
    compare_to: Annotated[
        Path | None,
        typer.Option(
            "--compare-to",
            help="Price this configuration too (Megatron arguments, torchtitan TOML, "
            "DeepSpeed JSON, or a plan) and show what the plan gains.",
        ),
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Choose the fastest plan that fits."""
    workload = _training(
        global_batch, seq_len, image_size, precision, optimizer, compile, stack,
        memory_limit, im2col,
    )  # fmt: skip
    pins = parse_pins(pin or ())
    if micro_batch is not None:
        pins = {**pins, "micro_batch_size": micro_batch}
    if output is not None:
        _check_folder(output)
    with progress(quiet) as report:
        from planner.api import optimize as run

        plan = run(
            model,
            cluster,
            workload,
            time_limit_s=time_limit,
            pins=pins,
            objective=objective,
            strict=strict,
            dump_passes=dump_passes,
            progress=report,
        )
        today = None
        if compare_to is not None:
            report("pricing the configuration to compare with")
            today = cli_handover.today(compare_to, model, cluster, workload)
    code = _deliver(plan, output, as_json, today)
    if any(w.startswith("interrupted:") for w in plan.warnings):
        say("this is the best plan so far")
        return INTERRUPTED
    return code


@app.command()
def predict(
    model: Model,
    cluster: Cluster,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1,
    dp_shard: Annotated[
        int | None,
        typer.Option("--dp-shard", help="Replicas that divide state as --zero says."),
    ] = None,
    dp_replicate: Annotated[
        int | None,
        typer.Option("--dp-replicate", help="Replicas that hold state whole."),
    ] = None,
    cp: Annotated[int, typer.Option("--cp", help="Context-parallel degree.")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel degree.")] = 1,
    vpp: Annotated[int, typer.Option("--vpp", help="Model chunks per rank.")] = 1,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", help="Samples per rank and micro-batch.")
    ] = 1,
    zero: Annotated[int, typer.Option("--zero", help="ZeRO level, 0 to 3.")] = 0,
    recompute: Annotated[
        str, typer.Option("--recompute", help="none, selective or full; or counts.")
    ] = "none",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel/--no-sequence-parallel")
    ] = True,
    schedule: Annotated[
        str, typer.Option("--schedule", help="1f1b, interleaved, gpipe, zero_bubble.")
    ] = "1f1b",
    layers_per_stage: Annotated[
        str | None,
        typer.Option("--layers-per-stage", help="Counts such as 8,8,8,6."),
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    precision: Precision = "bf16",
    optimizer: OptimizerName = "adamw",
    compile: Compile = True,
    stack: Stack = None,
    im2col: Im2col = "implicit",
    memory_limit: MemoryLimit = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Take the split from Megatron arguments, a torchtitan TOML or a "
            "DeepSpeed JSON.",
        ),
    ] = None,
    from_format: Annotated[
        str | None,
        typer.Option(
            "--from-format",
            help="megatron-args, torchtitan.toml or deepspeed.json (default: by the "
            "file's name).",
        ),
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Price one configuration; exit code 3 if it does not fit.

    Without --dp-shard and --dp-replicate, data parallelism fills the cluster.
    """
    workload = _training(
        global_batch, seq_len, image_size, precision, optimizer, compile, stack,
        memory_limit, im2col,
    )  # fmt: skip
    if from_file is not None:
        found_in = cli_handover.imported(from_file, cluster, from_format)
        workload = cli_handover.filled(workload, found_in)
        parallelism = found_in.parallelism
    else:
        given = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": vpp}
        degrees = _fill(given, dp_shard, dp_replicate, zero, cluster)
        parallelism = Parallelism(
            **degrees,
            zero=zero,
            micro_batch_size=micro_batch,
            sequence_parallel=sequence_parallel,
            schedule=schedule,  # type: ignore[arg-type]
            recompute=_recompute(recompute),  # type: ignore[arg-type]
            layers_per_stage=_counts("layers per stage", layers_per_stage),
        )
    with progress(quiet) as report:
        from planner.api import predict as run

        found = run(
            model, cluster, workload, parallelism, strict=strict, progress=report
        )
    show(found.to_json() if as_json else found.summary())
    if not found.verdict.fits:
        say(f"error: {found.verdict.message}")
        return INFEASIBLE
    return 0


@app.command()
def check(
    plan_file: PlanFile,
    reprice: Annotated[
        bool | None,
        typer.Option(
            "--reprice/--no-reprice",
            help="Price the plan again from its model (default: where it has a name).",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Verify a plan without the solver; exit code 4 if something does not hold."""
    from planner.plan import load_plan
    from planner.search.check import RULES

    plan = load_plan(plan_file)
    nameless = plan.model.source.startswith("object:")
    again = not nameless if reprice is None else reprice
    with progress(quiet) as report:
        if again:
            report("pricing the plan again")
        violations = plan.check(recompute=again)
    if as_json:
        found = [
            {"rule": v.rule, "where": v.where, "message": v.message} for v in violations
        ]
        print_json(
            {
                "plan": str(plan_file),
                "ok": not violations,
                "repriced": again,
                "violations": found,
            }
        )
    elif violations:
        show("\n".join(str(v) for v in violations))
    else:
        rules = len({rule.name for rule in RULES})
        note = "priced again from its model" if again else "not priced again"
        show(f"ok: {plan_file} holds ({rules} groups of rules; {note})")
    if violations:
        say(f"error: {len(violations)} violations in {plan_file}")
        return CHECK_FAILED
    return 0


app.command()(cli_serving.serve_plan)
app.command()(cli_handover.explain)
app.command()(cli_handover.diff)
app.command()(cli_handover.report)
app.command()(cli_handover.trace)
app.command()(cli_handover.export)


@app.command()
def clusters(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[CLUSTER]", help="Show how this one is understood."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the GPUs that clusters are made of, or spell one cluster out."""
    from cost_models.hardware import device_names, load_device

    if text is not None:
        return _one_cluster(text, as_json)
    devices = [load_device(name) for name in device_names()]
    if as_json:
        print_json(
            [
                {
                    "name": d.name,
                    "aliases": list(d.aliases),
                    "memory_bytes": d.memory_bytes,
                    "hbm_bytes_per_s": d.hbm_bytes_per_s,
                    "peak_flops_per_s": dict(d.peak_flops),
                    "source": list(d.source),
                }
                for d in devices
            ]
        )
        return 0
    lines = [f"{'GPU':<20} {'GiB':>6} {'GB/s':>6}  dense TFLOP/s"]
    for d in devices:
        peaks = dict(d.peak_flops)
        shown = [
            f"{name} {peaks[name] / 1e12:.4g}"
            for name in ("bf16", "fp16", "fp8")
            if name in peaks
        ]
        lines.append(
            f"{d.name:<20} {d.memory_bytes / 2**30:>6.1f} "
            f"{d.hbm_bytes_per_s / 1e9:>6.0f}  {', '.join(shown)}"
        )
    lines += [
        "",
        "A cluster is NUMBERxGPU (64xA100), NODESxGPUSxGPU (8x8xH100), with memory",
        "(16xA100-40GB), another network (64xA100@100Gbps), a sum (32xA100+32xH100)",
        "or a YAML or JSON file. `planner clusters 64xA100` spells one out.",
    ]
    show("\n".join(lines))
    return 0


@app.command()
def models(as_json: AsJson = False) -> int:
    """List the model presets; they need no network and no weights."""
    from planner.models import preset_table

    rows = preset_table()
    if as_json:
        print_json([{"name": name, "description": text} for name, text in rows])
        return 0
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += [
        "",
        "Also: a Hugging Face config file or folder, torchvision:resnet50,",
        "timm:vit_base_patch16_224, pkg.mod:factory.",
    ]
    show("\n".join(lines))
    return 0


@app.command()
def schema() -> int:
    """Print the JSON Schema of a plan file."""
    from planner.plan import json_schema

    print_json(json_schema())
    return 0


def _training(
    global_batch: int | None,
    seq_len: int | None,
    image_size: int | None,
    precision: str,
    optimizer: str,
    compile: bool,
    stack: str | None,
    memory_limit: str | None,
    im2col: str,
) -> Training:
    return Training(
        global_batch=global_batch,
        seq_len=seq_len,
        image_size=image_size,
        precision=precision,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        compile=compile,
        stack=stack,
        memory_limit_bytes=memory_limit_bytes(memory_limit),
        im2col=im2col,  # type: ignore[arg-type]
    )


def _fill(
    given: dict[str, int],
    dp_shard: int | None,
    dp_replicate: int | None,
    zero: int,
    cluster: str,
) -> dict[str, int]:
    """The degrees, data parallelism filling the cluster where none is given."""
    if dp_shard is None and dp_replicate is None:
        from cost_models.hardware import parse_cluster

        gpus = parse_cluster(cluster).num_gpus
        model_parallel = given["tp"] * given["pp"] * given["cp"]
        rest = max(1, gpus // model_parallel) if model_parallel > 0 else 1
        name = "dp_shard" if zero or given["ep"] > 1 else "dp_replicate"
        return {**given, name: rest}
    return {**given, "dp_shard": dp_shard or 1, "dp_replicate": dp_replicate or 1}


def _recompute(text: str) -> str | tuple[int, ...]:
    if text and text[0].isdigit():
        counts = _counts("recompute counts", text)
        assert counts is not None
        return counts
    return text


def _counts(what: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise PlannerError(f"{what} are not numbers", text, "e.g. 8,8,8,6") from error


def _check_folder(path: Path) -> None:
    """Before a long search: the plan can be written where the user wants it."""
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise PlannerError(
            "can not write the plan there", path, "give a file in a folder that exists"
        )


def _deliver(
    plan: Plan, output: Path | None, as_json: bool, today: Document | None = None
) -> int:
    if output is not None:
        plan.save(output)
    if as_json:
        show(cli_handover.both_json(plan, today) if today else plan.to_json())
        return 0
    show(plan.summary())
    if today is not None:
        show(cli_handover.gain(plan, today))
    if output is not None:
        show(f"\nwrote {output}; `planner explain {output}` says why it is so")
    return 0


def _one_cluster(text: str, as_json: bool) -> int:
    from cost_models.hardware import parse_cluster
    from planner.plan.records import ClusterRecord, plain

    record = ClusterRecord.of(parse_cluster(text))
    if as_json:
        print_json(plain(record))
        return 0
    lines = [f"{record.text}: {record.num_gpus} GPUs"]
    for g in record.groups:
        lines.append(
            f"  {g.nodes} nodes of {g.gpus_per_node} x {g.device} "
            f"({g.memory_bytes / 2**30:.1f} GiB)"
        )
        lines.append(
            f"  inside a node: {g.link}, {g.link_bytes_per_s / 1e9:.4g} GB/s per GPU "
            "and direction"
        )
    lines.append(
        f"  between nodes: {record.network}, "
        f"{record.network_bytes_per_s / 1e9:.4g} GB/s per GPU and direction"
    )
    show("\n".join(lines))
    return 0


app.command()(audit)
app.command()(validate)


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code; no exception leaves it."""

    typed = sys.argv[1:] if arguments is None else arguments

    def command() -> int:
        result = app(typed, standalone_mode=False)
        if result == INTERRUPTED:  # Typer's word for it
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0

    return guarded(command, typed)


def main() -> None:
    """The ``planner`` command."""
    sys.exit(run())
