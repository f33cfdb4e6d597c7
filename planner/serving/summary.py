"""A serving plan as a screenful of plain text."""

from __future__ import annotations

from planner.plan.documents import Document, Plan
from planner.plan.serving import PhaseRecord, ServingRecord
from planner.plan.summary import (
    certificate_line,
    cluster_line,
    count,
    gib,
    row,
    seconds,
)

#: Under this fraction of the peak a product says nothing about the arithmetic units.
SMALL_PEAK = 0.10
CURVE_ROWS = 8


def summary(document: Document) -> str:
    """The whole text, newline at the end. The document must have a serving part."""
    d, r, w = document, document.serving, document.workload
    assert r is not None
    assert w.kind == "inference"
    lines = [
        row("model", f"{d.model.name}, {count(d.model.parameters)} parameters"),
        row("cluster", cluster_line(d)),
        row(
            "workload",
            f"{w.prompt_len} prompt + {w.output_len} output tokens, {_formats(r)}, "
            f"{w.objective}{_limits(d)}; engine {r.engine}",
        ),
        row("layout", _layout(r)),
        row("batch", f"{r.batch_limit} in flight each ({r.max_concurrency} fit)"),
        row(
            "latency",
            f"first token {seconds(r.ttft_s)}, then {seconds(r.tpot_s)} a token, "
            f"request {seconds(r.latency_s)}",
        ),
        row("throughput", _throughput(r)),
        row("binds", r.binds),
        *(row(p.name, _phase(p)) for p in r.phases),
        row("memory", _memory(r)),
        row(
            "KV cache",
            f"{r.kv_bytes_per_token:,} bytes a token, {r.kv_bytes_per_token_per_gpu:,} "
            f"on a GPU; {'windows counted' if r.windowed_cache else 'full length'}",
        ),
        row("products", _kernels(r)),
    ]
    if r.queue is not None:
        q = r.queue
        lines.append(
            row(
                "queue",
                f"{q.arrival_per_s:g} requests/s, {q.utilization:.0%} of capacity: "
                f"mean wait {seconds(q.mean_wait_s)}, first token p95 "
                f"{seconds(q.p95_ttft_s)}, {q.mean_in_flight:.1f} in flight",
            )
        )
    if isinstance(d, Plan):
        lines.append(row("certificate", certificate_line(d.certificate)))
    lines += [row("note", text) for text in (*r.notes, *d.warnings)]
    lines += ["", *_curve(r)]
    return "\n".join(lines) + "\n"


def _formats(r: ServingRecord) -> str:
    group = f" (groups of {r.group})" if r.weights == "int4" else ""
    return f"{r.weights} weights{group}, {r.kv} cache"


def _limits(d: Document) -> str:
    w = d.workload
    assert w.kind == "inference"
    said: list[str] = []
    if w.ttft_limit_s is not None:
        said.append(f"first token within {seconds(w.ttft_limit_s)}")
    if w.tpot_limit_s is not None:
        said.append(f"{seconds(w.tpot_limit_s)} a token")
    return f" ({', '.join(said)})" if said else ""


def _layout(r: ServingRecord) -> str:
    text = f"{r.instances} x (tp {r.tp}, pp {r.pp}"
    if r.ep > 1:
        text += f", ep {r.ep}"
    if r.attention_dp > 1:
        text += f", attention on {r.attention_dp} groups"
    text += ")"
    if r.prefill_instances:
        text += f", {r.prefill_instances} of them prefill for the others"
    return text + (f"; {r.idle_gpus} GPUs idle" if r.idle_gpus else "")


def _throughput(r: ServingRecord) -> str:
    text = (
        f"{r.tokens_per_s:,.0f} tokens/s, {r.tokens_per_s_per_gpu:,.0f} per GPU, "
        f"{r.requests_per_s:.3g} requests/s"
    )
    if r.cost_per_million_tokens is not None:
        text += f", ${r.cost_per_million_tokens:.3g} per million tokens"
    return text


def _phase(p: PhaseRecord) -> str:
    total = max(p.stage_s, 1e-15)
    shares = sorted(p.parts.items(), key=lambda kv: -kv[1])
    shown = ", ".join(
        f"{name.replace('_over', ' overhead').replace('_', ' ')} {v / total:.0%}"
        for name, v in shares
        if v / total >= 0.01
    )
    return (
        f"{seconds(p.latency_s)} a step of {p.tokens:g} tokens, {p.peak_fraction:.1%} "
        f"of peak, {p.bound}-bound: {shown}"
    )


def _memory(r: ServingRecord) -> str:
    worst = max(r.memory, key=lambda m: m.total_bytes)
    return (
        f"{gib(worst.total_bytes)} of {gib(worst.limit_bytes)} a GPU: weights "
        f"{gib(worst.weights_bytes)}, cache {gib(worst.cache_bytes)}, workspace "
        f"{gib(worst.workspace_bytes)}, graphs {gib(worst.graphs_bytes)}, reserve "
        f"{gib(worst.reserve_bytes)}"
    )


def _kernels(r: ServingRecord) -> str:
    shown = [
        f"{k.name} {k.m}x{k.n}x{k.k} {k.peak_fraction:.1%} of peak ({k.bound}-bound)"
        for k in r.kernels[:6]
    ]
    low = sum(k.peak_fraction < SMALL_PEAK for k in r.kernels)
    return "; ".join(shown) + f"; {low} of {len(r.kernels)} under {SMALL_PEAK:.0%}"


def _curve(r: ServingRecord) -> list[str]:
    """Batch against latency and throughput, for the chosen layout."""
    points = list(r.curve)
    if len(points) > CURVE_ROWS:
        step = (len(points) - 1) / (CURVE_ROWS - 1)
        points = [points[round(i * step)] for i in range(CURVE_ROWS)]
    lines = [f"{'batch':>7} {'TTFT':>9} {'TPOT':>9} {'tokens/s/GPU':>13}  limits"]
    for p in points:
        met = "met" if p.meets_limits else "missed"
        chosen = "  <- chosen" if p.batch == r.batch_limit else ""
        lines.append(
            f"{p.batch:>7} {seconds(p.ttft_s):>9} {seconds(p.tpot_s):>9} "
            f"{p.tokens_per_s_per_gpu:>13,.1f}  {met}{chosen}"
        )
    return lines
