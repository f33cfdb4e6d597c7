"""What one rank of a plan issues, against what the plan says, without GPUs.

Rank ``r`` is built on a fake process group of the plan's size with its tensors on the
meta device, and runs one whole step: the same code as a real step, but nothing is
computed or sent. Every collective is recorded where it would be issued.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from planner.plan.documents import Document
from planner.runtime.apply import Parallel, check_same_model, refuse, traced_model
from planner.runtime.layout import local_shape
from planner.runtime.program import Values, graph_of
from planner.workload import Training

Key = tuple[str, str, str, int, int]  # axis, kind, phase, group size, bytes


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Collectives of one kind and size: how many the plan has and how many ran."""

    axis: str
    kind: str
    phase: str
    group_size: int
    bytes: int
    planned: int
    issued: int
    where: str

    @property
    def differs(self) -> bool:
        return self.planned != self.issued


@dataclass(frozen=True, slots=True)
class Audit:
    """All rows of one rank; ``stage`` is its pipeline stage."""

    rank: int
    stage: int
    rows: tuple[AuditRow, ...]
    planned_parameter_bytes: int
    parameter_bytes: int

    @property
    def differing(self) -> tuple[AuditRow, ...]:
        return tuple(r for r in self.rows if r.differs)

    @property
    def ok(self) -> bool:
        """Whether nothing differs; parameters within 0.1 % (padding)."""
        off = abs(self.parameter_bytes - self.planned_parameter_bytes)
        return not self.differing and off <= 1e-3 * self.planned_parameter_bytes + 1024

    def text(self) -> str:
        """A table of what differs, or one line."""
        memory = (
            f"parameters {self.parameter_bytes} bytes, "
            f"planned {self.planned_parameter_bytes}"
        )
        if self.ok:
            total = sum(r.issued for r in self.rows)
            return (
                f"ok: rank {self.rank} (stage {self.stage}) issues the plan's {total} "
                f"collectives; {memory}"
            )
        lines = [
            f"rank {self.rank} (stage {self.stage}) differs from the plan; {memory}",
            f"{'axis':<14}{'kind':<16}{'phase':<11}{'ranks':>6}{'bytes':>16}"
            f"{'planned':>9}{'issued':>8}  where",
        ]
        lines += [
            f"{r.axis:<14}{r.kind:<16}{r.phase:<11}{r.group_size:>6}{r.bytes:>16}"
            f"{r.planned:>9}{r.issued:>8}  {r.where}"
            for r in self.differing
        ]
        return "\n".join(lines)


def audit(
    plan: Document, rank: int = 0, model: Any = None, example_inputs: Any = None
) -> Audit:
    """Runs one step of ``rank`` on paper and compares.

    Raises PlannerError where the plan does not run, has no such rank, or where
    torch.distributed is already in use.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = plan.parallelism.num_gpus
    if not 0 <= rank < world:
        raise PlannerError("no such rank", rank, f"the plan has ranks 0 to {world - 1}")
    if dist.is_initialized():
        raise PlannerError("an audit needs a process of its own", fix="not torchrun")
    if not isinstance(plan.workload, Training):
        raise PlannerError("the runtime trains", "an Inference plan")
    refuse(plan)
    given = plan.model.source if model is None else model
    if isinstance(given, str) and given.startswith("object:"):
        raise PlannerError(
            "the plan's model was handed in as an object",
            given,
            "audit from Python: planner.runtime.audit(plan, rank, model, inputs)",
        )
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        return _audit(plan, rank, given, example_inputs)
    finally:
        dist.destroy_process_group()


def _audit(plan: Document, rank: int, model: Any, example_inputs: Any) -> Audit:
    traced, inputs, module = traced_model(plan, model, example_inputs)
    graph = graph_of(traced, {b.name: b.kind for b in plan.model.blocks})
    check_same_model(plan, graph)
    meta = torch.device("meta")
    parallel = Parallel(plan, module, module, traced, graph, inputs, meta, None, 0)
    bound: Values = {}
    count = plan.parallelism.num_micro_batches or 1
    for name, _ in inputs.places:
        shape = inputs.shapes[name]
        if name in inputs.batched:
            shape = (shape[0] * count, *shape[1:])
        bound[name] = torch.empty(shape, dtype=inputs.dtypes[name], device=meta)
    parallel.recorder.start()
    parallel.run(bound)
    parallel.store.refresh()  # what the next step begins with belongs to this one
    stage = parallel.topology.stage
    held = sum(
        s.leaf.numel() * s.leaf.element_size()
        for s in parallel.store.parameters.values()
    )
    return Audit(
        rank,
        stage,
        _rows(plan, stage, parallel),
        plan.stages[stage].memory.parameters_bytes,
        held,
    )


def _rows(plan: Document, stage: int, parallel: Parallel) -> tuple[AuditRow, ...]:
    planned: Counter[Key] = Counter()
    where: dict[Key, str] = {}
    for c in plan.collectives:
        if c.stage == stage:
            key = (c.axis, c.kind, c.phase, c.group_size, c.bytes)
            planned[key] += c.count_per_step
            where.setdefault(key, c.where)
    issued: Counter[Key] = Counter()
    for c in parallel.recorder.issued:
        key = (c.axis, c.kind, c.phase, c.group_size, c.nbytes)
        issued[key] += 1
        where.setdefault(key, c.where)
    for key in sorted(issued.keys() - planned.keys()):
        match = _padded(key, planned, _missing(parallel), plan)
        if match is not None and issued[match] == 0:
            issued[match] = issued.pop(key)
    return tuple(
        AuditRow(*key, planned=planned[key], issued=issued[key], where=where[key])
        for key in sorted(planned.keys() | issued.keys())
    )


def _missing(parallel: Parallel) -> list[int]:
    """Elements that this rank lacks of padded shards (the last rank of a vocabulary
    that does not divide), one entry per parameter."""
    found: list[int] = []
    tp = parallel.topology.tp
    for s in parallel.store.parameters.values():
        if s.placement.kind == "S":
            first = prod(local_shape(s.shape, s.placement, tp.size, 0))
            found.append(first - prod(s.local))
    return [n for n in found if n]


def _padded(
    key: Key, planned: Counter[Key], missing: list[int], plan: Document
) -> Key | None:
    """The planned row that ``key`` is but for padding: the plan counts every rank's
    shard as the largest."""
    shard = plan.parallelism.dp_shard * plan.parallelism.cp
    sizes = {
        n * width // parts
        for n in (*missing, sum(missing))
        for width in (2, 4)
        for parts in (1, shard)
    }
    for size in sizes:
        other = (*key[:4], key[4] + size)
        if size and other in planned:
            return other
    return None
