"""Prices that a plan does not hold: other placements of one op, a little more hardware.

Everything here prices the model again, so it needs a plan whose model has a name.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from cost_models.hardware import ClusterSpec
from passes.ir import Op
from planner.document import families
from planner.errors import PlannerError
from planner.plan.documents import Document
from planner.search.blocks import BlockProblem, BlockSolution, BoundaryState
from planner.search.driver import Limits, Search
from planner.search.job import Configuration, Job, Priced
from planner.search.mesh import Mesh
from planner.search.strategies import Strategy
from planner.workload import Training

#: How much more: one GiB of memory, a tenth of a bandwidth.
MORE_BYTES = 2**30
MORE_BANDWIDTH = 1.10


@dataclass(frozen=True, slots=True)
class Base:
    """A document's job, and its configuration priced again."""

    job: Job
    priced: Priced
    global_batch: int

    @classmethod
    def of(cls, document: Document) -> Base:
        """Traces and prices the model; PlannerError where it has no name."""
        from planner.api import configuration_from, job_of, layout_from

        job = job_of(document)
        c = configuration_from(job, document)
        workload = document.workload
        assert isinstance(workload, Training)
        assert workload.global_batch is not None
        return cls(job, job.price(c, layout_from(job, document)), workload.global_batch)

    @property
    def configuration(self) -> Configuration:
        return self.priced.configuration


# ---- a little more hardware ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """With ``what`` more, the same shape steps in ``step_s`` (now ``now_s``)."""

    what: str
    now_s: float
    step_s: float

    @property
    def saved(self) -> float:
        """Share of the step that it saves."""
        return 1 - self.step_s / self.now_s


def gains(base: Base) -> tuple[Gain, ...]:
    """What one more GiB per GPU and a tenth more of each bandwidth would buy, the
    shape of the plan held fixed; memory may change recompute and stage cuts."""
    job, c, now = base.job, base.configuration, base.priced.terms.total_s
    result: list[Gain] = []
    wider = _with(job, _more_memory(job.cluster), job.limit_bytes + MORE_BYTES)
    found = Search(wider, base.global_batch, Limits({})).solve(c)
    best = now if found is None else min(now, found.terms.total_s)
    result.append(Gain("1 GiB more memory per GPU", now, best))
    for what, cluster in _faster(job.cluster):
        priced = _with(job, cluster, job.limit_bytes).price(c, base.priced.layout)
        result.append(Gain(what, now, priced.terms.total_s))
    return tuple(result)


def _with(job: Job, cluster: ClusterSpec, limit_bytes: float) -> Job:
    """The same model and workload on another cluster."""
    return Job(
        job.graph,
        cluster,
        job.stack,
        precision=job.precision,
        optimizer=job.optimizer,
        training=job.training,
        recipe=job.recipe,
        memory_limit_bytes=limit_bytes,
        graph_at_cp=job.graph_at_cp,
        pinned=job.pinned,
    )


def _more_memory(cluster: ClusterSpec) -> ClusterSpec:
    groups = tuple(
        replace(
            g,
            device=replace(g.device, memory_bytes=g.device.memory_bytes + MORE_BYTES),
        )
        for g in cluster.groups
    )
    return replace(cluster, groups=groups)


def _faster(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    """The cluster with a tenth more of each bandwidth that it uses."""
    result: list[tuple[str, ClusterSpec]] = []
    if cluster.gpus_per_node > 1:
        groups = tuple(
            replace(
                g,
                link=replace(g.link, bytes_per_s=g.link.bytes_per_s * MORE_BANDWIDTH),
            )
            for g in cluster.groups
        )
        extra = cluster.groups[0].link.bytes_per_s * (MORE_BANDWIDTH - 1)
        what = f"10% more bandwidth inside a node ({extra * 8 / 1e9:.3g} Gb/s per GPU)"
        result.append((what, replace(cluster, groups=groups)))
    if sum(g.nodes for g in cluster.groups) > 1:
        network = cluster.network
        faster = replace(
            network,
            bytes_per_s=network.bytes_per_s * MORE_BANDWIDTH,
            port_bytes_per_s=network.port_bytes_per_s * MORE_BANDWIDTH,
        )
        extra = network.bytes_per_s * (MORE_BANDWIDTH - 1)
        what = f"10% more between nodes ({extra * 8 / 1e9:.3g} Gb/s per GPU)"
        result.append((what, replace(cluster, network=faster)))
    return result


# ---- one op ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement of one op. ``op_s``: its own forward and backward on one rank for one
    micro-batch; ``block_s``: its block's, with communication and with every other op
    of the block at its best for this choice; None: no legal block has it."""

    label: str
    chosen: bool
    op_s: float
    block_s: float | None


@dataclass(frozen=True, slots=True)
class OpStory:
    """One op of the plan: where it is, what it costs, what else it could be.

    ``flops`` and times: forward and backward of one rank and micro-batch; ``peak``:
    share of the dense peak that its product reaches. ``choices``: best first.
    """

    key: str
    target: str
    kind: str
    layers: str | None
    forward_s: float
    backward_s: float
    flops: float
    utilization: float
    choices: tuple[Choice, ...]


def resolve(document: Document, name: str) -> str:
    """The placement key that ``name`` means: a key, a key with a layer's number, or a
    bare op name that occurs once. PlannerError names the nearest keys."""
    keys = [k for k, r in document.placements.items() if r.what == "op"]
    if name in keys:
        return name
    starred = re.sub(r"(^|\.)\d+(?=[./]|$)", r"\1*", name, count=1)
    if starred in keys:
        return starred
    record = document.placements.get(name) or document.placements.get(starred)
    if record is not None:  # a parameter: the op that reads it
        wanted = record.outputs[0].tensor
        for key in keys:
            if any(o.tensor == wanted for o in document.placements[key].inputs):
                return key
    ends = [k for k in keys if k.endswith(f"/{name}")]
    if len(ends) == 1:
        return ends[0]
    near = ends or difflib.get_close_matches(starred, keys, 3, 0.3)
    raise PlannerError(
        "no such op in the plan", name, f"nearest: {', '.join(near[:4])}"
    )


def op_story(base: Base, key: str) -> OpStory:
    """Price of the op that ``key`` names, and of its other placements."""
    job, c = base.job, base.configuration
    pattern, _, op_name = key.rpartition("/")
    family = next((f for f in families(job) if f.pattern == pattern), None)
    if family is None:
        raise PlannerError("the plan is of another model", key, "plan this model again")
    block = job.chain[family.run][0]
    solution = base.priced.solutions[family.run]
    graph = job.graph_for(c.micro_batch, c.mesh.cp)
    index = next(
        (i for i in range(block.start, block.stop) if graph.ops[i].name == op_name),
        None,
    )
    if index is None:
        raise PlannerError("the plan is of another model", key, "plan this model again")
    op = graph.ops[index]
    chosen = solution.strategies[index - block.start]
    pricer, _ = job.pricer(c.micro_batch, c.mesh.cp)
    price = pricer.price(index, chosen.dim, c.mesh.tp, c.mesh.ep)
    flops = price.forward_flops + price.backward_flops
    seconds = price.forward_s + price.backward_s
    precision = job.precision if job.device.supports(job.precision) else "fp32"
    peak = job.device.peak(precision)
    return OpStory(
        key,
        op.target,
        op.kind.name.lower(),
        family.layers,
        price.forward_s,
        price.backward_s,
        flops,
        flops / seconds / peak if seconds else 0.0,
        _choices(base, family.run, index, chosen, solution),
    )


def _choices(
    base: Base, run: int, index: int, chosen: Strategy, solution: BlockSolution
) -> tuple[Choice, ...]:
    job, c = base.job, base.configuration
    pricer, _ = job.pricer(c.micro_batch, c.mesh.cp)
    op = job.graph_for(c.micro_batch, c.mesh.cp).ops[index]
    found: list[Choice] = []
    for strategy in _problem(base, run, solution).strategies[index]:
        price = pricer.price(index, strategy.dim, c.mesh.tp, c.mesh.ep)
        if strategy == chosen:
            block: BlockSolution | None = solution
        else:
            problem = _problem(base, run, solution)
            problem.strategies[index] = (strategy,)
            block = problem.solve()
        seconds = None
        if block is not None:
            seconds = block.forward_s + block.backward_s
            seconds += block.comm_forward_s + block.comm_backward_s
        found.append(
            Choice(
                strategy_label(op, strategy),
                strategy == chosen,
                price.forward_s + price.backward_s,
                seconds,
            )
        )
    return tuple(
        sorted(
            found,
            key=lambda x: (x.block_s is None, x.block_s or 0.0, not x.chosen, x.label),
        )
    )


def _problem(base: Base, run: int, solution: BlockSolution) -> BlockProblem:
    """The problem of one block with tied and pinned parameters as the plan has them."""
    job, c = base.job, base.configuration
    pricer, facts = job.pricer(c.micro_batch, c.mesh.cp)
    comm = job.comm(Mesh(tp=c.mesh.tp))
    held = {p.name: p.placement for p in solution.parameters}
    fixed = {n: p for n, p in held.items() if n in job.tied or n in job.pinned}
    return BlockProblem(
        facts,
        job.chain[run][0],
        pricer,
        lambda kind, nbytes: comm.seconds("tp", kind, nbytes),
        c.mesh.tp,
        BoundaryState(c.state),
        seconds_per_byte=c.rate,
        sequence_parallel=c.sequence_parallel,
        fixed=fixed,
        ep=c.mesh.ep,
        split_weights=c.split_weights,
    )


def strategy_label(op: Op, strategy: Strategy) -> str:
    """``inputs -> outputs`` of a strategy, e.g. ``S(1), S(0) -> P(sum)``."""
    ins = ", ".join(map(str, strategy.inputs)) or "-"
    outs = ", ".join(map(str, strategy.outputs))
    dim = {"": "replicated", "+": "partial sums"}.get(strategy.dim)
    if dim is None:
        size = op.space.dim(strategy.dim).size
        dim = f"divides {strategy.dim} ({size})"
    return f"{ins} -> {outs}: {dim}"


# ---- the heaviest ops ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op of a block on one rank for one micro-batch, and how many layers
    have it (``count``). ``flops`` of matrix products, ``vector_flops`` of the rest."""

    key: str
    kind: str
    flops: float
    vector_flops: float
    bytes: float
    seconds: float
    count: int


def op_costs(base: Base) -> tuple[OpCost, ...]:
    """Every op that takes time, heaviest first: one micro-batch, all its layers, one
    rank. Bytes are those of the local operands, once per direction and no more than
    HBM moves in the op's time (a fused op finds its inputs in registers)."""
    job, c = base.job, base.configuration
    graph = job.graph_for(c.micro_batch, c.mesh.cp)
    pricer, _ = job.pricer(c.micro_batch, c.mesh.cp)
    rows: list[OpCost] = []
    for family in families(job):
        block = job.chain[family.run][0]
        strategies = base.priced.solutions[family.run].strategies
        for index, strategy in zip(
            range(block.start, block.stop), strategies, strict=True
        ):
            op = graph.ops[index]
            price = pricer.price(index, strategy.dim, c.mesh.tp, c.mesh.ep)
            seconds = price.forward_s + price.backward_s
            if seconds <= 0:
                continue
            size = 0.0
            placed = zip(
                (*op.space.inputs, *op.space.outputs),
                (*strategy.inputs, *strategy.outputs),
                strict=True,
            )
            for operand, placement in placed:
                nbytes = graph.tensor(operand.tensor).nbytes
                size += nbytes / (c.mesh.tp if placement.kind == "S" else 1)
            passes = 3.0 if job.training else 1.0
            halved = any(p.kind == "S" for p in strategy.outputs)
            vector = passes * op.pointwise_flops / (c.mesh.tp if halved else 1)
            rows.append(
                OpCost(
                    f"{family.pattern}/{op.name}",
                    op.kind.name.lower(),
                    price.forward_flops + price.backward_flops,
                    vector,
                    min(passes * size, seconds * job.device.hbm_bytes_per_s),
                    seconds,
                    len(family.blocks),
                )
            )
    return tuple(sorted(rows, key=lambda r: -r.seconds * r.count))
