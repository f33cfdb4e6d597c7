"""optimize() and reprice() for serving: trace, read the model off, enumerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import planner
from cost_models.errors import SpecError
from cost_models.hardware import ClusterSpec, parse_cluster
from passes.errors import PassError
from passes.ir import OpGraph
from planner.errors import PlannerError
from planner.models import ModelSource, resolve_model
from planner.plan import Plan, Prediction
from planner.plan.documents import Document
from planner.plan.records import VerdictRecord
from planner.serving.document import Context, documents
from planner.serving.engines import load_engine
from planner.serving.extract import extract
from planner.serving.kv_cache import Formats
from planner.serving.phases import Layout, Pricer
from planner.serving.search import Found, Server
from planner.serving.windows import windows_of
from planner.traces import GraphSource
from planner.workload import Inference, PinValue

#: Tokens that a decoder is traced with: its shapes do not depend on them.
TRACED_TOKENS = 256
PINS = ("tp", "pp", "ep")


def serve(
    model: Any,
    cluster: str | Path | Mapping[str, Any] | ClusterSpec,
    workload: Inference,
    *,
    pins: Mapping[str, PinValue] | None = None,
    example_inputs: Any = None,
    memory_limit_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best way to serve ``model``; arguments as of :func:`planner.optimize`.

    Raises PlannerError (the input is wrong) or InfeasibleError (a limit can not be
    met: which one, by how much, and what would do).
    """
    chosen = dict(pins or {})
    unknown = [name for name in chosen if name not in PINS]
    if unknown:
        raise PlannerError(
            "serving does not take this pin", unknown[0], f"pin {', '.join(PINS)}"
        )
    if memory_limit_bytes is not None:
        from dataclasses import replace

        workload = replace(workload, memory_limit_bytes=memory_limit_bytes)
    if progress is not None:
        progress("tracing the model")
    server, context = prepare(model, cluster, workload, example_inputs)
    if progress is not None:
        progress("trying every layout")
    found = server.search(chosen)
    return Plan(**documents(server, found, context, chosen))


def prepare(
    model: Any,
    cluster: str | Path | Mapping[str, Any] | ClusterSpec,
    workload: Inference,
    example_inputs: Any = None,
) -> tuple[Server, Context]:
    """The server that prices ``workload``, and what a document says of it."""
    try:
        spec = cluster if isinstance(cluster, ClusterSpec) else parse_cluster(cluster)
        definition = dict(cluster) if isinstance(cluster, Mapping) else None
        engine = load_engine(workload.stack_name)
        source, graph, windows = _traced(model, spec, example_inputs)
        serving = extract(graph, source.name, windows)
        formats = Formats(
            workload.weights, workload.kv, workload.group, workload.eight_bit_math
        )
        pricer = Pricer(serving, spec, engine, formats)
    except (SpecError, PassError) as error:
        raise PlannerError(error.what, error.value, error.fix) from error
    label = str(model) if isinstance(model, str | Path) else None
    context = Context(
        graph,
        source.name,
        label or f"object:{type(model).__name__}",
        definition,
        (*source.warnings, *graph.warnings),
        (planner.__version__, torch.__version__),
    )
    return Server(pricer, workload), context


def _traced(
    model: Any, cluster: ClusterSpec, example_inputs: Any
) -> tuple[ModelSource, OpGraph, dict[int, int]]:
    dtype = "bf16" if cluster.device.supports("bf16") else "fp16"

    def resolve(seq_len: int | None) -> ModelSource:
        return resolve_model(
            model,
            seq_len=seq_len,
            dtype=dtype,
            example_inputs=example_inputs,
            mode="infer",
        )

    source = resolve(TRACED_TOKENS)
    text = str(model) if isinstance(model, str | Path) else None
    graph = GraphSource(source, resolve, text).graph()
    if not graph.seq_len:
        raise PlannerError(
            "the model takes no tokens",
            source.name,
            "serving plans are for language models",
        )
    windows = {} if source.source == "preset" else windows_of(source.build()[0])
    return source, graph, windows


def reprice(plan: Document, cluster: Any) -> Prediction:
    """The plan's own layout and batch, priced again from its model."""
    workload, record = plan.workload, plan.serving
    if record is None or not isinstance(workload, Inference):
        raise PlannerError("the plan has no serving part", plan.model.name, "")
    server, context = prepare(plan.model.source, cluster, workload)
    layout = Layout(record.tp, record.pp, record.ep, record.attention_dp)
    point = server.point(
        layout, record.instances, record.batch_limit, record.prefill_instances
    )
    points = [
        server.point(
            Layout(p.tp, p.pp, p.ep, p.attention_dp),
            p.instances,
            p.batch,
            p.prefill_instances,
        )
        for p in (*record.curve, *record.pareto)
    ]
    _, illegal = server.layouts({})
    found = Found(
        point,
        tuple(points),
        server.concurrency(layout),
        illegal,
        server.binds(point),
        len(points),
        0,
    )
    fields = documents(server, found, context, {})
    del fields["certificate"], fields["alternatives"]
    # the notes compare with points that only the search saw
    fields["serving"] = fields["serving"].model_copy(update={"notes": record.notes})
    verdict = VerdictRecord.of(fields["estimate"].memory_per_stage)
    return Prediction(**fields, verdict=verdict)
