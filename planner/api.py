"""optimize() and predict(): load -> trace -> passes -> price -> search -> document."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch

import planner
from cost_models.errors import SpecError
from cost_models.hardware import ClusterSpec, parse_cluster
from cost_models.stacks import load_stack
from passes.errors import PassError
from passes.ir import OpKind
from planner.document import common
from planner.errors import PlannerError
from planner.models import ModelSource, resolve_model
from planner.plan import Plan, Prediction
from planner.plan.documents import Document
from planner.plan.names import parse_placement
from planner.plan.records import (
    AlternativeRecord,
    CertificateRecord,
    SolverRecord,
    VerdictRecord,
)
from planner.search.driver import Limits, Outcome, Search
from planner.search.job import (
    Configuration,
    Job,
    Priced,
    recompute_layout,
    stage_sizes,
    tensor_limit,
)
from planner.search.mesh import Mesh
from planner.search.placements import Placement
from planner.search.recipes import recipes, why_slower
from planner.search.stages import MODES, Counts
from planner.traces import TRACED_DTYPE, GraphSource
from planner.workload import (
    Im2col,
    Inference,
    Parallelism,
    PinValue,
    Training,
    Workload,
    check_batch,
    check_cluster_supports,
    check_pins,
    default_global_batch,
)

Progress = Callable[[str], None]

#: Warning of a plan whose search the user ended (Ctrl-C).
INTERRUPTED = "interrupted: the best plan so far, not searched to the end"
#: Shapes that CP-SAT may solve per second of ``time_limit_s``: the limit is counted in
#: work, so that equal inputs give equal plans on any machine.
SHAPES_PER_SECOND = 10


def optimize(
    model: Any,
    cluster: str | Path | Mapping[str, Any] | ClusterSpec,
    workload: Workload | None = None,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: int | None = None,
    pins: Mapping[str, PinValue] | None = None,
    objective: str = "step_time",
    example_inputs: Any = None,
    strict: bool = False,
    dump_passes: str | Path | None = None,
    im2col: Im2col | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits ``model`` on ``cluster``.

    ``model``: a preset name, a module (with ``example_inputs``), a Hugging Face config,
    ``torchvision:NAME``, ``timm:NAME`` or ``pkg.mod:factory``. ``cluster``: such as
    ``"64xA100"``, a file, a mapping or a ClusterSpec. ``time_limit_s`` bounds the work
    of the search, not the clock, so results are reproducible. ``pins`` fix fields of
    :class:`Parallelism`. ``strict`` refuses ops without a sharding map. ``im2col``,
    where given, replaces the workload's.

    Raises PlannerError (the input is wrong) or InfeasibleError (nothing fits).
    """
    chosen = dict(pins or {})
    check_pins(chosen)
    if isinstance(workload, Inference):
        from planner.serving.api import serve

        return serve(
            model, cluster, workload, pins=chosen, example_inputs=example_inputs,
            memory_limit_bytes=memory_limit_bytes, progress=progress,
        )  # fmt: skip
    if im2col is not None:
        workload = dataclasses.replace(workload or Training(), im2col=im2col)
    setup = _prepare(
        model, cluster, workload, memory_limit_bytes, example_inputs, strict,
        dump_passes, progress, _pinned_tensors(chosen),
    )  # fmt: skip
    job, training = setup.job, setup.training
    _check_pinned(job)
    assert training.global_batch is not None
    check_batch(training.global_batch, job.cluster.num_gpus, chosen)
    if objective not in ("step_time", "cost"):
        raise PlannerError("unknown objective", objective, "use step_time or cost")
    limits = Limits(chosen)
    if time_limit_s is not None:
        limits = Limits(chosen, solved=max(1, int(time_limit_s * SHAPES_PER_SECOND)))
    search = Search(job, training.global_batch, limits, progress)
    outcome = search.run()
    if outcome.interrupted:
        setup.warnings = [*setup.warnings, INTERRUPTED]
    return Plan(
        **setup.document(outcome.best),
        certificate=_certificate(outcome, chosen, objective),
        alternatives=_alternatives(job, search, outcome),
    )


def predict(
    model: Any,
    cluster: str | Path | Mapping[str, Any] | ClusterSpec,
    workload: Workload | None = None,
    parallelism: Parallelism | None = None,
    *,
    memory_limit_bytes: int | None = None,
    example_inputs: Any = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Prediction:
    """The price of one configuration, without a search; says whether it fits."""
    setup = _prepare(
        model, cluster, workload, memory_limit_bytes, example_inputs, strict, None,
        progress,
    )  # fmt: skip
    job, training = setup.job, setup.training
    shape = parallelism or Parallelism(dp_shard=job.cluster.num_gpus)
    shape.check_cluster(job.cluster.num_gpus)
    assert training.global_batch is not None
    shape = shape.derive(training.global_batch)
    priced = price_configuration(job, shape)
    document = setup.document(priced)
    verdict = VerdictRecord.of(document["estimate"].memory_per_stage)
    return Prediction(**document, verdict=verdict)


def price_configuration(job: Job, shape: Parallelism) -> Priced:
    """Prices ``shape`` (with its micro-batches) as a user wrote it."""
    limit = tensor_limit(job.graph, shape.tp)
    if limit:
        raise PlannerError("tp does not divide the attention", f"tp={shape.tp}", limit)
    layers = max(n for _, n in job.chain)
    if shape.pp * shape.vpp > len(job.graph.blocks):
        raise PlannerError(
            "more pipeline stages than blocks",
            f"pp={shape.pp} x vpp={shape.vpp} for {layers} layers",
            "lower pp or vpp",
        )
    c = configuration_of(shape)
    if job.solutions(c) is None and c.state == "sequence":
        raise PlannerError(
            "the sequence can not be divided by tp",
            f"tp={shape.tp}, sequence {job.graph.seq_len}",
            "use --no-sequence-parallel or another tp",
        )
    sizes = stage_sizes(job, shape.pp, shape.layers_per_stage)
    return job.price(c, recompute_layout(job, sizes, shape.recompute))


def configuration_of(shape: Parallelism) -> Configuration:
    """The search's words for a :class:`Parallelism`."""
    assert shape.num_micro_batches is not None
    mesh = Mesh(
        shape.pp, shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp, shape.ep
    )
    return Configuration(
        mesh,
        shape.micro_batch_size,
        shape.num_micro_batches,
        shape.zero,
        shape.vpp,
        shape.schedule,
        "sequence" if shape.sequence_parallel else "replicated",
        sequence_parallel=shape.sequence_parallel,
        split_weights=shape.tp > 1,
    )


def reprice(plan: Document) -> Prediction:
    """The same plan priced again from its model; PlannerError where it has none."""
    if plan.model.source.startswith("object:"):
        raise PlannerError(
            "the plan's model was handed in as an object",
            plan.model.source,
            "check the plan without repricing, or plan it from a name",
        )
    cluster: Any = plan.cluster.definition or plan.cluster.text
    if isinstance(plan.workload, Inference):
        from planner.serving.api import reprice as price_serving

        return price_serving(plan, cluster)
    setup = _prepare(
        plan.model.source, cluster, plan.workload, None, None, False, None, None
    )
    job = setup.job
    priced = job.price(configuration_from(job, plan), layout_from(job, plan))
    document = setup.document(priced)
    verdict = VerdictRecord.of(document["estimate"].memory_per_stage)
    return Prediction(**document, verdict=verdict)


def job_of(plan: Document) -> Job:
    """The job that prices a document's model; PlannerError where it has no name."""
    if plan.model.source.startswith("object:"):
        raise PlannerError(
            "the plan's model was handed in as an object",
            plan.model.source,
            "plan it from a name to have it priced again",
        )
    cluster: Any = plan.cluster.definition or plan.cluster.text
    return _prepare(
        plan.model.source, cluster, plan.workload, None, None, False, None, None
    ).job


def configuration_from(job: Job, plan: Document) -> Configuration:
    """The configuration whose block solutions have the plan's op placements."""
    from dataclasses import replace

    from planner.document import placement_records
    from planner.search.job import RATES, STATES

    base = configuration_of(plan.parallelism)
    best, least = base, -1
    states = ("sequence",) if base.sequence_parallel else STATES
    for state in states if base.mesh.tp > 1 else ("replicated",):
        for rate, split in product(
            RATES, sorted({base.split_weights, False}, reverse=True)
        ):
            c = replace(base, state=state, rate=rate, split_weights=split)
            if job.solutions(c) is None:
                continue
            records = placement_records(job, job.price(c, layout_from(job, plan)))
            same = sum(plan.placements.get(k) == v for k, v in records.items())
            if same > least:
                best, least = c, same
            if same == len(records):
                return c
    return best


def layout_from(job: Job, plan: Document) -> tuple[Counts, ...]:
    """Blocks per rank, run and recompute mode of a document."""
    run_of: dict[str, int] = {}
    position = 0
    for run, (_, count) in enumerate(job.chain):
        for block in job.graph.blocks[position : position + count]:
            run_of[block.name] = run
        position += count
    layout: list[Counts] = []
    for stage in plan.stages:
        rows = [[0, 0, 0] for _ in job.chain]
        for name in stage.blocks:
            if name not in run_of:
                raise PlannerError(
                    "the plan is of another model", name, "plan this model again"
                )
            rows[run_of[name]][MODES.index(plan.recompute.get(name, "none"))] += 1
        layout.append(tuple((r[0], r[1], r[2]) for r in rows))
    return tuple(layout)


# ---- set-up ----------------------------------------------------------------------


class _Setup:
    """A job with what its document needs."""

    def __init__(
        self,
        job: Job,
        training: Training,
        name: str,
        source: str,
        definition: dict[str, Any] | None,
        warnings: Sequence[str],
    ) -> None:
        self.job, self.training = job, training
        self.name, self.source = name, source
        self.definition, self.warnings = definition, warnings

    def document(self, priced: Priced) -> dict[str, Any]:
        return common(
            self.job,
            priced,
            name=self.name,
            source=self.source,
            workload=self.training,
            definition=self.definition,
            warnings=self.warnings,
            versions=(planner.__version__, torch.__version__, _version("ortools")),
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cluster(
    given: str | Path | Mapping[str, Any] | ClusterSpec,
) -> tuple[ClusterSpec, dict[str, Any] | None]:
    if isinstance(given, ClusterSpec):
        return given, None
    cluster = parse_cluster(given)
    definition = dict(given) if isinstance(given, Mapping) else None
    return cluster, definition


def _prepare(
    model: Any,
    cluster: str | Path | Mapping[str, Any] | ClusterSpec,
    workload: Workload | None,
    memory_limit_bytes: int | None,
    example_inputs: Any,
    strict: bool,
    dump_passes: str | Path | None,
    progress: Progress | None,
    pinned: Mapping[str, Placement] | None = None,
) -> _Setup:
    from dataclasses import replace

    try:
        spec, definition = _cluster(cluster)
        job_workload = workload or Training()
        if isinstance(job_workload, Inference):
            raise PlannerError(
                "optimize and predict plan training",
                "an Inference workload",
                "give a Training workload",
            )
        check_cluster_supports(job_workload, spec)
        batch = job_workload.global_batch or default_global_batch(spec.num_gpus)
        limit = memory_limit_bytes or job_workload.memory_limit_bytes
        training = replace(job_workload, global_batch=batch, memory_limit_bytes=limit)
        if progress is not None:
            progress("tracing the model")

        def resolve(seq_len: int | None) -> ModelSource:
            return resolve_model(
                model,
                seq_len=seq_len,
                image_size=training.image_size,
                dtype=TRACED_DTYPE[training.precision],
                example_inputs=example_inputs,
                mode="train",
            )

        text = str(model) if isinstance(model, str | Path) else None
        source = resolve(training.seq_len)
        graphs = GraphSource(
            source, resolve, text, dump_passes, training.im2col == "materialized"
        )
        graph = graphs.graph()
        stack = load_stack(training.stack_name)
        warnings = [*source.warnings, *graph.warnings]
        unknown = sorted({op.target for op in graph.ops if op.kind is OpKind.UNKNOWN})
        if unknown and strict:
            raise PlannerError(
                "ops without a sharding map", ", ".join(unknown), "drop --strict"
            )
        warnings += [f"replicated: unknown op {target}" for target in unknown]
        job = Job(
            graph,
            spec,
            stack,
            precision=training.precision,
            optimizer=training.optimizer,
            recipe=_recipe(training),
            memory_limit_bytes=limit,
            graph_at_cp=graphs.at_cp,
            pinned=pinned,
        )
    except (SpecError, PassError) as error:
        raise PlannerError(error.what, error.value, error.fix) from error
    label = text or f"object:{type(model).__name__}"
    return _Setup(job, training, source.name, label, definition, warnings)


def _pinned_tensors(pins: Mapping[str, PinValue]) -> dict[str, Placement]:
    return {n: parse_placement(str(v)) for n, v in pins.items() if "." in n}


def _check_pinned(job: Job) -> None:
    """Raises unless every pinned tensor is a parameter of the model."""
    names = {t.name for t in job.graph.parameters}
    for name in job.pinned:
        if name not in names:
            near = difflib.get_close_matches(name, names, 3)
            raise PlannerError(
                "a pinned tensor is not a parameter of the model",
                name,
                f"nearest: {', '.join(near)}" if near else "",
            )


def _recipe(training: Training) -> str | None:
    if training.gradient_dtype == "fp32" and training.precision in ("bf16", "fp16"):
        return "bf16_fp32_gradients"
    return None


# ---- the certificate and the losers ----------------------------------------------


def _certificate(
    outcome: Outcome, pins: Mapping[str, PinValue], objective: str
) -> CertificateRecord:
    seconds = outcome.best.terms.total_s
    bound = min(seconds, outcome.bound_s)
    gap = (seconds - bound) / seconds
    closed = gap <= 1e-9 and outcome.cut_off == 0
    if closed:
        bound, gap = seconds, 0.0
    return CertificateRecord(
        status="optimal" if closed else "feasible",
        objective=objective,  # type: ignore[arg-type]
        objective_s=seconds,
        lower_bound_s=bound,
        gap=gap,
        enumerated=outcome.enumerated,
        pruned=outcome.pruned,
        solved=outcome.solved,
        cut_off=outcome.cut_off,
        infeasible=outcome.infeasible,
        solver=SolverRecord(
            name="CP-SAT", version=_version("ortools"), workers=1, seed=7
        ),
        constraints=outcome.constraints,
        pins=dict(pins),
    )


def _alternatives(
    job: Job, search: Search, outcome: Outcome
) -> tuple[AlternativeRecord, ...]:
    from planner.document import parallelism_of

    best = outcome.best
    named = [("", p) for p in outcome.alternatives]
    for recipe, c in recipes(job, search.global_batch):
        if job.solutions(c) is None or tensor_limit(job.graph, c.mesh.tp):
            continue
        priced = search.solve(c)
        if priced is None:
            full = job.layout_of(stage_sizes(job, c.mesh.pp, None), [2] * c.mesh.pp)
            priced = job.price(c, full)
        named.append((recipe, priced))
    rows: list[AlternativeRecord] = []
    seen = {parallelism_of(job, best)}
    for recipe, priced in named:
        shape = parallelism_of(job, priced)
        if shape in seen:
            continue
        seen.add(shape)
        fits = priced.fits
        worst = max(lines.total_bytes for lines in priced.memory)
        over = max(lines.over_bytes for lines in priced.memory)
        why = (
            why_slower(best.terms, priced.terms)
            if fits
            else f"misses the memory limit by {over / 2**30:.1f} GiB"
        )
        if fits and priced.terms.total_s < best.terms.total_s * (1 - 1e-9):
            continue  # a shape that the pins exclude
        rows.append(
            AlternativeRecord(
                parallelism=shape,
                step_time_s=priced.terms.total_s,
                fits=fits,
                total_bytes=int(worst),
                recipe=recipe,
                why=why,
            )
        )
    rows.sort(key=lambda r: (not r.fits, r.step_time_s))
    return tuple(rows[:12])
