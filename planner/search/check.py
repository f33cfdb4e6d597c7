"""Verifies a plan from its document alone; knows no solver.

:data:`RULES` is the list of what must hold. Each rule is a function from the plan to
the violations it finds; :func:`check` runs them all. With ``recompute=True`` the plan
is also priced again from its model (:func:`planner.api.reprice`) and every number and
placement compared, so that an edit which is consistent in itself is found too.

Times agree to ``REL`` (relative), sizes and counts exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, cast

from cost_models.pipeline import Schedule, step_time
from cost_models.schedules import stage_of
from planner.plan.documents import Document, Plan
from planner.plan.records import plain
from planner.search.check_placements import placement_rules
from planner.search.violation import Violation as Violation
from planner.workload import MESH_AXES, Training

REL = 1e-9
#: A gap up to this counts as closed (the solver works on whole nanoseconds).
CLOSED_GAP = 1e-6
#: Differences of a repriced plan that are listed.
MOST_DIFFERENCES = 20


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold."""

    name: str
    find: Callable[[Plan], Iterator[Violation]]


def check(plan: Plan, *, recompute: bool = False) -> list[Violation]:
    """All violations, in the order of :data:`RULES`; empty for a sound plan."""
    if plan.workload.kind == "inference":
        from planner.search.check_serving import serving_violations

        found = list(serving_violations(plan))
    else:
        found = [violation for rule in RULES for violation in rule.find(plan)]
    if recompute:
        found.extend(repriced(plan))
    return found


def _same(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=REL, abs_tol=1e-15)


def _mesh(plan: Plan) -> Iterator[Violation]:
    """Axes are the parallelism's, in order, and multiply to the cluster's GPUs."""
    expected = plan.parallelism.axes
    written = tuple((a.name, a.size) for a in plan.mesh.axes)
    if written != expected:
        yield Violation(
            "mesh", "axes", f"{written} is not the parallelism's {expected}"
        )
    product = 1
    for _, size in written:
        product *= size
    if product != plan.cluster.num_gpus:
        yield Violation(
            "mesh",
            "axes",
            f"they multiply to {product} ranks, the cluster has "
            f"{plan.cluster.num_gpus} GPUs",
        )
    in_groups = sum(g.nodes * g.gpus_per_node for g in plan.cluster.groups)
    if in_groups != plan.cluster.num_gpus:
        yield Violation(
            "mesh",
            "cluster",
            f"its nodes have {in_groups} GPUs, num_gpus says {plan.cluster.num_gpus}",
        )


def _stages(plan: Plan) -> Iterator[Violation]:
    """Stages hold every block once and in order, on their own ranks."""
    p, stages = plan.parallelism, plan.stages
    if [s.index for s in stages] != list(range(p.pp)):
        yield Violation("stages", "index", f"there must be stages 0 to {p.pp - 1}")
        return
    per_stage = plan.cluster.num_gpus // p.pp
    for s in stages:
        expected = tuple(range(s.index * per_stage, (s.index + 1) * per_stage))
        if s.ranks != expected:
            yield Violation(
                "stages",
                f"stage {s.index}",
                f"its ranks must be {expected[0]} to {expected[-1]} (row-major mesh)",
            )
        if len(s.chunks) != p.vpp or sum(s.chunks) != len(s.blocks):
            yield Violation(
                "stages",
                f"stage {s.index}",
                f"chunks {s.chunks} do not split {len(s.blocks)} blocks {p.vpp}-fold",
            )
    used = Counter(rank for s in stages for rank in s.ranks)
    shared = sorted(rank for rank, times in used.items() if times > 1)
    if shared:
        yield Violation("stages", "ranks", f"in several stages: {shared[:8]}")
    yield from _coverage(plan)


def _coverage(plan: Plan) -> Iterator[Violation]:
    expected = [block.name for block in plan.model.blocks]
    if len(set(expected)) != len(expected):
        yield Violation("stages", "model", "two blocks have the same name")
    p = plan.parallelism
    virtual: dict[int, tuple[str, ...]] = {}
    for s in plan.stages:
        for chunk, size in enumerate(s.chunks):
            start = sum(s.chunks[:chunk])
            number = stage_of(Schedule(p.schedule), s.index, chunk, p.pp)
            virtual[number] = s.blocks[start : start + size]
    placed = [name for number in sorted(virtual) for name in virtual[number]]
    if placed != expected:
        times = Counter(placed)
        missing = [name for name in expected if not times[name]]
        twice = [name for name, n in times.items() if n > 1]
        unknown = [name for name in times if name not in set(expected)]
        what = (
            f"not placed: {missing[:4]}"
            if missing
            else f"placed more than once: {twice[:4]}"
            if twice
            else f"unknown: {unknown[:4]}"
            if unknown
            else "out of execution order"
        )
        yield Violation("stages", "blocks", what)
        return
    ops = {block.name: block.ops for block in plan.model.blocks}
    for s in plan.stages:
        if s.ops != sum(ops[name] for name in s.blocks):
            yield Violation("stages", f"stage {s.index}", "ops differ from its blocks'")


def _model(plan: Plan) -> Iterator[Violation]:
    """Parameters add up over the blocks; recompute names blocks that exist."""
    total = sum(block.parameters for block in plan.model.blocks)
    if total != plan.model.parameters:
        yield Violation(
            "model", "blocks", f"hold {total} parameters of {plan.model.parameters}"
        )
    names = {block.name for block in plan.model.blocks}
    for name in plan.recompute:
        if name not in names:
            yield Violation("model", "recompute", f"there is no block {name!r}")


def _batch(plan: Plan) -> Iterator[Violation]:
    """dp x micro-batch x number of micro-batches is the global batch."""
    p, w = plan.parallelism, plan.workload
    if not isinstance(w, Training):
        return
    if w.global_batch is None or p.num_micro_batches is None:
        yield Violation("batch", "workload", "batch or micro-batches are not stated")
        return
    product = p.data_parallel * p.micro_batch_size * p.num_micro_batches
    if product != w.global_batch:
        yield Violation(
            "batch",
            "parallelism",
            f"dp {p.data_parallel} x micro-batch {p.micro_batch_size} x "
            f"{p.num_micro_batches} = {product}, the global batch is {w.global_batch}",
        )
    if p.schedule == "interleaved" and p.num_micro_batches % p.pp:
        yield Violation(
            "batch", "parallelism", "interleaving needs micro-batches divisible by pp"
        )


def _memory(plan: Plan) -> Iterator[Violation]:
    """Lines add up, fit, and are the same in both places."""
    stated = plan.workload.memory_limit_bytes
    device = min((g.memory_bytes for g in plan.cluster.groups), default=0)
    most = min(device, stated) if stated else device
    for s in plan.stages:
        where, memory = f"stage {s.index}", s.memory
        total = sum(memory.lines().values())
        if total != memory.total_bytes:
            yield Violation(
                "memory",
                where,
                f"the lines add up to {total} bytes, total_bytes is "
                f"{memory.total_bytes}",
            )
        if memory.total_bytes > memory.limit_bytes:
            yield Violation(
                "memory",
                where,
                f"{memory.total_bytes - memory.limit_bytes} bytes over the limit",
            )
        if memory.limit_bytes > most:
            yield Violation(
                "memory", where, f"limit_bytes is above the {most} bytes there are"
            )
    if tuple(s.memory for s in plan.stages) != plan.estimate.memory_per_stage:
        yield Violation(
            "memory", "estimate", "memory_per_stage differs from the stages' memory"
        )


def pipeline_seconds(plan: Document) -> float:
    """The schedule's closed form of the document's stage times."""
    p = plan.parallelism
    weights = [s.backward_weight_s or 0.0 for s in plan.stages]
    return step_time(
        p.schedule,
        [s.forward_s for s in plan.stages],
        [s.backward_s for s in plan.stages],
        [s.send_s for s in plan.stages],
        p.num_micro_batches or 1,
        p.vpp,
        backward_weight_s=weights if all(weights) else None,
    ).total_s


def _step(plan: Plan) -> Iterator[Violation]:
    """Step time = schedule of the stage times + what comes after = its breakdown."""
    e = plan.estimate
    expected = pipeline_seconds(plan) + e.after_pipeline_s
    if not _same(expected, e.step_time_s):
        yield Violation(
            "step",
            "estimate",
            f"the stage times make a step of {expected} s, step_time_s is "
            f"{e.step_time_s}",
        )
    total = sum(e.breakdown.parts().values())
    if not _same(total, e.step_time_s):
        yield Violation(
            "step", "breakdown", f"adds up to {total} s, step_time_s is {e.step_time_s}"
        )
    if e.breakdown.optimizer > e.after_pipeline_s * (1 + REL):
        yield Violation("step", "breakdown", "optimizer is above after_pipeline_s")


def _rates(plan: Plan) -> Iterator[Violation]:
    """Throughput and utilisation follow from the step; none beats the hardware."""
    e, w = plan.estimate, plan.workload
    gpus = plan.cluster.num_gpus
    peak = e.step_time_s * gpus * e.peak_flops_per_s
    batch = (w.global_batch if isinstance(w, Training) else w.batch) or 0
    expected = {
        "samples_per_s": batch / e.step_time_s,
        "tokens_per_s_per_gpu": batch * plan.model.seq_len / e.step_time_s / gpus,
        "mfu": e.model_flops / peak,
        "hfu": e.hardware_flops / peak,
    }
    for name, value in expected.items():
        written = getattr(e, name)
        if not _same(written, value):
            yield Violation("rates", name, f"is {written}, the step time makes {value}")
    highest = max(e.hfu, e.mfu, expected["hfu"], expected["mfu"])
    if highest > 1:
        yield Violation("rates", "hfu", f"{highest:.0%} of the dense peak")
    if e.hardware_flops < e.model_flops * (1 - REL):
        yield Violation("rates", "hardware_flops", "below the model's FLOPs")


def _certificate(plan: Plan) -> Iterator[Violation]:
    """Bound <= objective, gap as stated, "optimal" only where closed, counts add up."""
    c = plan.certificate
    if c.objective == "step_time" and not _same(
        c.objective_s, plan.estimate.step_time_s
    ):
        yield Violation("certificate", "objective_s", "is not the plan's step time")
    if c.lower_bound_s > c.objective_s * (1 + REL):
        yield Violation("certificate", "lower_bound_s", "is above the objective")
    gap = (c.objective_s - c.lower_bound_s) / c.objective_s if c.objective_s else 0.0
    if abs(max(0.0, gap) - c.gap) > REL:
        yield Violation("certificate", "gap", f"is {c.gap}, objective and bound {gap}")
    if c.status == "optimal" and c.gap > CLOSED_GAP:
        yield Violation("certificate", "status", f"optimal with a gap of {c.gap}")
    if c.status == "optimal" and c.cut_off:
        yield Violation("certificate", "status", f"optimal with {c.cut_off} cut off")
    parts = c.pruned + c.solved + c.cut_off + c.infeasible
    if parts != c.enumerated:
        yield Violation(
            "certificate", "enumerated", f"is {c.enumerated}, its parts make {parts}"
        )
    for name, value in c.pins.items():
        if hasattr(plan.parallelism, name):
            written = getattr(plan.parallelism, name)
            if written != value:
                yield Violation("certificate", f"pin {name}", f"{value}, not {written}")
    if c.objective == "step_time":
        for other in plan.alternatives:
            if other.fits and other.step_time_s < plan.estimate.step_time_s * (1 - REL):
                yield Violation(
                    "certificate", other.parallelism.label(), "fits and is faster"
                )


def _collectives(plan: Plan) -> Iterator[Violation]:
    """Groups, counts and sizes agree with the mesh and the micro-batches."""
    p = plan.parallelism
    m = p.num_micro_batches or 1
    size = {name: getattr(p, name) for name in (*MESH_AXES, "ep")}
    data = p.data_parallel * p.cp * p.tp
    for number, c in enumerate(plan.collectives):
        where = f"{number} ({c.where} {c.kind})"
        if c.axis == "pp" or c.kind == "p2p":
            fits = p.pp > 1 and c.group_size in (2, p.pp)
        elif c.axis in ("tp", "cp", "ep"):
            fits = c.group_size == size[c.axis] > 1
        else:
            fits = c.group_size > 1 and data % c.group_size == 0
        if not fits:
            yield Violation(
                "collectives", where, f"no group of {c.group_size} on axis {c.axis}"
            )
        if c.stage >= p.pp:
            yield Violation("collectives", where, f"there is no stage {c.stage}")
        if c.phase != "step" and c.count_per_step % m:
            yield Violation(
                "collectives",
                where,
                f"{c.count_per_step} calls a step for {m} micro-batches",
            )
        if c.bytes == 0:
            yield Violation("collectives", where, "moves no bytes")
    yield from _needed(plan)


def _needed(plan: Plan) -> Iterator[Violation]:
    """Stages send to each other, replicas sum gradients, and exposed communication is
    no more than all there is."""
    p, b = plan.parallelism, plan.estimate.breakdown
    axes = {c.axis for c in plan.collectives}
    if p.pp > 1 and not any(c.kind == "p2p" for c in plan.collectives):
        yield Violation("collectives", "pp", "no stage sends to the next")
    trains = plan.workload.kind == "training" and plan.model.trainable_parameters > 0
    if trains and p.data_parallel > 1 and not axes & {"dp", "dp_shard", "dp_replicate"}:
        yield Violation("collectives", "dp", "no gradient is summed over replicas")
    groups = {
        "tp": ({"tp"}, b.tp_comm),
        "cp": ({"cp"}, b.cp_comm),
        "ep": ({"ep"}, b.ep_comm),
        "dp": ({"dp", "dp_shard", "dp_replicate"}, b.dp_comm_exposed),
    }
    for name, (members, exposed) in groups.items():
        total = sum(
            c.time_s * c.count_per_step for c in plan.collectives if c.axis in members
        )
        if exposed > total * (1 + 1e-6):
            yield Violation(
                "collectives",
                name,
                f"the breakdown has {exposed} s of it, all calls together {total} s",
            )


def repriced(plan: Plan) -> Iterator[Violation]:
    """Differences from the same plan priced again from its model."""
    from planner.api import reprice

    fresh = plain(reprice(plan))
    written = plain(plan)
    found = 0
    for key in REPRICED:
        for path, a, b in differences(key, written.get(key), fresh.get(key)):
            yield Violation(
                "reprice", path, f"is {_short(a)}, priced again {_short(b)}"
            )
            found += 1
            if found == MOST_DIFFERENCES:
                return


REPRICED = (
    "serving",
    "model",
    "mesh",
    "stages",
    "recompute",
    "placements",
    "collectives",
    "estimate",
)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: (path, left, right); floats agree to ``REL``."""
    if isinstance(a, dict) and isinstance(b, dict):
        left, right = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        for key in sorted(left.keys() | right.keys()):
            yield from differences(f"{path}.{key}", left.get(key), right.get(key))
    elif isinstance(a, list) and isinstance(b, list):
        first, second = cast("list[Any]", a), cast("list[Any]", b)
        if len(first) != len(second):
            yield f"{path} (length)", len(first), len(second)
        for i, (x, y) in enumerate(zip(first, second, strict=False)):
            yield from differences(f"{path}[{i}]", x, y)
    elif isinstance(a, float) and isinstance(b, int | float):
        if not _same(a, float(b)):
            yield path, a, b
    elif a != b:
        yield path, a, b


RULES: tuple[Rule, ...] = (
    Rule("mesh", _mesh),
    Rule("stages", _stages),
    Rule("model", _model),
    Rule("batch", _batch),
    Rule("memory", _memory),
    Rule("step", _step),
    Rule("rates", _rates),
    Rule("certificate", _certificate),
    Rule("collectives", _collectives),
    *(Rule(name, find) for name, find in placement_rules()),
)
