"""What the HTML page shows, as plain data: every figure with where it is from."""

from __future__ import annotations

from typing import Any

from planner.diff import traffic
from planner.errors import PlannerError
from planner.explain import explain, losses
from planner.plan.documents import Document, Plan, Prediction
from planner.plan.records import MEMORY_LINES, CollectiveRecord
from planner.plan.summary import PART_NAMES, certificate_line, gib, seconds, split_line
from planner.report.perfetto import after_parts, step_of
from planner.workload import MESH_AXES, Training

#: Pieces of work that the page's timeline holds; the trace file has them all.
MAX_PIECES = 120_000
#: Ops on the roofline.
MAX_OPS = 40
SOURCES = {
    "memory": "peak over the step, line by line: cost_models/memory.py",
    "waterfall": "estimate.breakdown of the plan; ideal = model FLOPs / (GPUs x peak)",
    "timeline": "cost_models/simulator.py with the plan's stage times",
    "roofline": "cost_models/roofline.py and gemm.py, priced again from the model",
    "block": "placements and collectives of the plan",
    "topology": "mesh of the plan, row-major ranks; collectives of the plan",
    "alternatives": "alternatives of the plan, each at its own best",
}
PART_SOURCES = {
    "compute": "roofline price of every op on the busiest stage, x micro-batches",
    "tp_comm": "tensor-parallel collectives that computation does not hide",
    "cp_comm": "keys and values gathered along the sequence, not hidden",
    "ep_comm": "all-to-all to and from the experts",
    "dp_comm_exposed": "gradient sums and parameter gathers that nothing hides",
    "pp_p2p": "messages between stages",
    "pp_bubble": "idle time of the busiest stage in the schedule",
    "recompute": "forward passes that run again in backward",
    "optimizer": "reading and writing parameters and optimizer states once",
    "launch": "host time that the device waits for",
}


def page_data(document: Document, reprice: bool) -> dict[str, Any]:
    """The page's data. ``reprice`` builds the model again for the roofline; where it
    can not be, ``roofline`` is absent and ``notes`` says why."""
    notes: list[str] = []
    costs = _op_costs(document, reprice, notes)
    return {
        "title": f"{document.model.name} on {document.cluster.text}",
        "verdict": verdict(document),
        "facts": facts(document),
        "memory": _memory(document),
        "waterfall": _waterfall(document, costs),
        "timeline": _timeline(document),
        "roofline": _roofline(document, costs),
        "blocks": _blocks(document),
        "topology": _topology(document),
        "alternatives": _alternatives(document),
        "explanation": [
            {"title": s.title, "lines": list(s.lines)} for s in explain(document)
        ],
        "warnings": list(document.warnings),
        "provenance": {
            "planner": document.provenance.planner_version,
            "torch": document.provenance.torch_version,
            "solver": document.provenance.ortools_version,
            "stack": document.provenance.stack,
            "sources": {k: list(v) for k, v in document.provenance.sources.items()},
        },
        "sources": SOURCES,
        "notes": notes,
    }


def verdict(d: Document) -> str:
    """The plan in one sentence."""
    e = d.estimate
    worst = max(e.memory_per_stage, key=lambda m: m.total_bytes - m.limit_bytes)
    fits = worst.total_bytes <= worst.limit_bytes
    lead = ", ".join(f"{what} ({share:.0%})" for what, share in losses(d)[:2])
    good = "fits" if fits else "does not fit"
    text = (
        f"{d.model.name} on {d.cluster.text} {good}: a step takes "
        f"{seconds(e.step_time_s)} at {e.mfu:.1%} MFU, the fullest GPU holds "
        f"{gib(worst.total_bytes)} of {gib(worst.limit_bytes)}"
    )
    if lead:
        text += f"; what keeps it from the peak is first of all {lead}"
    if isinstance(d, Plan):
        proved = d.certificate.status == "optimal"
        tail = "proven best of all shapes by its own prices" if proved else (
            f"within {d.certificate.gap:.1%} of the best possible by its own prices"
        )  # fmt: skip
        text += f". It is {tail}"
    return text + "."


def facts(d: Document) -> list[dict[str, Any]]:
    """Label, value and source of the head's figures."""
    e, w = d.estimate, d.workload
    rows = [
        ("step", seconds(e.step_time_s), "sum of estimate.breakdown"),
        ("MFU", f"{e.mfu:.1%}", "model FLOPs / (step x GPUs x dense peak)"),
        ("HFU", f"{e.hfu:.1%}", "FLOPs that run, recompute too, over the same"),
        ("samples/s", f"{e.samples_per_s:.4g}", "global batch / step"),
        (
            "tokens/s per GPU",
            f"{e.tokens_per_s_per_gpu:.4g}",
            "samples/s x sequence length / GPUs",
        ),
        ("split", split_line(d), "parallelism of the plan"),
        (
            "model",
            f"{d.model.name}, {d.model.parameters / 1e9:.4g}B parameters",
            "traced model, tied tensors once",
        ),
        (
            "cluster",
            "; ".join(
                f"{g.nodes} x {g.gpus_per_node} {g.device}, {g.link} "
                f"{g.link_bytes_per_s / 1e9:.4g} GB/s"
                for g in d.cluster.groups
            )
            + f"; between nodes {d.cluster.network} "
            f"{d.cluster.network_bytes_per_s / 1e9:.4g} GB/s per GPU",
            "; ".join(
                f"{k}: {' '.join(v)}" for k, v in d.provenance.sources.items()
            ) or "datasheet",
        ),
    ]  # fmt: skip
    if isinstance(w, Training):
        shown = f"{w.global_batch} samples"
        if d.model.seq_len:
            shown += f" x {d.model.seq_len} tokens"
        rows.append(("workload", f"{shown}, {w.precision}, {w.optimizer}", "yours"))
    if e.cost_per_hour:
        rows.append(
            ("cost", f"{e.cost_per_hour:.4g} US$/h", "list prices of the GPU specs")
        )
    if isinstance(d, Plan):
        rows.append(("certificate", certificate_line(d.certificate), "the search"))
    if isinstance(d, Prediction):
        rows.append(("verdict", d.verdict.message, "memory lines against the limit"))
    return [{"label": a, "value": b, "source": c} for a, b, c in rows]


def _memory(d: Document) -> dict[str, Any]:
    stages = d.estimate.memory_per_stage
    return {
        "lines": [n.removesuffix("_bytes").replace("_", " ") for n in MEMORY_LINES],
        "stages": [[getattr(m, n) for n in MEMORY_LINES] for m in stages],
        "limits": [m.limit_bytes for m in stages],
        "moments": [m.peak_moment for m in stages],
    }


def _waterfall(d: Document, costs: list[Any]) -> list[dict[str, Any]]:
    """Steps from the ideal to the real one; they add up."""
    e = d.estimate
    ideal = e.model_flops / (d.cluster.num_gpus * e.peak_flops_per_s)
    compute = e.breakdown.compute
    rows: list[tuple[str, float, str]] = []
    base = min(ideal, compute)
    rows.append(
        ("ideal compute", base, f"{e.model_flops:.4g} FLOPs at {e.peak_dtype} peak")
    )
    rest = compute - base
    busy = sum(c.seconds * c.count for c in costs)
    if busy:
        light = sum(c.seconds * c.count for c in costs if not c.flops) / busy
        bound = min(rest, compute * light)
        why = "ops without matrix products: they wait for HBM"
        rows.append(("memory-bound ops", bound, why))
        why = "tiles, waves, shapes and clocks of matrix products; unequal stages"
        rows.append(("matrix products below peak", rest - bound, why))
    else:
        rows.append(("compute below peak", rest, PART_SOURCES["compute"]))
    for name, value in e.breakdown.parts().items():
        if name != "compute":
            rows.append((PART_NAMES[name], value, PART_SOURCES[name]))
    return [
        {"label": a, "seconds": b, "source": c} for a, b, c in rows if b > 0 or a == "ideal compute"  # noqa: E501
    ]  # fmt: skip


def _timeline(d: Document) -> dict[str, Any]:
    step = step_of(d)
    ranks: list[list[list[int]]] = [[] for _ in d.stages]
    events = step.timeline.events
    each = max(1, MAX_PIECES // len(d.stages))
    scale = 1e6
    for e in events:
        line = ranks[e.rank]
        if len(line) < each:
            start, stop = round(e.start_s * scale), round(e.end_s * scale)
            line.append([int(e.kind), e.micro, e.chunk, start, stop - start])
    shown = sum(map(len, ranks))
    return {
        "total_us": round(step.total_s * scale),
        "pipeline_us": round(step.timeline.total_s * scale),
        "closed_us": round(d.estimate.step_time_s * scale),
        "pieces": ranks,
        "after": [[name, round(s * scale)] for name, s in after_parts(d) if s > 0],
        "cut": len(events) - shown,
        "busy": [b / step.total_s if step.total_s else 0 for b in step.timeline.busy_s],
    }


def _op_costs(d: Document, reprice: bool, notes: list[str]) -> list[Any]:
    if not reprice:
        notes.append("the ops were not priced again: no roofline")
        return []
    from planner.whatif import Base, op_costs

    try:
        return list(op_costs(Base.of(d)))
    except PlannerError as error:
        notes.append(f"no roofline: {error.what}")
        return []


def _roofline(d: Document, costs: list[Any]) -> dict[str, Any] | None:
    if not costs:
        return None
    total = sum(c.seconds * c.count for c in costs)
    ops = [
        {
            "name": c.key,
            "kind": c.kind,
            "intensity": (c.flops or c.vector_flops) / c.bytes,
            "rate": (c.flops or c.vector_flops) / c.seconds,
            "share": c.seconds * c.count / total,
            "seconds": c.seconds,
        }
        for c in costs[:MAX_OPS]
        if c.bytes and (c.flops or c.vector_flops)
    ]
    group = d.cluster.groups[0]
    return {
        "peak": d.estimate.peak_flops_per_s,
        "dtype": d.estimate.peak_dtype,
        "hbm": group.hbm_bytes_per_s,
        "device": group.device,
        "ops": ops,
    }


def _blocks(d: Document) -> list[dict[str, Any]]:
    """Ops of each block pattern in execution order, with placements and traffic."""
    groups: dict[str, list[str]] = {}
    for key, record in d.placements.items():
        if record.what == "op":
            groups.setdefault(key.rpartition("/")[0], []).append(key)
    calls: dict[str, dict[tuple[str, str, str], CollectiveRecord]] = {}
    for c in d.collectives:
        calls.setdefault(c.where, {}).setdefault((c.kind, c.axis, c.phase), c)
    result: list[dict[str, Any]] = []
    for pattern, keys in groups.items():
        ordered = _ordered(d, keys)
        made = {o.tensor: k for k in ordered for o in d.placements[k].outputs}
        number = {k: i for i, k in enumerate(ordered)}
        ops: list[dict[str, Any]] = []
        for key in ordered:
            record = d.placements[key]
            ops.append(
                {
                    "name": key.rpartition("/")[2],
                    "target": record.target,
                    "in": [_operand(o) for o in record.inputs],
                    "out": [_operand(o) for o in record.outputs],
                    "from": sorted(
                        {number[made[o.tensor]] for o in record.inputs if o.tensor in made}  # noqa: E501
                    ),
                    "calls": [
                        f"{c.kind} {c.axis} {c.phase}, {c.bytes / 1e6:.4g} MB, "
                        f"{seconds(c.time_s)}"
                        for c in calls.get(key, {}).values()
                    ],
                }
            )  # fmt: skip
        layers = d.placements[ordered[0]].layers
        result.append({"name": pattern, "layers": layers or "", "ops": ops})
    return sorted(result, key=lambda b: (not b["layers"], -len(b["ops"]), b["name"]))


def _operand(o: Any) -> list[str]:
    axes = ", ".join(f"{k} {v}" for k, v in sorted(o.placement.items())) or "R"
    return [o.tensor, " x ".join(map(str, o.shape)) or "scalar", axes]


def _ordered(d: Document, keys: list[str]) -> list[str]:
    """Keys so that every op follows those whose outputs it reads."""
    made = {o.tensor: k for k in keys for o in d.placements[k].outputs}
    left = {
        k: {made[o.tensor] for o in d.placements[k].inputs if o.tensor in made} - {k}
        for k in sorted(keys)
    }
    result: list[str] = []
    while left:
        ready = [k for k, needs in left.items() if not needs & left.keys()]
        nxt = ready[0] if ready else next(iter(left))  # a cycle: names repeat
        result.append(nxt)
        del left[nxt]
    return result


def _topology(d: Document) -> dict[str, Any]:
    sizes = [d.mesh.size(name) for name in MESH_AXES]
    nodes: list[dict[str, Any]] = []
    first = 0
    for g in d.cluster.groups:
        for _ in range(g.nodes):
            nodes.append({"device": g.device, "first": first, "gpus": g.gpus_per_node})
            first += g.gpus_per_node
    per_node = max(g.gpus_per_node for g in d.cluster.groups)
    busiest = traffic(d)
    axes: list[dict[str, Any]] = []
    for axis, nbytes in sorted(busiest.items(), key=lambda kv: -kv[1]):
        rows = [c for c in d.collectives if c.axis == axis]
        per_stage: dict[int, float] = {}
        for c in rows:
            spent = c.time_s * c.count_per_step
            per_stage[c.stage] = per_stage.get(c.stage, 0.0) + spent
        axes.append(
            {
                "axis": axis,
                "bytes": nbytes,
                "seconds": max(per_stage.values()),
                "size": max(c.group_size for c in rows),
                "inside": _span(axis, sizes, d) <= per_node,
            }
        )
    return {
        "axes": list(MESH_AXES),
        "sizes": sizes,
        "nodes": nodes,
        "traffic": axes,
        "link": d.cluster.groups[0].link,
        "network": d.cluster.network,
    }


def _span(axis: str, sizes: list[int], d: Document) -> int:
    """Ranks from the first to the last of a group on ``axis``, inclusive."""
    named = dict(zip(MESH_AXES, sizes, strict=True))
    inner = {
        "tp": named["tp"],
        "cp": named["tp"] * named["cp"],
        "ep": named["tp"] * named["cp"] * named["dp_shard"],
        "dp_shard": named["tp"] * named["cp"] * named["dp_shard"],
    }
    stage = d.cluster.num_gpus // named["pp"]
    if axis == "pp":
        return d.cluster.num_gpus if named["pp"] > 1 else 1
    return inner.get(axis, stage)


def _alternatives(d: Document) -> list[dict[str, Any]]:
    if not isinstance(d, Plan):
        return []
    mine = {
        "label": "this plan: " + d.parallelism.label(),
        "seconds": d.estimate.step_time_s,
        "fits": True,
        "why": "",
        "mine": True,
    }
    return [
        mine,
        *(
            {
                "label": f"{a.recipe}: {a.parallelism.label()}"
                if a.recipe
                else a.parallelism.label(),
                "seconds": a.step_time_s,
                "fits": a.fits,
                "why": a.why,
                "mine": False,
            }
            for a in d.alternatives
        ),
    ]
