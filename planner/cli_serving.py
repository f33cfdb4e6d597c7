"""``planner serve-plan``: how to serve a language model."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from planner.cli_io import progress, show
from planner.cli_options import (
    AsJson,
    Cluster,
    MemoryLimit,
    Model,
    Output,
    Quiet,
    Stack,
    memory_limit_bytes,
)
from planner.errors import PlannerError
from planner.workload import Inference, parse_pins


def serve_plan(
    model: Model,
    cluster: Cluster,
    prompt_len: Annotated[
        int, typer.Option("--prompt-len", help="Tokens of a prompt.")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option("--output-len", help="Tokens that are generated.")
    ] = 128,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="bf16, fp16, fp8, int8, int4 (or int4-g128), fp4."
        ),
    ] = "bf16",
    kv: Annotated[
        str, typer.Option("--kv", help="KV cache: bf16, fp16, fp8 or int8.")
    ] = "bf16",
    ttft_limit: Annotated[
        float | None,
        typer.Option("--ttft-limit", help="Most seconds to the first token."),
    ] = None,
    tpot_limit: Annotated[
        float | None,
        typer.Option("--tpot-limit", help="Most seconds per output token."),
    ] = None,
    arrival: Annotated[
        float | None, typer.Option("--arrival", help="Requests per second to serve.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", help="Sequences in flight per instance; else chosen."),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help="latency, throughput, gpus or cost. Default: throughput where a "
            "limit or an arrival rate is given, else latency.",
        ),
    ] = None,
    stack: Stack = None,
    memory_limit: MemoryLimit = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Fix tp, pp or ep, e.g. --pin tp=4. May repeat."),
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Choose how to serve a language model: degrees, instances and batch."""
    limited = ttft_limit or tpot_limit or arrival
    form, group = _weights(weights)
    workload = Inference(
        prompt_len=prompt_len,
        output_len=output_len,
        weights=form,  # type: ignore[arg-type]
        kv=kv,  # type: ignore[arg-type]
        group=group,
        batch=batch,
        ttft_limit_s=ttft_limit,
        tpot_limit_s=tpot_limit,
        arrival_per_s=arrival,
        objective=objective or ("throughput" if limited else "latency"),  # type: ignore[arg-type]
        stack=stack,
        memory_limit_bytes=memory_limit_bytes(memory_limit),
    )
    if output is not None and not output.absolute().parent.is_dir():
        raise PlannerError("can not write the plan there", output, "make the folder")
    with progress(quiet) as report:
        from planner.api import optimize

        plan = optimize(
            model, cluster, workload, pins=parse_pins(pin or ()), progress=report
        )
    if output is not None:
        plan.save(output)
    if as_json:
        show(plan.to_json())
        return 0
    from planner.serving.summary import summary

    show(summary(plan))
    if output is not None:
        show(f"\nwrote {output}; `planner check {output}` verifies it")
    return 0


def _weights(text: str) -> tuple[str, int]:
    """``int4-g64`` as (int4, 64)."""
    match = re.fullmatch(r"(\w+?)(?:-g(\d{1,5}))?", text)
    if match is None:
        raise PlannerError("not a weight format", text, "e.g. int4-g128")
    return match[1], int(match[2] or 128)
