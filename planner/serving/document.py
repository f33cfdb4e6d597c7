"""A chosen way to serve as a plan document."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from cost_models.hardware import ClusterSpec
from passes.ir import OpGraph
from planner.document import model_record
from planner.plan.records import (
    AlternativeRecord,
    BreakdownRecord,
    CertificateRecord,
    ClusterRecord,
    EstimateRecord,
    MemoryRecord,
    MeshRecord,
    PlacementRecord,
    ProvenanceRecord,
    SolverRecord,
    StageRecord,
)
from planner.plan.serving import (
    KernelRecord,
    OperatingPoint,
    PhaseRecord,
    QueueRecord,
    ServingMemoryRecord,
    ServingRecord,
)
from planner.serving.kv_cache import (
    CACHE_BYTES,
    Shard,
    is_attention,
    kv_bytes_per_token,
    weight_bytes,
)
from planner.serving.phases import PARTS, Step
from planner.serving.queueing import closed_form_wait, simulate
from planner.serving.search import Found, MemoryNeed, Point, Server, pareto, rank
from planner.workload import Inference, Parallelism, PinValue

KERNELS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Context:
    """What the document says beside the search's result."""

    graph: OpGraph
    name: str
    source: str
    definition: dict[str, Any] | None
    warnings: tuple[str, ...]
    versions: tuple[str, str]  # planner, torch


def parallelism_of(point: Point) -> Parallelism:
    return Parallelism(
        pp=point.layout.pp,
        dp_replicate=point.instances,
        tp=point.layout.tp,
        ep=1,
        sequence_parallel=False,
        micro_batch_size=max(1, point.batch // point.layout.pp),
        num_micro_batches=min(point.layout.pp, point.batch),
        schedule="gpipe",
    )


def memory_of(need: MemoryNeed, batch: int) -> ServingMemoryRecord:
    """Whole bytes, rounded up."""
    lines = {
        "weights_bytes": ceil(need.weights),
        "cache_bytes": ceil(need.sequence * batch),
        "workspace_bytes": ceil(need.workspace),
        "graphs_bytes": ceil(need.graphs),
        "reserve_bytes": ceil(need.reserve),
    }
    return ServingMemoryRecord(
        **lines, total_bytes=sum(lines.values()), limit_bytes=int(need.limit)
    )


def plain_memory(m: ServingMemoryRecord) -> MemoryRecord:
    """The same in the lines that every plan has; the cache is under activations."""
    return MemoryRecord(
        parameters_bytes=m.weights_bytes,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=m.cache_bytes,
        logits_bytes=0,
        gather_buffers_bytes=0,
        workspace_bytes=m.workspace_bytes + m.graphs_bytes,
        reserved_bytes=m.reserve_bytes,
        total_bytes=m.total_bytes,
        limit_bytes=m.limit_bytes,
        peak_moment="serving: the KV cache is full (counted as activations)",
    )


def documents(
    server: Server,
    found: Found,
    context: Context,
    pins: dict[str, PinValue],
) -> dict[str, Any]:
    """The fields of a Plan."""
    point, cluster = found.best, server.cluster
    parallelism = parallelism_of(point)
    memory = tuple(memory_of(n, point.batch) for n in server.needs(point.layout))
    stages = _stages(server, point, context.graph, memory)
    return {
        "model": model_record(context.graph, context.name, context.source),
        "cluster": ClusterRecord.of(cluster, context.definition),
        "workload": server.workload,
        "parallelism": parallelism,
        "mesh": MeshRecord.of(parallelism),
        "stages": stages,
        "placements": dict[str, PlacementRecord](),
        "estimate": _estimate(server, point, tuple(s.memory for s in stages)),
        "serving": _serving(server, found, memory),
        "warnings": context.warnings,
        "provenance": _provenance(server, context),
        "certificate": _certificate(server, found, pins),
        "alternatives": _alternatives(server, found),
    }


def _stages(
    server: Server,
    point: Point,
    graph: OpGraph,
    memory: tuple[ServingMemoryRecord, ...],
) -> tuple[StageRecord, ...]:
    pp, per_stage = point.layout.pp, point.layout.tp * point.instances
    names = [b.name for b in graph.blocks]
    bounds = _block_bounds(server, graph, pp)
    ops = {b.name: b.stop - b.start for b in graph.blocks}
    return tuple(
        StageRecord(
            index=k,
            blocks=tuple(names[bounds[k] : bounds[k + 1]]),
            chunks=(bounds[k + 1] - bounds[k],),
            ops=sum(ops[n] for n in names[bounds[k] : bounds[k + 1]]),
            ranks=tuple(range(k * per_stage, (k + 1) * per_stage)),
            forward_s=point.decode.latency_s / pp,
            backward_s=0.0,
            memory=plain_memory(memory[k]),
        )
        for k in range(pp)
    )


def _block_bounds(server: Server, graph: OpGraph, pp: int) -> list[int]:
    """First block of every stage and the end; the first and last stage take what is
    before and after the layers."""
    depth = server.model.depth
    before = max(0, min(1, len(graph.blocks) - depth))
    base, extra = divmod(depth, pp)
    bounds = [0]
    for k in range(pp - 1):
        done = (k + 1) * base + min(k + 1, extra)
        bounds.append(min(len(graph.blocks), before + done))
    return [*bounds, len(graph.blocks)]


def _estimate(
    server: Server, point: Point, memory: tuple[MemoryRecord, ...]
) -> EstimateRecord:
    """Of a decode step: batch tokens on every instance."""
    parts = dict(point.decode.parts)
    waves = min(point.layout.pp, point.batch)
    step = max(point.decode.latency_s, waves * point.decode.seconds)
    comm = {n: parts[n] for n in ("tp_comm", "ep_comm", "pp_p2p")}
    rest = {*comm, "host"}
    compute = sum(value for n, value in parts.items() if n not in rest)
    known = sum(comm.values()) + compute + parts["host"]
    device, gpus = server.cluster.device, server.cluster.num_gpus
    dtype = server.pricer.native or server.pricer.activation
    # all instances, each one step of every wave
    flops = point.decode.flops * waves * point.instances
    peak = device.peak(dtype)
    mfu = min(1.0, flops / (step * gpus * peak))
    price = device.price_per_hour
    return EstimateRecord(
        step_time_s=step,
        samples_per_s=point.tokens_per_s / server.workload.output_len,
        tokens_per_s_per_gpu=point.tokens_per_s / gpus,
        model_flops=flops,
        hardware_flops=flops,
        peak_flops_per_s=peak,
        peak_dtype=dtype,
        mfu=mfu,
        hfu=mfu,
        cost_per_hour=price * gpus if price else None,
        breakdown=BreakdownRecord(
            compute=compute,
            **comm,
            launch=parts["host"],
            pp_bubble=max(0.0, step - known),
        ),
        memory_per_stage=memory,
    )


def _phase(server: Server, name: str, point: Point, step: Step) -> PhaseRecord:
    w = server.workload
    waves = min(point.layout.pp, point.batch)
    sequences = point.batch / waves if name == "decode" else 1.0
    length = 1 if name == "decode" else w.prompt_len
    context = w.prompt_len + (w.output_len // 2 if name == "decode" else 0)
    parts = dict(step.parts)
    links = parts["tp_comm"] + parts["ep_comm"] + parts["pp_p2p"]
    memory = step.memory_s + (parts["attention"] if name == "decode" else 0.0)
    compute = step.compute_s + (parts["attention"] if name != "decode" else 0.0)
    shares = {
        "compute": compute,
        "memory": memory,
        "links": links,
        "launch": parts["host"],
    }
    dtype = server.pricer.native or server.pricer.activation
    busy = max(step.latency_s, 1e-12) * point.layout.gpus
    return PhaseRecord(
        name=name,  # type: ignore[arg-type]
        sequences=sequences,
        tokens=sequences * length,
        context=context,
        stage_s=step.seconds,
        latency_s=step.latency_s,
        parts={k: parts[k] for k in PARTS},
        flops=step.flops,
        peak_fraction=step.flops / (busy * server.cluster.device.peak(dtype)),
        bound=max(shares, key=lambda k: shares[k]),  # type: ignore[arg-type]
    )


def kernels_of(server: Server, point: Point) -> tuple[KernelRecord, ...]:
    """The distinct products of a decode step on one GPU."""
    layout, pricer = point.layout, server.pricer
    rows = max(1.0, point.batch / min(layout.pp, point.batch))
    dtype = pricer.native or pricer.activation
    peak = server.cluster.device.peak(dtype)
    seen: dict[tuple[object, ...], KernelRecord] = {}
    for layer, _ in server.model.layers:
        for p in layer.products:
            attends = bool(layer.attentions) and is_attention(layer, p)
            groups = layout.attention_dp if attends else 1
            tp = max(1, layout.tp // groups)
            t = pricer.product(p, rows / groups, tp, layout.ep)
            inner = max(1, tp // layout.ep) if p.experts > 1 else tp
            n = p.n // inner if p.split == "column" else p.n
            k = p.k // inner if p.split == "row" else p.k
            key = (p.name, n, k)
            seen.setdefault(
                key,
                KernelRecord(
                    name=p.name,
                    m=max(1, round(rows / groups)),
                    n=max(1, n),
                    k=max(1, k),
                    experts=p.experts,
                    time_s=t.time_s,
                    peak_fraction=t.flops / (t.time_s * peak),
                    bound=t.bound,  # type: ignore[arg-type]
                ),
            )
    return tuple(seen.values())[:KERNELS_SHOWN]


def operating(point: Point, gpus: int) -> OperatingPoint:
    layout = point.layout
    return OperatingPoint(
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        attention_dp=layout.attention_dp,
        instances=point.instances,
        prefill_instances=point.prefill_instances,
        batch=point.batch,
        ttft_s=point.ttft_s,
        tpot_s=point.tpot_s,
        tokens_per_s=point.tokens_per_s,
        tokens_per_s_per_gpu=point.tokens_per_s / gpus,
        meets_limits=point.meets,
    )


def _curve(found: Found) -> list[Point]:
    """The chosen layout over its batches."""
    best = found.best
    same = {
        p.batch: p
        for p in found.points
        if p.layout == best.layout
        and p.instances == best.instances
        and p.prefill_instances == best.prefill_instances
        and p.fits
    }
    return [same[b] for b in sorted(same)]


def _serving(
    server: Server, found: Found, memory: tuple[ServingMemoryRecord, ...]
) -> ServingRecord:
    point, w, cluster = found.best, server.workload, server.cluster
    layout, model = point.layout, server.model
    gpus = cluster.num_gpus
    shard = Shard(model.layers, layout.tp, layout.ep, layout.attention_dp)
    each = sum(
        a.cached_on_rank(shard.attention_tp) * n for a, n in model.attentions
    ) * CACHE_BYTES[w.kv]  # fmt: skip
    windowed = any(a.window for a, _ in model.attentions)
    price = cluster.device.price_per_hour
    cost = None
    if price and point.tokens_per_s > 0:
        cost = price * point.gpus / 3600 / point.tokens_per_s * 1e6
    return ServingRecord(
        engine=server.pricer.engine.name,
        weights=w.weights,
        group=w.group,
        kv=w.kv,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        attention_dp=layout.attention_dp,
        instances=point.instances,
        prefill_instances=point.prefill_instances,
        idle_gpus=gpus - point.gpus,
        batch_limit=point.batch,
        max_concurrency=found.concurrency,
        weight_bytes=ceil(weight_bytes(model, server.pricer.formats)),
        kv_bytes_per_token=ceil(kv_bytes_per_token(model, w.kv)),
        kv_bytes_per_token_per_gpu=ceil(each),
        windowed_cache=windowed,
        sequence_bytes_per_gpu=ceil(max(n.sequence for n in server.needs(layout))),
        memory=memory,
        phases=(
            _phase(server, "prefill", point, point.prefill),
            _phase(server, "decode", point, point.decode),
        ),
        kernels=kernels_of(server, point),
        ttft_s=point.ttft_s,
        tpot_s=point.tpot_s,
        latency_s=point.ttft_s + (w.output_len - 1) * point.tpot_s,
        tokens_per_s=point.tokens_per_s,
        tokens_per_s_per_gpu=point.tokens_per_s / gpus,
        requests_per_s=point.tokens_per_s / w.output_len,
        cost_per_million_tokens=cost,
        binds=found.binds,
        curve=tuple(operating(p, gpus) for p in _curve(found)),
        pareto=tuple(operating(p, gpus) for p in pareto(found.points)),
        queue=_queue(server, point),
        notes=_notes(server, found),
    )


def _queue(server: Server, point: Point) -> QueueRecord | None:
    w = server.workload
    if w.arrival_per_s is None or point.prefill_instances:
        return None
    rate = w.arrival_per_s / point.instances
    prefill = point.prefill.latency_s * server.pricer.engine.prefill
    context = w.prompt_len + w.output_len // 2
    prices = {
        b: server.pricer.decode(point.layout, b / min(point.layout.pp, b), context)
        for b in sorted({1, *(2**i for i in range(13) if 2**i < point.batch),
                         point.batch})
    }  # fmt: skip

    def step_s(n: int) -> float:
        size = min((b for b in prices if b >= n), default=point.batch)
        waves = min(point.layout.pp, size)
        return max(prices[size].latency_s, waves * prices[size].seconds)

    seen = simulate(rate, prefill, step_s, w.output_len, point.batch)
    service = prefill + w.output_len * point.tpot_s
    capacity = point.tokens_per_s / w.output_len
    wait = closed_form_wait(rate, service, point.batch)
    return QueueRecord(
        arrival_per_s=w.arrival_per_s,
        capacity_per_s=capacity,
        utilization=w.arrival_per_s / capacity,
        requests=seen.requests,
        mean_wait_s=seen.mean_wait_s,
        p50_ttft_s=seen.p50_ttft_s,
        p95_ttft_s=seen.p95_ttft_s,
        p95_tpot_s=seen.p95_tpot_s,
        mean_in_flight=seen.mean_in_flight,
        closed_form_wait_s=min(wait, 1e9),
    )


def _notes(server: Server, found: Found) -> tuple[str, ...]:
    point, gpus = found.best, server.cluster.num_gpus
    notes: list[str] = []
    idle = gpus - point.gpus
    if idle:
        why = "fewer GPUs serve it as well"
        if server.workload.objective in ("latency", "throughput"):
            more = [p for p in found.points if p.fits and p.gpus > point.gpus]
            if more:
                other = min(more, key=lambda p: rank(p, server.workload, gpus)[1:])
                why = (
                    f"the best layout on more GPUs (tp={other.layout.tp}, "
                    f"pp={other.layout.pp}, {other.instances} instances) takes "
                    f"{other.tpot_s * 1e3:.3g} ms a token against "
                    f"{point.tpot_s * 1e3:.3g} ms"
                )
        notes.append(f"{idle} of {gpus} GPUs stay idle: {why}")
    if found.illegal:
        notes.append("not legal: " + "; ".join(found.illegal[:3]))
    windows = [a for a, _ in server.model.attentions if a.window]
    if windows:
        notes.append(
            f"{sum(n for a, n in server.model.attentions if a.window)} of "
            f"{server.model.depth} layers cache a window of {windows[0].window} tokens"
        )
    if any(a.latent for a, _ in server.model.attentions):
        notes.append("the latent cache is whole on every tensor rank")
    return tuple(notes)


def _provenance(server: Server, context: Context) -> ProvenanceRecord:
    cluster: ClusterSpec = server.cluster
    sources: dict[str, tuple[str, ...]] = {}
    for group in cluster.groups:
        sources[group.device.name] = group.device.source
        sources[group.link.name] = group.link.source
    return ProvenanceRecord(
        planner_version=context.versions[0],
        torch_version=context.versions[1],
        stack=server.pricer.engine.name,
        sources={k: v for k, v in sources.items() if v},
    )


def objective_s(point: Point, w: Inference, gpus: int) -> float:
    """What the search minimised: seconds of a request, or GPU seconds a token."""
    if w.objective == "latency":
        return point.ttft_s + (w.output_len - 1) * point.tpot_s
    used = gpus if w.objective == "throughput" else point.gpus
    return used / max(point.tokens_per_s, 1e-12)


def _certificate(
    server: Server, found: Found, pins: dict[str, PinValue]
) -> CertificateRecord:
    w = server.workload
    value = objective_s(found.best, w, server.cluster.num_gpus)
    return CertificateRecord(
        status="optimal",
        objective=w.objective,
        objective_s=value,
        lower_bound_s=value,
        gap=0.0,
        enumerated=found.enumerated,
        pruned=0,
        solved=found.enumerated - found.infeasible,
        infeasible=found.infeasible,
        solver=SolverRecord(name="exhaustive enumeration", version="1"),
        constraints=(
            "equal instances of tp x pp GPUs; batches on the grid, and to the last "
            "that meets the limits within 2 %",
        ),
        pins=pins,
    )


def _alternatives(server: Server, found: Found) -> tuple[AlternativeRecord, ...]:
    """The best point of other layouts."""
    w, gpus = server.workload, server.cluster.num_gpus
    best: dict[object, Point] = {}
    for p in found.points:
        if p.layout == found.best.layout or not p.meets:
            continue
        key = p.layout
        if key not in best or rank(p, w, gpus) < rank(best[key], w, gpus):
            best[key] = p
    shown = sorted(best.values(), key=lambda p: rank(p, w, gpus))[:8]
    mine = objective_s(found.best, w, gpus)
    return tuple(
        AlternativeRecord(
            parallelism=parallelism_of(p),
            step_time_s=max(
                p.decode.latency_s, min(p.layout.pp, p.batch) * p.decode.seconds
            ),
            fits=True,
            why=_why(p, objective_s(p, w, gpus) / mine, w),
        )
        for p in shown
    )


def _why(p: Point, ratio: float, w: Inference) -> str:
    what = "latency" if w.objective == "latency" else "GPU seconds a token"
    return (
        f"{p.instances} x tp={p.layout.tp} pp={p.layout.pp} at batch {p.batch}: "
        f"{p.tpot_s * 1e3:.3g} ms a token, {p.tokens_per_s:.4g} tokens/s; "
        f"{ratio:.3g}x the {what}"
    )
