"""Write a priced configuration as the document of design section 7."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from passes.format import format_graph
from passes.ir import Block, Operand, OpGraph, Tensor, TensorKind
from planner.plan.names import format_range
from planner.plan.records import (
    BlockRecord,
    BreakdownRecord,
    ClusterRecord,
    CollectiveRecord,
    EstimateRecord,
    MemoryRecord,
    MeshRecord,
    ModelRecord,
    OperandRecord,
    PlacementRecord,
    ProvenanceRecord,
    StageRecord,
)
from planner.search.blocks import BlockSolution
from planner.search.job import Configuration, Job, Priced
from planner.search.placements import Placement
from planner.search.rank_memory import parameter_groups
from planner.search.stages import MODES
from planner.search.strategies import Strategy
from planner.workload import Parallelism, Training

#: Matrix-unit dtype whose dense peak MFU is taken against.
PEAK_DTYPE = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "tf32": "tf32"}


def graph_hash(graph: OpGraph) -> str:
    """A digest of the graph's text and its tensors: equal models, equal hashes."""
    digest = hashlib.sha256(format_graph(graph).encode())
    for tensor in graph.tensors:
        digest.update(repr((tensor.name, tensor.shape, tensor.dtype)).encode())
    return digest.hexdigest()[:32]


def owners(graph: OpGraph) -> dict[str, tuple[Block, ...]]:
    """The blocks that read each parameter or buffer, the first one first."""
    found: dict[str, dict[int, Block]] = {}
    for block in graph.blocks:
        for op in graph.ops[block.start : block.stop]:
            for name in op.inputs:
                if graph.tensor(name).kind in (
                    TensorKind.PARAMETER,
                    TensorKind.BUFFER,
                ):
                    found.setdefault(name, {})[block.index] = block
    for tensor in graph.tensors:
        if tensor.kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
            found.setdefault(tensor.name, {graph.blocks[0].index: graph.blocks[0]})
    return {name: tuple(blocks.values()) for name, blocks in found.items()}


def model_record(graph: OpGraph, name: str, source: str) -> ModelRecord:
    """The model as traced."""
    held = owners(graph)
    numel = dict.fromkeys((b.index for b in graph.blocks), 0)
    for tensor in graph.parameters:
        numel[held[tensor.name][0].index] += tensor.numel
    blocks = tuple(
        BlockRecord(
            name=b.name, kind=b.kind, ops=b.stop - b.start, parameters=numel[b.index]
        )
        for b in graph.blocks
    )
    return ModelRecord(
        name=name,
        source=source,
        parameters=graph.parameter_count,
        trainable_parameters=sum(t.numel for t in graph.parameters if t.trainable),
        buffer_bytes=sum(
            t.nbytes for t in graph.tensors if t.kind is TensorKind.BUFFER
        ),
        graph_hash=graph_hash(graph),
        seq_len=graph.seq_len,
        blocks=blocks,
        tied={t.name: t.aliases for t in graph.parameters if t.aliases},
    )


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """Blocks of one rank by chunk, with the recompute mode of each."""

    chunks: tuple[tuple[int, ...], ...]
    modes: dict[int, str]


def place_blocks(job: Job, priced: Priced) -> tuple[StageBlocks, ...]:
    """Which block runs where: chunks are handed out in execution order."""
    c = priced.configuration
    sizes = [sum(sum(row) for row in counts) for counts in priced.layout]
    virtual: list[tuple[int, int]] = []  # (rank, chunk) in execution order
    for chunk in range(c.virtual):
        virtual.extend((k, chunk) for k in range(c.mesh.pp))
    split = [_split(size, c.virtual) for size in sizes]
    chunks: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    position = 0
    for rank, chunk in virtual:
        count = split[rank][chunk]
        chunks[rank].append(tuple(range(position, position + count)))
        position += count
    run_of: list[int] = []
    for run, (_, count) in enumerate(job.chain):
        run_of.extend([run] * count)
    result: list[StageBlocks] = []
    for rank, counts in enumerate(priced.layout):
        left = [list(row) for row in counts]
        modes: dict[int, str] = {}
        for index in (i for chunk in chunks[rank] for i in chunk):
            row = left[run_of[index]]
            for q in (2, 1, 0):
                if row[q] > 0:
                    row[q] -= 1
                    modes[index] = MODES[q]
                    break
        result.append(StageBlocks(tuple(chunks[rank]), modes))
    return tuple(result)


def _split(size: int, parts: int) -> list[int]:
    base, extra = divmod(size, parts)
    return [base + (i < extra) for i in range(parts)]


def parallelism_of(job: Job, priced: Priced) -> Parallelism:
    """The configuration in the words of the interface."""
    c = priced.configuration
    mesh = c.mesh
    full = tuple(sum(row[2] for row in counts) for counts in priced.layout)
    selective = any(row[1] for counts in priced.layout for row in counts)
    total = [sum(sum(row) for row in counts) for counts in priced.layout]
    recompute: Any = full
    if not any(full):
        recompute = "selective" if selective else "none"
    elif list(full) == total:
        recompute = "full"
    return Parallelism(
        pp=mesh.pp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        ep=mesh.ep,
        tp=mesh.tp,
        vpp=c.virtual,
        sequence_parallel=c.state == "sequence",
        zero=c.zero,
        micro_batch_size=c.micro_batch,
        num_micro_batches=c.micro_batches,
        schedule=c.schedule,  # type: ignore[arg-type]
        recompute=recompute,
    )


def stage_records(
    job: Job, priced: Priced, blocks: Sequence[StageBlocks]
) -> tuple[StageRecord, ...]:
    """Stages with their blocks, ranks, times and memory."""
    c = priced.configuration
    graph = job.graph
    per_stage = c.mesh.size // c.mesh.pp
    result: list[StageRecord] = []
    for k, held in enumerate(blocks):
        indices = [i for chunk in held.chunks for i in chunk]
        result.append(
            StageRecord(
                index=k,
                blocks=tuple(graph.blocks[i].name for i in indices),
                chunks=tuple(len(chunk) for chunk in held.chunks),
                ops=sum(graph.blocks[i].stop - graph.blocks[i].start for i in indices),
                ranks=tuple(range(k * per_stage, (k + 1) * per_stage)),
                forward_s=priced.terms.forward_s[k],
                backward_s=priced.terms.backward_s[k],
                send_s=priced.terms.send_s,
                memory=MemoryRecord.of(priced.memory[k]),
            )
        )
    return tuple(result)


def hardware_flops(job: Job, priced: Priced) -> tuple[float, float]:
    """(model FLOPs, FLOPs that run) of one step over all ranks."""
    c = priced.configuration
    mesh = c.mesh
    graph, batch = job.graph, job.graph.batch
    samples = c.micro_batch * c.micro_batches * mesh.dp
    per_sample = sum(op.forward_flops for op in graph.ops)
    if job.training:
        per_sample += sum(op.backward_flops for op in graph.ops)
    model = per_sample / batch * samples
    # every replica and every micro-batch repeats what the ranks of a replica do
    repeat = c.micro_batches * mesh.dp * mesh.cp * mesh.tp
    again = 0.0
    for counts in priced.layout:
        for row, s in zip(counts, priced.solutions, strict=True):
            again += row[2] * s.forward_flops + row[1] * s.core_flops
    return model, model + again * repeat


def estimate_record(
    job: Job, priced: Priced, stages: Sequence[StageRecord]
) -> EstimateRecord:
    """Step time, rates, utilisation and where the time goes."""
    t, c = priced.terms, priced.configuration
    gpus = job.cluster.num_gpus
    samples = c.micro_batch * c.micro_batches * c.mesh.dp
    model, hardware = hardware_flops(job, priced)
    dtype = PEAK_DTYPE.get(job.precision, "fp32")
    peak = job.device.peak(dtype)
    total = t.total_s * gpus * peak
    prices = [g.device.price_per_hour for g in job.cluster.groups]
    cost = None
    if all(p is not None for p in prices):
        cost = sum(
            (p or 0.0) * g.nodes * g.gpus_per_node
            for p, g in zip(prices, job.cluster.groups, strict=True)
        )
    return EstimateRecord(
        step_time_s=t.total_s,
        after_pipeline_s=t.after_pipeline_s,
        samples_per_s=samples / t.total_s,
        tokens_per_s_per_gpu=samples * job.graph.seq_len / t.total_s / gpus,
        model_flops=model,
        hardware_flops=hardware,
        peak_flops_per_s=peak,
        peak_dtype=dtype,
        mfu=model / total,
        hfu=hardware / total,
        cost_per_hour=cost,
        breakdown=BreakdownRecord(
            compute=t.compute,
            tp_comm=t.tp_comm,
            cp_comm=t.cp_comm,
            ep_comm=t.ep_comm,
            dp_comm_exposed=t.dp_comm_exposed,
            pp_p2p=t.pp_p2p,
            pp_bubble=t.pp_bubble,
            recompute=t.recompute,
            optimizer=t.optimizer,
            launch=t.launch,
        ),
        memory_per_stage=tuple(s.memory for s in stages),
    )


# ---- placements ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Family:
    """Blocks of one kind that one pattern names."""

    run: int
    blocks: tuple[Block, ...]
    pattern: str
    layers: str | None

    def rename(self, name: str) -> str:
        own = self.blocks[0].name
        if name == own or name.startswith(own + "."):
            return self.pattern + name[len(own) :]
        return name


def families(job: Job) -> Iterator[_Family]:
    """Blocks grouped by kind and by the number in which their names differ."""
    by_kind: dict[int, list[Block]] = {}
    for block in job.graph.blocks:
        by_kind.setdefault(block.kind, []).append(block)
    seen: set[str] = set()
    first_run: dict[int, int] = {}
    for run, (block, _) in enumerate(job.chain):
        first_run.setdefault(block.kind, run)
    for kind, blocks in by_kind.items():
        pattern = _pattern([b.name for b in blocks])
        if len(blocks) > 1 and pattern is not None and pattern[0] not in seen:
            seen.add(pattern[0])
            layers = format_range(pattern[1])
            yield _Family(first_run[kind], tuple(blocks), pattern[0], layers)
        else:
            for block in blocks:
                yield _Family(first_run[kind], (block,), block.name, None)


def _pattern(names: Sequence[str]) -> tuple[str, list[int]] | None:
    split = [n.split(".") for n in names]
    if len({len(p) for p in split}) != 1:
        return None
    differ = [i for i in range(len(split[0])) if len({p[i] for p in split}) > 1]
    if len(differ) != 1 or not all(p[differ[0]].isdigit() for p in split):
        return None
    parts = [*split[0]]
    parts[differ[0]] = "*"
    return ".".join(parts), [int(p[differ[0]]) for p in split]


def placement_records(job: Job, priced: Priced) -> dict[str, PlacementRecord]:
    """Every parameter, buffer and op, with wildcards over equal layers."""
    c = priced.configuration
    core = job.graph_for(c.micro_batch, c.mesh.cp)
    result: dict[str, PlacementRecord] = {}
    held = owners(job.graph)
    lies = _parameter_placements(job, priced)
    covered: set[str] = set()
    for family in families(job):
        block = job.chain[family.run][0]
        solution = priced.solutions[family.run]
        own = family.blocks[0]
        names = _rep_names(job.graph, own, block, core)
        for op, strategy in zip(
            core.ops[block.start : block.stop], solution.strategies, strict=True
        ):
            for operand in op.space.inputs:
                tensor = core.tensor(operand.tensor)
                if tensor.kind not in (TensorKind.PARAMETER, TensorKind.BUFFER):
                    continue
                real = names.get(tensor.name, tensor.name)
                if real in covered:
                    continue
                covered.add(real)
                wild = family.layers if real.startswith(own.name + ".") else None
                if wild:
                    covered.update(
                        b.name + real[len(own.name) :] for b in family.blocks
                    )
                key = family.rename(real) if wild else real
                blocks = (
                    (family.pattern,)
                    if wild
                    else tuple(b.name for b in held.get(real, (own,)))
                )
                result[key] = _stored_record(
                    job, c, tensor, key, lies.get(tensor.name, {}), wild, blocks
                )
            key = f"{family.pattern}/{op.name}"
            result[key] = PlacementRecord(
                what="op",
                layers=family.layers,
                target=op.target,
                inputs=tuple(
                    _operand(job, c, family, core, o, p, strategy, block, names)
                    for o, p in zip(op.space.inputs, strategy.inputs, strict=True)
                ),
                outputs=tuple(
                    _operand(job, c, family, core, o, p, strategy, block, names)
                    for o, p in zip(op.space.outputs, strategy.outputs, strict=True)
                ),
            )
    for tensor in job.graph.tensors:
        stored = tensor.kind in (TensorKind.PARAMETER, TensorKind.BUFFER)
        if stored and tensor.name not in covered:
            blocks = tuple(b.name for b in held[tensor.name])
            result[tensor.name] = _stored_record(
                job, c, tensor, tensor.name, {}, None, blocks
            )
    return result


def _rep_names(
    graph: OpGraph, own: Block, block: Block, core: OpGraph
) -> dict[str, str]:
    """Leaf names of the representative block as the family's first block has them."""
    names: dict[str, str] = {}
    mine = graph.ops[own.start : own.stop]
    rep = core.ops[block.start : block.stop]
    for a, b in zip(rep, mine, strict=True):
        names.update(zip(a.inputs, b.inputs, strict=True))
    return names


def _parameter_placements(job: Job, priced: Priced) -> dict[str, dict[str, str]]:
    """Mesh axis to placement text of each parameter of the collapsed graph."""
    c = priced.configuration
    result: dict[str, dict[str, str]] = {}
    for solution in priced.solutions:
        for p in solution.parameters:
            axes: dict[str, str] = {}
            if c.mesh.tp > 1 and p.placement.kind == "S":
                axes["tp"] = str(p.placement)
            if c.mesh.ep > 1 and p.expert:
                axes["ep"] = "S(0)"
            divided = p.name not in job.memory_setup(c).whole
            if c.zero >= 3 and c.mesh.dp_shard > 1 and divided:
                axes["dp_shard"] = "S(0)"
            result[p.name] = axes
    if c.mesh.tp > 1:
        result.update(_buffer_placements(job, priced))
    return result


def _buffer_placements(job: Job, priced: Priced) -> dict[str, dict[str, str]]:
    """Buffers lie as the ops that read them want them."""
    core = job.collapsed.graph
    result: dict[str, dict[str, str]] = {}
    for (block, _), solution in zip(job.chain, priced.solutions, strict=True):
        ops = core.ops[block.start : block.stop]
        for op, strategy in zip(ops, solution.strategies, strict=True):
            for operand, placement in zip(
                op.space.inputs, strategy.inputs, strict=True
            ):
                buffer = core.tensor(operand.tensor).kind is TensorKind.BUFFER
                if buffer and placement.kind == "S":
                    result[operand.tensor] = {"tp": str(placement)}
    return result


def _stored_record(
    job: Job,
    c: Configuration,
    tensor: Tensor,
    key: str,
    axes: dict[str, str],
    layers: str | None,
    blocks: tuple[str, ...],
) -> PlacementRecord:
    parameter = tensor.kind is TensorKind.PARAMETER
    return PlacementRecord(
        what="parameter" if parameter else "buffer",
        layers=layers,
        dtype=tensor.dtype,
        trainable=tensor.trainable,
        blocks=blocks,
        outputs=(
            OperandRecord(
                tensor=key,
                shape=tensor.shape,
                placement=axes,
                padded=_uneven(tensor.shape, axes.get("tp"), c.mesh.tp),
            ),
        ),
    )


def _uneven(shape: Sequence[int], text: str | None, size: int) -> bool:
    if not text or not text.startswith("S(") or ";" in text:
        return False
    axis = int(text[2:-1])
    return shape[axis] % size != 0


def _operand(
    job: Job,
    c: Configuration,
    family: _Family,
    core: OpGraph,
    operand: Operand,
    placement: Placement,
    strategy: Strategy,
    block: Block,
    names: dict[str, str],
) -> OperandRecord:
    tensor = core.tensor(operand.tensor)
    if tensor.kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
        real = names.get(tensor.name, tensor.name)
        wild = family.layers and real.startswith(family.blocks[0].name + ".")
        name = family.rename(real) if wild else real
    elif tensor.kind is TensorKind.INPUT:
        name = tensor.name
    else:
        inside = any(
            tensor.name in op.outputs for op in core.ops[block.start : block.stop]
        )
        where = family.pattern if inside else f"{family.pattern}/in"
        name = f"{where}/{tensor.name}"
    axes: dict[str, str] = {}
    if c.mesh.tp > 1 and placement.kind != "R":
        axes["tp"] = str(placement)
    if c.mesh.ep > 1 and tensor.kind is TensorKind.PARAMETER and len(tensor.shape) == 3:
        axes["ep"] = "S(0)"
    return OperandRecord(
        tensor=name,
        shape=tensor.shape,
        placement=axes,
        padded=strategy.padded and _uneven(tensor.shape, axes.get("tp"), c.mesh.tp),
    )


# ---- collectives -----------------------------------------------------------------


def collective_records(
    job: Job, priced: Priced, blocks: Sequence[StageBlocks]
) -> tuple[CollectiveRecord, ...]:
    """Every collective of a step, per stage; equal calls of a stage are counted."""
    rows: dict[tuple[Any, ...], tuple[int, float]] = {}

    def add(
        where: str,
        kind: str,
        axis: str,
        phase: str,
        stage: int,
        size: int,
        nbytes: float,
        count: int,
        seconds: float,
    ) -> None:
        if size <= 1 or nbytes <= 0 or count <= 0:
            return
        key = (where, kind, axis, phase, stage, size, -(-int(nbytes) // 1))
        rows[key] = (rows.get(key, (0, 0.0))[0] + count, seconds)

    c = priced.configuration
    comm, sharding = job.comm(c.mesh), job.sharding(c)
    patterns = {f.run: f.pattern for f in reversed(list(families(job)))}
    m = c.micro_batches
    for stage, counts in enumerate(priced.layout):
        for run, (row, s) in enumerate(zip(counts, priced.solutions, strict=True)):
            n = sum(row)
            if not n:
                continue
            label = patterns.get(run, job.chain[run][0].name)
            for item in s.comms:
                where = f"{label}/{item.where}"
                args = (c.mesh.tp, item.nbytes)
                seconds = item.time_s
                add(where, item.kind, "tp", item.phase, stage, *args, n * m, seconds)
                if item.phase == "forward":
                    add(
                        where, item.kind, "tp", "recompute", stage, *args,
                        row[2] * m, seconds,
                    )  # fmt: skip
            _inner_collectives(job, c, s, label, stage, n * m, add)
            if c.zero >= 3:
                numel = sum(p.numel for p in s.parameters)
                size = c.mesh.dp_shard * c.mesh.cp
                gathered = numel * sharding.parameter_bytes
                reduced = numel * sharding.gradient_bytes
                gather = comm.seconds("dp_shard", "all_gather", gathered)
                scatter = comm.seconds("dp_shard", "reduce_scatter", reduced)
                for phase in ("forward", "backward"):
                    add(
                        f"{label}/parameters", "all_gather", "dp_shard", phase,
                        stage, size, gathered, n * m, gather,
                    )  # fmt: skip
                add(
                    f"{label}/gradients", "reduce_scatter", "dp_shard", "backward",
                    stage, size, reduced, n * m, scatter,
                )  # fmt: skip
            elif sharding.scatters_each_micro_batch:
                numel = sum(p.numel for p in s.parameters if p.trainable)
                reduced = numel * sharding.gradient_bytes
                add(
                    f"{label}/gradients", "reduce_scatter", "dp_shard", "backward",
                    stage, c.mesh.dp_shard * c.mesh.cp, reduced, n * m,
                    comm.seconds("dp_shard", "reduce_scatter", reduced),
                )  # fmt: skip
        _step_collectives(job, c, priced, counts, stage, add)
    for stage in range(c.mesh.pp):
        for phase in ("forward", "backward"):
            if c.mesh.pp == 1:
                break
            hops = c.virtual if stage + 1 < c.mesh.pp else c.virtual - 1
            sent = max(
                s.output_bytes
                for s, row in zip(priced.solutions, priced.layout[stage], strict=True)
                if sum(row)
            ) or max(s.output_bytes for s in priced.solutions)
            add(
                f"stage {stage}", "p2p", "pp", phase, stage, 2, sent, hops * m,
                priced.terms.send_s,
            )  # fmt: skip
    return tuple(
        CollectiveRecord(
            where=key[0],
            kind=key[1],
            axis=key[2],
            phase=key[3],
            stage=key[4],
            group_size=key[5],
            bytes=key[6],
            count_per_step=count,
            time_s=seconds,
        )
        for key, (count, seconds) in rows.items()
    )


def _inner_collectives(
    job: Job,
    c: Configuration,
    s: BlockSolution,
    label: str,
    stage: int,
    count: int,
    add: Any,
) -> None:
    """Context- and expert-parallel traffic of a block."""
    comm = job.comm(c.mesh)
    if c.mesh.cp > 1 and s.attention_kv_bytes:
        nbytes = s.attention_kv_bytes * c.mesh.cp
        for kind, phase in (
            ("all_gather", "forward"),
            ("all_gather", "backward"),
            ("reduce_scatter", "backward"),
        ):
            add(
                f"{label}/attention", kind, "cp", phase, stage, c.mesh.cp, nbytes,
                count, comm.seconds("cp", kind, nbytes),
            )  # fmt: skip
    if c.mesh.ep > 1 and s.expert_tokens_bytes:
        nbytes = s.expert_tokens_bytes
        for phase in ("forward", "backward"):
            add(
                f"{label}/experts", "all_to_all", "ep", phase, stage, c.mesh.ep,
                nbytes, 2 * count, comm.seconds("ep", "all_to_all", nbytes),
            )  # fmt: skip


def _step_collectives(
    job: Job, c: Configuration, priced: Priced, counts: Any, stage: int, add: Any
) -> None:
    """Gradient sums and parameter gathers once per step."""
    if not job.training:
        return
    comm, sharding = job.comm(c.mesh), job.sharding(c)
    held = [
        (s, sum(r)) for s, r in zip(priced.solutions, counts, strict=True) if sum(r)
    ]
    groups = parameter_groups(job.memory_setup(c), held)
    elements = sum(g.elements for g in groups if g.trainable)
    nbytes = elements * sharding.gradient_bytes
    data, shard = c.mesh.dp * c.mesh.cp, c.mesh.dp_shard * c.mesh.cp
    if c.zero == 0:
        add(
            "gradients", "all_reduce", "dp", "step", stage, data, nbytes, 1,
            comm.seconds("dp", "all_reduce", nbytes),
        )  # fmt: skip
    else:
        if c.zero < 3:
            gathered = elements * sharding.parameter_bytes
            once = not sharding.scatters_each_micro_batch
            for kind, what, size in (
                ("reduce_scatter", "gradients", nbytes if once else 0.0),
                ("all_gather", "parameters", gathered),
            ):
                add(
                    what, kind, "dp_shard", "step", stage, shard, size, 1,
                    comm.seconds("dp_shard", kind, size),
                )  # fmt: skip
        across = nbytes / shard
        add(
            "gradients", "all_reduce", "dp_replicate", "step", stage,
            c.mesh.dp_replicate, across, 1,
            comm.seconds("dp_replicate", "all_reduce", across),
        )  # fmt: skip
    # under ZeRO-3 gradients are divided when these sums are taken
    left = shard if c.zero >= 3 else 1
    sync = sum(s.sync_bytes * n for s, n in held) / left
    add(
        "replicated gradients", "all_reduce", "tp", "step", stage, c.mesh.tp, sync, 1,
        comm.seconds("tp", "all_reduce", sync),
    )  # fmt: skip
    tied = [p.numel for s, _ in held for p in s.parameters if p.name in job.tied]
    if tied and c.mesh.pp > 1:
        size = max(tied) * sharding.gradient_bytes / left
        add(
            "tied gradients", "all_reduce", "pp", "step", stage, 2, size, 1,
            2 * comm.p2p(size),
        )  # fmt: skip


# ---- the rest --------------------------------------------------------------------


def recompute_record(job: Job, blocks: Iterable[StageBlocks]) -> dict[str, str]:
    """Block name to mode, for blocks that do not keep everything."""
    return {
        job.graph.blocks[i].name: mode
        for held in blocks
        for i, mode in held.modes.items()
        if mode != "none"
    }


def provenance(job: Job, ortools: str, torch: str, version: str) -> ProvenanceRecord:
    """Where the numbers are from."""
    sources: dict[str, tuple[str, ...]] = {}
    for group in job.cluster.groups:
        sources[group.device.name] = group.device.source
        sources[group.link.name] = group.link.source
    sources[job.cluster.network.name] = job.cluster.network.source
    return ProvenanceRecord(
        planner_version=version,
        torch_version=torch,
        ortools_version=ortools,
        stack=job.stack.name,
        sources={k: v for k, v in sources.items() if v},
    )


def common(
    job: Job,
    priced: Priced,
    *,
    name: str,
    source: str,
    workload: Training,
    definition: dict[str, Any] | None,
    warnings: Sequence[str],
    versions: tuple[str, str, str],
) -> dict[str, Any]:
    """The fields that a plan and a prediction share."""
    blocks = place_blocks(job, priced)
    stages = stage_records(job, priced, blocks)
    parallelism = parallelism_of(job, priced)
    version, torch, ortools = versions
    return {
        "model": model_record(job.graph, name, source),
        "cluster": ClusterRecord.of(job.cluster, definition),
        "workload": workload,
        "parallelism": parallelism,
        "mesh": MeshRecord.of(parallelism),
        "stages": stages,
        "recompute": recompute_record(job, blocks),
        "placements": placement_records(job, priced),
        "collectives": collective_records(job, priced, blocks),
        "estimate": estimate_record(job, priced, stages),
        "warnings": tuple(warnings),
        "provenance": provenance(job, ortools, torch, version),
    }
