"""What must hold in a serving plan, from its document alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isclose
from typing import TYPE_CHECKING

from planner.plan.serving import ServingRecord
from planner.search.violation import Violation
from planner.workload import Inference

if TYPE_CHECKING:
    from planner.plan.documents import Plan

REL = 1e-9


def _same(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=REL, abs_tol=1e-15)


def serving_violations(plan: Plan) -> Iterator[Violation]:
    """All violations of an inference plan."""
    record, workload = plan.serving, plan.workload
    if record is None or not isinstance(workload, Inference):
        yield Violation("serving", "serving", "an inference plan says how it serves")
        return
    yield from _gpus(plan, record)
    yield from _blocks(plan)
    yield from _memory(plan, record, workload)
    yield from _times(plan, record)
    yield from _rates(plan, record, workload)
    yield from _limits(record, workload)
    yield from _certificate(plan, record, workload)


def _gpus(plan: Plan, r: ServingRecord) -> Iterator[Violation]:
    """Instances x tp x pp GPUs and the idle ones are the cluster."""
    used = r.tp * r.pp * r.instances
    if used + r.idle_gpus != plan.cluster.num_gpus:
        yield Violation(
            "mesh",
            "serving",
            f"{used} GPUs at work and {r.idle_gpus} idle, the cluster has "
            f"{plan.cluster.num_gpus}",
        )
    p = plan.parallelism
    if (p.tp, p.pp, p.dp_replicate) != (r.tp, r.pp, r.instances):
        yield Violation("mesh", "parallelism", "differs from the serving part")
    if tuple((a.name, a.size) for a in plan.mesh.axes) != p.axes:
        yield Violation("mesh", "axes", "are not the parallelism's")
    if r.prefill_instances >= r.instances:
        yield Violation("mesh", "prefill_instances", "leave no instance to decode")
    if r.tp % r.ep or r.tp % r.attention_dp:
        yield Violation("mesh", "ep", "expert and attention groups must divide tp")
    per_stage = r.tp * r.instances
    for k, s in enumerate(plan.stages):
        if s.ranks != tuple(range(k * per_stage, (k + 1) * per_stage)):
            yield Violation("stages", f"stage {k}", "its ranks are not the mesh's")
    if len(plan.stages) != r.pp:
        yield Violation("stages", "index", f"there must be {r.pp} stages")


def _blocks(plan: Plan) -> Iterator[Violation]:
    expected = [b.name for b in plan.model.blocks]
    placed = [name for s in plan.stages for name in s.blocks]
    if placed != expected:
        yield Violation("stages", "blocks", "are not the model's, once and in order")
    total = sum(b.parameters for b in plan.model.blocks)
    if total != plan.model.parameters:
        yield Violation(
            "model", "blocks", f"hold {total} parameters of {plan.model.parameters}"
        )


def _memory(plan: Plan, r: ServingRecord, w: Inference) -> Iterator[Violation]:
    """Lines add up and fit; the cache holds the batch; weights are all there."""
    device = min((g.memory_bytes for g in plan.cluster.groups), default=0)
    most = min(device, w.memory_limit_bytes or device)
    if len(r.memory) != r.pp:
        yield Violation("memory", "serving", f"there must be {r.pp} stages")
        return
    for k, m in enumerate(r.memory):
        where = f"stage {k}"
        if m.summed != m.total_bytes:
            yield Violation(
                "memory", where, f"the lines add up to {m.summed}, not {m.total_bytes}"
            )
        if m.total_bytes > m.limit_bytes or m.limit_bytes > most:
            yield Violation("memory", where, f"does not fit into {most} bytes")
    for s, m in zip(plan.stages, r.memory, strict=False):
        if s.memory.total_bytes != m.total_bytes:
            yield Violation("memory", f"stage {s.index}", "differs from serving's")
    held = sum(m.weights_bytes for m in r.memory) * r.tp
    if held < r.weight_bytes * (1 - REL):
        yield Violation(
            "memory", "weights", f"all GPUs hold {held} of {r.weight_bytes} bytes"
        )
    cache = max(m.cache_bytes for m in r.memory)
    if cache < (r.sequence_bytes_per_gpu - 1) * r.batch_limit:
        yield Violation("memory", "cache", "does not hold batch_limit sequences")
    if r.batch_limit > r.max_concurrency:
        yield Violation(
            "memory",
            "batch_limit",
            f"{r.batch_limit} sequences where {r.max_concurrency} fit",
        )
    whole, each = r.kv_bytes_per_token, r.kv_bytes_per_token_per_gpu
    if each > whole or each * r.tp < whole:
        yield Violation(
            "memory", "kv", f"{each} bytes a GPU and token of {whole} over {r.tp}"
        )


def _times(plan: Plan, r: ServingRecord) -> Iterator[Violation]:
    """Phases are their parts, the step is the decode phase, latency its sum."""
    w = plan.workload
    assert isinstance(w, Inference)
    if [p.name for p in r.phases] != ["prefill", "decode"]:
        yield Violation("serving", "phases", "must be prefill and decode")
        return
    for p in r.phases:
        if not _same(sum(p.parts.values()), p.stage_s):
            yield Violation("serving", p.name, "its parts do not add up")
        if p.peak_fraction > 1:
            yield Violation("serving", p.name, f"{p.peak_fraction:.0%} of the peak")
        if p.latency_s < p.stage_s * (1 - REL):
            yield Violation("serving", p.name, "is faster than its slowest stage")
    decode = r.phases[1]
    waves = min(r.pp, r.batch_limit)
    step = max(decode.latency_s, waves * decode.stage_s)
    if not _same(step, plan.estimate.step_time_s):
        yield Violation(
            "step",
            "estimate",
            f"is {plan.estimate.step_time_s} s, the decode phase makes {step} s",
        )
    if not _same(sum(plan.estimate.breakdown.parts().values()), step):
        yield Violation("step", "breakdown", "does not add up to the step")
    if r.tpot_s < step * (1 - REL):
        yield Violation("serving", "tpot_s", "is below one decode step")
    if r.ttft_s < r.phases[0].latency_s * (1 - 0.5):
        yield Violation("serving", "ttft_s", "is far below the prefill itself")
    latency = r.ttft_s + (w.output_len - 1) * r.tpot_s
    if not _same(latency, r.latency_s):
        yield Violation("serving", "latency_s", f"is {r.latency_s}, not {latency}")


def _rates(plan: Plan, r: ServingRecord, w: Inference) -> Iterator[Violation]:
    gpus = plan.cluster.num_gpus
    expected = {
        "tokens_per_s_per_gpu": r.tokens_per_s / gpus,
        "requests_per_s": r.tokens_per_s / w.output_len,
    }
    for name, value in expected.items():
        if not _same(getattr(r, name), value):
            yield Violation("rates", name, f"is {getattr(r, name)}, not {value}")
    most = r.instances * r.batch_limit / r.tpot_s
    if r.tokens_per_s > most * (1 + 1e-6):
        yield Violation("rates", "tokens_per_s", f"more than the batch makes ({most})")


def _limits(r: ServingRecord, w: Inference) -> Iterator[Violation]:
    if w.ttft_limit_s is not None and r.ttft_s > w.ttft_limit_s:
        yield Violation("limits", "ttft_s", f"{r.ttft_s} s over {w.ttft_limit_s} s")
    if w.tpot_limit_s is not None and r.tpot_s > w.tpot_limit_s:
        yield Violation("limits", "tpot_s", f"{r.tpot_s} s over {w.tpot_limit_s} s")
    if w.arrival_per_s is not None and r.requests_per_s < w.arrival_per_s * (1 - REL):
        yield Violation("limits", "requests_per_s", "below the arrival rate")
    if w.batch is not None and r.batch_limit != w.batch:
        yield Violation("limits", "batch_limit", f"{r.batch_limit}, asked {w.batch}")
    if (r.weights, r.kv, r.group) != (w.weights, w.kv, w.group):
        yield Violation("limits", "weights", "are not in the formats that were asked")


def _certificate(plan: Plan, r: ServingRecord, w: Inference) -> Iterator[Violation]:
    """The objective is the plan's; no point of the curve or front is better."""
    c = plan.certificate
    gpus = plan.cluster.num_gpus
    if c.objective != w.objective:
        yield Violation("certificate", "objective", f"{c.objective}, not {w.objective}")
    used = gpus if w.objective == "throughput" else gpus - r.idle_gpus
    if w.objective == "latency":
        expected = r.latency_s
    else:
        expected = used / max(r.tokens_per_s, 1e-12)
    if not _same(c.objective_s, expected):
        yield Violation("certificate", "objective_s", f"is not the plan's {expected}")
    if c.lower_bound_s > c.objective_s * (1 + REL):
        yield Violation("certificate", "lower_bound_s", "is above the objective")
    if c.pruned + c.solved + c.cut_off + c.infeasible != c.enumerated:
        yield Violation("certificate", "enumerated", "is not the sum of its parts")
    if w.objective == "throughput":
        for p in (*r.curve, *r.pareto):
            if p.meets_limits and p.tokens_per_s > r.tokens_per_s * (1 + REL):
                yield Violation(
                    "certificate",
                    f"tp={p.tp} pp={p.pp} batch {p.batch}",
                    f"meets the limits and makes {ceil(p.tokens_per_s)} tokens/s",
                )
