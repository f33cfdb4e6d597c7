"""Plans of any shape for tests of exporters, built on the sample plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.plan import ClusterRecord, MeshRecord, Plan, StageRecord
from planner.plan.records import BlockRecord, NodeGroupRecord
from planner.workload import Parallelism, Training
from tests.unit.planner.plan_samples import sample


def plan_of(
    shape: Parallelism,
    global_batch: int,
    *,
    layers: int = 24,
    recompute: dict[str, str] | None = None,
    source: str = "llama3-8b",
    gpus_per_node: int = 8,
    **workload: Any,
) -> Plan:
    """The sample plan in another shape: blocks over stages as evenly as they go."""
    base = sample()
    shape = shape.derive(global_batch)
    names = ("embed", *(f"layers.{i}" for i in range(layers)), "head")
    parts = _cut(names, shape.pp * shape.vpp)
    memory = base.stages[0].memory
    per_stage = shape.num_gpus // shape.pp
    stages: list[StageRecord] = []
    for k in range(shape.pp):
        numbers = [c * shape.pp + k for c in range(shape.vpp)]
        if shape.schedule == "zero_bubble" and shape.vpp == 2:
            numbers[1] = 2 * shape.pp - 1 - k
        held = [parts[n] for n in numbers]
        stages.append(
            StageRecord(
                index=k,
                blocks=tuple(name for part in held for name in part),
                chunks=tuple(map(len, held)),
                ops=3,
                ranks=tuple(range(k * per_stage, (k + 1) * per_stage)),
                forward_s=0.010 + 0.001 * k,
                backward_s=0.020,
                send_s=0.0005,
                memory=memory,
            )
        )
    gpus = shape.num_gpus
    node = NodeGroupRecord(
        **{
            **base.cluster.groups[0].model_dump(),
            "nodes": max(1, gpus // gpus_per_node),
            "gpus_per_node": min(gpus, gpus_per_node),
        }
    )
    cluster = ClusterRecord(
        **{
            **base.cluster.model_dump(),
            "text": f"{gpus}xA100",
            "num_gpus": gpus,
            "groups": (node,),
        }
    )
    blocks = tuple(BlockRecord(name=n, kind=1, ops=1, parameters=10) for n in names)
    estimate = base.estimate.model_copy(
        update={"memory_per_stage": tuple(s.memory for s in stages)}
    )
    training = Training(
        **{"global_batch": global_batch, "seq_len": 512, **workload}  # type: ignore[arg-type]
    )
    return base.model_copy(
        update={
            "model": base.model.model_copy(
                update={"blocks": blocks, "source": source, "name": source}
            ),
            "cluster": cluster,
            "workload": training,
            "parallelism": replace(shape),
            "mesh": MeshRecord.of(shape),
            "stages": tuple(stages),
            "estimate": estimate,
            "recompute": recompute or {},
        }
    )


def _cut(names: tuple[str, ...], parts: int) -> list[tuple[str, ...]]:
    """Layers as even as possible; the ends go with the first and the last part."""
    layers = names[1:-1]
    base, extra = divmod(len(layers), parts)
    result: list[tuple[str, ...]] = []
    at = 0
    for k in range(parts):
        size = base + (k < extra)
        result.append(layers[at : at + size])
        at += size
    result[0] = (names[0], *result[0])
    result[-1] = (*result[-1], names[-1])
    return result
