"""A small plan that is sound in every respect, to edit in tests.

A model of an embedding, ``layers`` equal layers of one linear and a head on 16 A100;
dp_shard 4 (ZeRO-1), tp 2, pp 2. The times are made up, but consistent.
"""

from __future__ import annotations

import json
from typing import Any

from cost_models.pipeline import step_time
from planner.plan import (
    AlternativeRecord,
    AxisRecord,
    BlockRecord,
    BreakdownRecord,
    CertificateRecord,
    ClusterRecord,
    CollectiveRecord,
    EstimateRecord,
    MemoryRecord,
    MeshRecord,
    ModelRecord,
    NodeGroupRecord,
    OperandRecord,
    PlacementRecord,
    Plan,
    ProvenanceRecord,
    SolverRecord,
    StageRecord,
    parse_plan,
)
from planner.workload import Parallelism, Training

HIDDEN, VOCAB, SEQ = 1024, 32000, 512
PEAK = 312e12
LIMIT = 80 * 10**9


def _memory(parameter_bytes: int) -> MemoryRecord:
    lines: dict[str, Any] = {
        "parameters_bytes": parameter_bytes,
        "gradients_bytes": 2 * parameter_bytes,
        "optimizer_bytes": 6 * parameter_bytes // 4,
        "activations_bytes": 10**9,
        "logits_bytes": 10**8,
        "gather_buffers_bytes": 0,
        "workspace_bytes": 10**8,
        "reserved_bytes": 10**9,
    }
    return MemoryRecord(**lines, total_bytes=sum(lines.values()), limit_bytes=LIMIT)


def _tensor(
    name: str, shape: tuple[int, ...], blocks: tuple[str, ...], **more: Any
) -> dict[str, PlacementRecord]:
    placement = more.pop("placement", {})
    operand = OperandRecord(tensor=name, shape=shape, placement=placement)
    record = PlacementRecord(
        what="parameter",
        dtype="bfloat16",
        trainable=True,
        blocks=blocks,
        outputs=(operand,),
        **more,
    )
    return {name: record}


def _placements(layers: int) -> dict[str, PlacementRecord]:
    span = f"0-{layers - 1}" if layers > 1 else "0"
    rows = {"tp": "S(0)"}
    result = {
        **_tensor("embed.weight", (VOCAB, HIDDEN), ("embed",), placement=rows),
        **_tensor(
            "layers.*.up.weight",
            (4 * HIDDEN, HIDDEN),
            ("layers.*",),
            placement=rows,
            layers=span,
        ),
        **_tensor(
            "layers.*.down.weight",
            (HIDDEN, 4 * HIDDEN),
            ("layers.*",),
            placement={"tp": "S(1)"},
            layers=span,
        ),
        **_tensor("head.weight", (VOCAB, HIDDEN), ("head",), placement=rows),
    }
    x, wide = (1, SEQ, HIDDEN), (1, SEQ, 4 * HIDDEN)

    def operand(tensor: str, shape: tuple[int, ...], **placement: str) -> OperandRecord:
        return OperandRecord(tensor=tensor, shape=shape, placement=placement)

    linear = {"what": "op", "target": "aten.linear.default"}
    result["layers.*.up"] = PlacementRecord(
        **linear,  # pyright: ignore[reportArgumentType]
        layers=span,
        inputs=(
            operand("x", x),
            operand("layers.*.up.weight", (4 * HIDDEN, HIDDEN), tp="S(0)"),
        ),
        outputs=(operand("h", wide, tp="S(2)"),),
    )
    result["layers.*.down"] = PlacementRecord(
        **linear,  # pyright: ignore[reportArgumentType]
        layers=span,
        inputs=(
            operand("h", wide, tp="S(2)"),
            operand("layers.*.down.weight", (HIDDEN, 4 * HIDDEN), tp="S(1)"),
        ),
        outputs=(operand("y", x, tp="P(sum)"),),
    )
    result["layers.*.add"] = PlacementRecord(
        what="op",
        target="aten.add.Tensor",
        layers=span,
        inputs=(operand("x", x), operand("y", x)),
        outputs=(operand("z", x),),
    )
    return result


def sample(layers: int = 4) -> Plan:
    """The plan. Micro-batches: 64 / (4 x 2) = 8."""
    p = Parallelism(pp=2, dp_shard=4, tp=2, zero=1, micro_batch_size=2).derive(64)
    per_layer = 8 * HIDDEN * HIDDEN
    blocks = (
        BlockRecord(name="embed", kind=0, ops=1, parameters=VOCAB * HIDDEN),
        *(
            BlockRecord(name=f"layers.{i}", kind=1, ops=3, parameters=per_layer)
            for i in range(layers)
        ),
        BlockRecord(name="head", kind=2, ops=2, parameters=VOCAB * HIDDEN),
    )
    parameters = sum(b.parameters for b in blocks)
    cut = 1 + layers // 2
    held = (blocks[:cut], blocks[cut:])
    stages = tuple(
        StageRecord(
            index=k,
            blocks=tuple(b.name for b in part),
            chunks=(len(part),),
            ops=sum(b.ops for b in part),
            ranks=tuple(range(8 * k, 8 * k + 8)),
            forward_s=0.010 + 0.001 * k,
            backward_s=0.020,
            send_s=0.0005 if k == 0 else 0.0,
            memory=_memory(sum(b.parameters for b in part)),  # 2 bytes over tp 2
        )
        for k, part in enumerate(held)
    )
    pipeline = step_time(
        "1f1b",
        [s.forward_s for s in stages],
        [s.backward_s for s in stages],
        [s.send_s for s in stages],
        8,
    ).total_s
    after, optimizer, tp_comm, bubble = 0.012, 0.004, 0.020, 0.030
    step = pipeline + after
    breakdown = BreakdownRecord(
        compute=pipeline - tp_comm - bubble,
        tp_comm=tp_comm,
        dp_comm_exposed=after - optimizer,
        pp_bubble=bubble,
        optimizer=optimizer,
    )
    flops = 0.45 * step * 16 * PEAK
    return Plan(
        model=ModelRecord(
            name="sample",
            source="object:Sample",
            parameters=parameters,
            trainable_parameters=parameters,
            graph_hash="0" * 64,
            seq_len=SEQ,
            blocks=blocks,
        ),
        cluster=ClusterRecord(
            text="16xA100",
            num_gpus=16,
            groups=(
                NodeGroupRecord(
                    device="A100-80GB-SXM",
                    memory_bytes=LIMIT,
                    hbm_bytes_per_s=2.039e12,
                    nodes=2,
                    gpus_per_node=8,
                    link="NVSwitch",
                    link_bytes_per_s=300e9,
                ),
            ),
            network="HDR InfiniBand",
            network_bytes_per_s=25e9,
            network_latency_s=5e-6,
        ),
        workload=Training(global_batch=64, seq_len=SEQ),
        parallelism=p,
        mesh=MeshRecord(axes=tuple(AxisRecord(name=n, size=s) for n, s in p.axes)),
        stages=stages,
        recompute={"layers.0": "full"},
        placements=_placements(layers),
        collectives=_collectives(layers),
        estimate=EstimateRecord(
            step_time_s=step,
            after_pipeline_s=after,
            samples_per_s=64 / step,
            tokens_per_s_per_gpu=64 * SEQ / step / 16,
            model_flops=flops,
            hardware_flops=1.1 * flops,
            peak_flops_per_s=PEAK,
            peak_dtype="bf16",
            mfu=0.45,
            hfu=1.1 * 0.45,
            breakdown=breakdown,
            memory_per_stage=tuple(s.memory for s in stages),
        ),
        certificate=CertificateRecord(
            status="feasible",
            objective="step_time",
            objective_s=step,
            lower_bound_s=0.9 * step,
            gap=(step - 0.9 * step) / step,
            enumerated=5,
            pruned=2,
            solved=2,
            infeasible=1,
            solver=SolverRecord(name="CP-SAT", version="9.15"),
            constraints=("tp divides a node",),
            pins={"tp": 2},
        ),
        alternatives=(
            AlternativeRecord(
                parallelism=Parallelism(dp_shard=16, zero=3, micro_batch_size=4),
                step_time_s=1.2 * step,
                recipe="FSDP",
                why="gathers parameters twice a micro-batch",
            ),
        ),
        warnings=("replicated: unknown op my::op",),
        provenance=ProvenanceRecord(
            planner_version="0.1.0", torch_version="2.14.1", stack="compiled"
        ),
    )


def _collectives(layers: int) -> tuple[CollectiveRecord, ...]:
    activation = 2 * 1 * SEQ * HIDDEN * 2
    result: list[CollectiveRecord] = []
    for stage in (0, 1):
        result.append(
            CollectiveRecord(
                where="layers.*.down",
                kind="all_reduce",
                axis="tp",
                phase="forward",
                stage=stage,
                group_size=2,
                bytes=activation,
                count_per_step=8 * max(1, layers // 2),
                time_s=0.002,
            )
        )
        result.append(
            CollectiveRecord(
                where="gradients",
                kind="reduce_scatter",
                axis="dp_shard",
                phase="step",
                stage=stage,
                group_size=4,
                bytes=10**8,
                count_per_step=1,
                time_s=0.008,
            )
        )
    result.append(
        CollectiveRecord(
            where="stage 0 to 1",
            kind="p2p",
            axis="pp",
            phase="forward",
            group_size=2,
            bytes=activation,
            count_per_step=8,
            time_s=0.0005,
        )
    )
    return tuple(result)


def edited(plan: Plan, path: str, value: object) -> Plan:
    """The plan with one value of its JSON replaced: ``path`` is keys and indexes
    joined by ``/``."""
    data = json.loads(plan.to_json())
    keys = path.split("/")
    at: Any = data
    for key in keys[:-1]:
        at = at[int(key)] if isinstance(at, list) else at[key]
    last = keys[-1]
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return parse_plan(json.dumps(data))
