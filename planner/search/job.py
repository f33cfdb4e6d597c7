"""One planning job: a graph, a cluster and a workload, with everything priced once.

A :class:`Job` answers "what do blocks cost under this mesh" and prices whole
configurations; the search chooses among them, ``predict`` asks about one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from cost_models.hardware import ClusterSpec
from cost_models.memory import OPTIMIZER_STATE_BYTES, RECIPES, MemoryLines
from cost_models.overlap import data_parallel
from cost_models.pipeline import in_flight
from cost_models.roofline import STREAM_EFFICIENCY, pointwise_time
from cost_models.stacks import StackProfile
from passes.ir import Block, Op, OpGraph, OpKind, TensorKind
from passes.lower import with_batch
from planner.errors import PlannerError
from planner.search.blocks import (
    BlockProblem,
    BlockSolution,
    BoundaryState,
    GraphFacts,
)
from planner.search.collapse import collapse
from planner.search.mesh import Mesh, MeshComm
from planner.search.placements import REPLICATED, Placement, shard
from planner.search.pricing import Pricer, expert_dims
from planner.search.rank_memory import (
    MemorySetup,
    activation_bytes,
    constant_bytes,
    parameter_groups,
    rank_memory,
    state_bytes,
    static_bytes,
)
from planner.search.stages import MODES, Counts, Run, StageProblem
from planner.search.step import (
    BlockTimes,
    Ending,
    Sharding,
    StepTerms,
    assemble,
    block_times,
)

STATES = ("replicated", "sequence", "batch", "feature")
#: Seconds that a saved byte is worth when a block is solved: a tie-break, and a price
#: at which 1 GB is worth a millisecond (more memory-thrifty Pareto points).
RATES = (1e-15, 1e-12)
#: Blocks of one run that make its activations the peak of any rank.
MANY = 10_000


@dataclass(frozen=True, slots=True)
class Configuration:
    """A shape of the search: everything but the stage layout."""

    mesh: Mesh
    micro_batch: int
    micro_batches: int
    zero: int = 0
    virtual: int = 1
    schedule: str = "1f1b"
    state: str = "replicated"
    rate: float = RATES[0]
    sequence_parallel: bool = True
    split_weights: bool = False  # tensor parallelism as frameworks run it


@dataclass(frozen=True, slots=True)
class Priced:
    """A configuration with a layout: its step, memory per rank and block solutions."""

    configuration: Configuration
    layout: tuple[Counts, ...]
    terms: StepTerms
    memory: tuple[MemoryLines, ...]
    solutions: tuple[BlockSolution, ...]  # one per run

    @property
    def fits(self) -> bool:
        return all(lines.over_bytes <= 0 for lines in self.memory)


GraphSource = Callable[[int], OpGraph]


class Job:
    """Prices configurations of one model on one cluster.

    ``graph``: of one sequence chunk; ``graph_at_cp(cp)`` gives the graph whose samples
    hold 1/cp of the tokens while attention still sees all keys. ``pinned``: tensor
    placements on the tensor axis; one pinned as replicated is not divided by ZeRO
    either.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: ClusterSpec,
        stack: StackProfile,
        *,
        precision: str,
        optimizer: str = "adamw",
        training: bool = True,
        recipe: str | None = None,
        memory_limit_bytes: float | None = None,
        graph_at_cp: GraphSource | None = None,
        pinned: Mapping[str, Placement] | None = None,
    ) -> None:
        self.pinned = dict(pinned or {})
        self.graph, self.cluster, self.stack = graph, cluster, stack
        self.collapsed = collapse(graph)
        self.device = cluster.device
        self.precision, self.optimizer, self.training = precision, optimizer, training
        self.recipe = recipe or _recipe(precision)
        limit = min(g.device.memory_bytes for g in cluster.groups)
        self.limit_bytes = min(limit, memory_limit_bytes or limit)
        self.graph_at_cp = graph_at_cp
        self.chain = tuple(
            zip(self.collapsed.graph.blocks, self.collapsed.counts, strict=True)
        )
        self.tied = self.collapsed.tied
        self._graphs: dict[tuple[int, int], OpGraph] = {}
        self._facts: dict[tuple[int, int], GraphFacts] = {}
        self._pricers: dict[tuple[int, int], Pricer] = {}
        self._solved: dict[tuple[object, ...], tuple[BlockSolution, ...] | None] = {}
        self._blocks: dict[tuple[object, ...], BlockSolution | None] = {}
        self._floors: dict[tuple[int, int, int, int], tuple[float, ...]] = {}
        self._comms: dict[Mesh, MeshComm] = {}

    # ---- blocks ----------------------------------------------------------------

    def graph_for(self, micro_batch: int, cp: int = 1) -> OpGraph:
        """The graph of one micro-batch of one context-parallel rank."""
        key = (micro_batch, cp)
        if key not in self._graphs:
            if cp == 1:
                base = self.collapsed.graph
            else:
                if self.graph_at_cp is None:
                    raise PlannerError(
                        "the model has no sequence to divide over cp", f"cp={cp}"
                    )
                base = collapse(self.graph_at_cp(cp)).graph
            self._graphs[key] = with_batch(base, micro_batch)
        return self._graphs[key]

    def pricer(self, micro_batch: int, cp: int) -> tuple[Pricer, GraphFacts]:
        """The prices and facts of one micro-batch's graph."""
        key = (micro_batch, cp)
        if key not in self._pricers:
            graph = self.graph_for(micro_batch, cp)
            self._facts[key] = GraphFacts.of(graph, self.collapsed.leaving)
            self._pricers[key] = Pricer(
                graph, self.device, self.stack, self.precision, self.training
            )
        return self._pricers[key], self._facts[key]

    def comm(self, mesh: Mesh) -> MeshComm:
        if mesh not in self._comms:
            self._comms[mesh] = MeshComm(self.cluster, mesh)
        return self._comms[mesh]

    def solutions(self, c: Configuration) -> tuple[BlockSolution, ...] | None:
        """One solution per run of the chain; None where the state is not legal."""
        mesh = c.mesh
        key = (
            mesh.tp,
            mesh.ep,
            mesh.cp,
            c.micro_batch,
            c.state,
            c.rate,
            c.sequence_parallel,
            c.split_weights,
        )
        if key not in self._solved:
            self._solved[key] = self._solve(c)
        return self._solved[key]

    def _solve(self, c: Configuration) -> tuple[BlockSolution, ...] | None:
        options: list[dict[str, Placement]] = [self.pinned]
        if self.tied and c.mesh.tp > 1:
            options = [
                {**dict.fromkeys(self.tied, placement), **self.pinned}
                for placement in (shard(0), REPLICATED, shard(1))
            ]
            options = options[:1] if c.split_weights else options
        best: tuple[float, tuple[BlockSolution, ...]] | None = None
        for fixed in options:
            found = self._solve_fixed(c, fixed)
            if found is None:
                continue
            total = sum(
                s.seconds * count
                for s, (_, count) in zip(found, self.chain, strict=True)
            )
            if best is None or total < best[0] * (1 - 1e-12):
                best = (total, found)
        return best[1] if best else None

    def _solve_fixed(
        self, c: Configuration, fixed: dict[str, Placement]
    ) -> tuple[BlockSolution, ...] | None:
        pricer, facts = self.pricer(c.micro_batch, c.mesh.cp)
        state = BoundaryState(c.state)
        if c.mesh.tp > 1 and not state_is_legal(facts, state, c.mesh.tp):
            return None
        tp_comm = self.comm(Mesh(tp=c.mesh.tp))

        def price(kind: str, nbytes: float) -> float:
            return tp_comm.seconds("tp", kind, nbytes)

        by_kind: dict[int, BlockSolution] = {}
        for block, _ in self.chain:
            if block.kind in by_kind:
                continue
            here = {n: p for n, p in fixed.items() if n in self._parameters(block)}
            key = (
                block.kind,
                c.mesh.tp,
                c.mesh.ep,
                c.mesh.cp,
                c.micro_batch,
                c.state,
                c.rate,
                c.sequence_parallel,
                c.split_weights,
                tuple(sorted((n, str(p)) for n, p in here.items())),
            )
            if key not in self._blocks:
                self._blocks[key] = BlockProblem(
                    facts,
                    block,
                    pricer,
                    price,
                    c.mesh.tp,
                    state,
                    seconds_per_byte=c.rate,
                    sequence_parallel=c.sequence_parallel,
                    fixed=here,
                    ep=c.mesh.ep,
                    split_weights=c.split_weights,
                ).solve()
            solution = self._blocks[key]
            if solution is None:
                return None
            by_kind[block.kind] = solution
        return tuple(by_kind[block.kind] for block, _ in self.chain)

    def _parameters(self, block: Block) -> frozenset[str]:
        graph = self.collapsed.graph
        return frozenset(
            name
            for op in graph.ops[block.start : block.stop]
            for name in op.inputs
            if graph.tensor(name).kind is TensorKind.PARAMETER
        )

    def elements(self) -> tuple[tuple[float, bool, bool, float], ...]:
        """(elements, expert, trainable, bytes per element) of all parameters."""
        graph = self.collapsed.graph
        experts = {
            op.inputs[1] for op in graph.ops if expert_dims(graph, op) is not None
        }
        seen: set[str] = set()
        totals: dict[tuple[bool, bool, float], float] = {}
        for block, count in self.chain:
            for name in sorted(self._parameters(block) - seen):
                tensor = graph.tensor(name)
                if tensor.aliases or name in self.tied:
                    seen.add(name)
                width = tensor.nbytes / max(1, tensor.numel)
                key = (name in experts, tensor.trainable, width)
                here = 1 if name in seen or name in self.pinned else count
                totals[key] = totals.get(key, 0.0) + tensor.numel * here
        return tuple((n, *key) for key, n in sorted(totals.items()))

    def floors(self, c: Configuration) -> tuple[float, ...]:
        """Per run, seconds that no placement of one block can beat."""
        key = (c.mesh.tp, c.mesh.ep, c.mesh.cp, c.micro_batch)
        if key not in self._floors:
            pricer, facts = self.pricer(c.micro_batch, c.mesh.cp)
            self._floors[key] = tuple(
                BlockProblem(
                    facts,
                    block,
                    pricer,
                    lambda kind, nbytes: 0.0,
                    c.mesh.tp,
                    BoundaryState("replicated"),
                    ep=c.mesh.ep,
                ).floor()
                for block, _ in self.chain
            )
        return self._floors[key]

    # ---- whole steps -----------------------------------------------------------

    def sharding(self, c: Configuration) -> Sharding:
        recipe = RECIPES[self.recipe]
        gradient = recipe.flowing_gradient or recipe.gradient
        if c.zero < 3 and recipe.flowing_gradient:
            gradient = recipe.gradient
        hbm = self.device.hbm_bytes_per_s * STREAM_EFFICIENCY
        accumulate = self.stack.accumulate_bytes / hbm
        return Sharding(
            c.zero,
            gradient,
            recipe.gathered,
            self.training,
            accumulate,
            c.micro_batches,
        )

    def launch_s(self) -> float:
        return self.stack.launch_s

    def times(self, c: Configuration) -> tuple[BlockTimes, ...] | None:
        found = self.solutions(c)
        if found is None:
            return None
        comm, sharding = self.comm(c.mesh), self.sharding(c)
        return tuple(
            block_times(s, comm, self.stack, sharding, launch_s=self.launch_s())
            for s in found
        )

    def memory_setup(self, c: Configuration) -> MemorySetup:
        return MemorySetup(
            graph=self.collapsed.graph,
            buffer_bytes=self.collapsed.buffer_bytes,
            device=self.device,
            mesh=c.mesh,
            zero=c.zero,
            recipe=self.recipe,
            optimizer=self.optimizer,
            limit_bytes=self.limit_bytes,
            fragmentation=self.stack.fragmentation,
            micro_batches=c.micro_batches,
            training=self.training,
            whole=frozenset(n for n, p in self.pinned.items() if p.kind == "R"),
        )

    def in_flight(self, c: Configuration) -> tuple[float, ...]:
        if not self.training:
            return (1.0,) * c.mesh.pp
        return tuple(
            float(in_flight(c.schedule, k, c.mesh.pp, c.micro_batches, c.virtual))
            for k in range(c.mesh.pp)
        )

    def stage_problem(
        self,
        c: Configuration,
        modes: tuple[str, ...],
        fixed_counts: tuple[int, ...] | None = None,
    ) -> StageProblem | None:
        """The stage problem of a configuration with the least constants of any layout,
        so that its optimum is a bound; None where blocks have no solution."""
        solutions, times = self.solutions(c), self.times(c)
        if solutions is None or times is None:
            return None
        setup = self.memory_setup(c)
        runs = tuple(
            Run(
                block.kind,
                count,
                (t.seconds(0), t.seconds(1), t.seconds(2)),
                activation_bytes(setup, s),
                static_bytes(setup, s),
            )
            for (block, count), t, s in zip(self.chain, times, solutions, strict=True)
        )
        if all(r.activation_bytes[1] >= r.activation_bytes[0] for r in runs):
            # no unfused attention: selective recompute would bring nothing
            modes = tuple(q for q in modes if q != "selective") or modes
        flight = self.in_flight(c)
        constants = self.least_constants(c, modes)
        return StageProblem(
            runs,
            c.mesh.pp,
            c.micro_batches,
            c.virtual,
            flight,
            constants,
            self.limit_bytes,
            modes,
            fixed_counts,
        )

    def constants(
        self, c: Configuration, layout: Sequence[Counts]
    ) -> tuple[float, ...]:
        """Bytes of each rank that the linear memory form leaves out."""
        solutions, flight = self.solutions(c), self.in_flight(c)
        assert solutions is not None
        setup = self.memory_setup(c)
        return tuple(
            constant_bytes(setup, solutions, counts, flight[k])
            for k, counts in enumerate(layout)
        )

    def least_constants(
        self, c: Configuration, modes: tuple[str, ...]
    ) -> tuple[float, ...]:
        """Bytes that each rank needs beside states and activations in any layout.

        A rank's constant grows with the kinds of block that it holds. Rank k has k
        blocks before it at the least and as many ranks after it as there are, which
        says what it can hold; the first block is on the first, the last on the last.
        """
        solutions = self.solutions(c)
        assert solutions is not None
        setup = self.memory_setup(c)
        empty: Counts = tuple((0, 0, 0) for _ in self.chain)
        bare = rank_memory(setup, solutions, empty, 0.0).total_bytes
        of_run = [bare] * len(self.chain)
        if c.micro_batches > 1:  # else gradients, not activations, may be the peak
            of_run = [
                max(bare, self._run_constant(c, run, modes))
                for run in range(len(self.chain))
            ]
        run_at = [r for r, (_, n) in enumerate(self.chain) for _ in range(n)]
        ranks = c.mesh.pp
        shared = self._counted_twice(c, solutions)
        result: list[float] = []
        for k in range(ranks):
            held = set(run_at[k : len(run_at) - (ranks - 1 - k)])
            least = min((of_run[r] for r in held), default=bare)
            if k == 0:
                least = max(least, of_run[0])
            if k == ranks - 1:
                least = max(least, of_run[-1])
            result.append(least - shared)
        return tuple(result)

    def _run_constant(
        self, c: Configuration, run: int, modes: tuple[str, ...]
    ) -> float:
        """The constant of a rank whose activations are the peak and all of one run."""
        solutions = self.solutions(c)
        assert solutions is not None
        setup = self.memory_setup(c)
        found: list[float] = []
        for mode in modes:
            row = [0, 0, 0]
            row[MODES.index(mode)] = MANY
            counts = tuple(
                (row[0], row[1], row[2]) if r == run else (0, 0, 0)
                for r in range(len(self.chain))
            )
            found.append(constant_bytes(setup, solutions, counts, 1.0))
        return min(found)

    def _counted_twice(
        self, c: Configuration, solutions: Sequence[BlockSolution]
    ) -> float:
        """State bytes of shared tensors that one rank holds once though several of its
        blocks list them. Tensors of the first and last block alone part company as
        soon as there are two stages."""
        sharing = [
            i
            for i, s in enumerate(solutions)
            if any(p.name in self.tied for p in s.parameters)
        ]
        if c.mesh.pp > 1 and sharing == [0, len(solutions) - 1]:
            return 0.0
        setup = self.memory_setup(c)
        counts = [n for _, n in self.chain]
        listed = sum(
            n * static_bytes(setup, s) for s, n in zip(solutions, counts, strict=True)
        )
        held = list(zip(solutions, counts, strict=True))
        return listed - state_bytes(setup, parameter_groups(setup, held))

    def even_layout(self, c: Configuration, mode: int = 0) -> tuple[Counts, ...]:
        """Blocks cut as evenly as possible, all in one recompute mode."""
        total = sum(count for _, count in self.chain)
        base, extra = divmod(total, c.mesh.pp)
        sizes = [base + (k < extra) for k in range(c.mesh.pp)]
        return self.layout_of(sizes, [mode] * c.mesh.pp)

    def layout_of(
        self, sizes: Sequence[int], modes: Sequence[int]
    ) -> tuple[Counts, ...]:
        """Counts for the given number of blocks on each rank."""
        result: list[Counts] = []
        start = 0
        for size, mode in zip(sizes, modes, strict=True):
            rows: list[tuple[int, int, int]] = []
            position = 0
            for _, count in self.chain:
                low, high = max(start, position), min(start + size, position + count)
                n = max(0, high - low)
                rows.append(
                    (
                        n if mode == 0 else 0,
                        n if mode == 1 else 0,
                        n if mode == 2 else 0,
                    )
                )
                position += count
            result.append(tuple(rows))
            start += size
        return tuple(result)

    def price(self, c: Configuration, layout: Sequence[Counts]) -> Priced:
        """The whole step and the memory of every rank."""
        solutions = self.solutions(c)
        if solutions is None:
            raise PlannerError("the blocks have no legal placement", c)
        setup = self.memory_setup(c)
        flight = self.in_flight(c)
        memory = tuple(
            rank_memory(setup, solutions, counts, flight[k])
            for k, counts in enumerate(layout)
        )
        terms = self.step_terms(c, layout, solutions)
        return Priced(c, tuple(layout), terms, memory, solutions)

    def step_terms(
        self,
        c: Configuration,
        layout: Sequence[Counts],
        solutions: Sequence[BlockSolution],
    ) -> StepTerms:
        """The step of a layout from given block solutions."""
        comm, sharding = self.comm(c.mesh), self.sharding(c)
        times = tuple(
            block_times(s, comm, self.stack, sharding, launch_s=self.launch_s())
            for s in solutions
        )
        setup = self.memory_setup(c)
        blocking_s = self.message_s(c, solutions) * (1 - self.stack.pp_overlap)
        send_s = blocking_s + self.stack.stage_host_s
        endings = [
            self._ending(c, solutions, times, counts, setup) for counts in layout
        ]
        return assemble(
            layout,
            times,
            schedule=c.schedule,
            micro_batches=c.micro_batches,
            virtual=c.virtual,
            send_s=send_s,
            endings=endings,
            blocking_s=blocking_s,
        )

    def message_s(self, c: Configuration, solutions: Sequence[BlockSolution]) -> float:
        """Seconds of the largest message between two pipeline stages."""
        sends = [
            s.output_bytes
            for s, (block, _) in zip(solutions, self.chain, strict=True)
            if block.stop < len(self.collapsed.graph.ops) or self.chain[-1][1] > 1
        ]
        return self.comm(c.mesh).p2p(max(sends, default=0.0))

    def least_messages_s(self, c: Configuration) -> float:
        """Seconds that messages add to a step of any layout: filling and draining the
        pipeline, and every chunk's wait where the stack hides nothing."""
        solutions = self.solutions(c)
        ranks, v = c.mesh.pp, c.virtual
        if ranks == 1 or solutions is None:
            return 0.0
        blocking = self.message_s(c, solutions) * (1 - self.stack.pp_overlap)
        send = blocking + self.stack.stage_host_s
        hops = v * ranks - 1 if c.schedule == "interleaved" else ranks - 1
        waits = v * blocking if v > 1 else 0.0
        return 2 * hops * send + 2 * waits * (c.micro_batches + (ranks - 1) / v)

    def least_ending_s(self, c: Configuration) -> float:
        """Seconds that follow the last backward in any layout: exact on one stage, and
        on several what the rank with the most parameters can not avoid."""
        solutions, times = self.solutions(c), self.times(c)
        if not self.training or solutions is None or times is None:
            return 0.0
        setup = self.memory_setup(c)
        counts: Counts = tuple((n, 0, 0) for _, n in self.chain)
        if c.mesh.pp == 1:
            return self._ending(c, solutions, times, counts, setup).total_s
        held = list(zip(solutions, (n for _, n in self.chain), strict=True))
        groups = [g for g in parameter_groups(setup, held) if g.trainable]
        total = sum(t.seconds(0) * n for t, (_, n) in zip(times, held, strict=True))
        longest = max(*(t.seconds(0) for t in times), total / c.mesh.pp)
        forward = max(t.forward / t.seconds(0) for t in times if t.seconds(0))
        backward = max(t.plain_backward / t.seconds(0) for t in times if t.seconds(0))
        exposed = 0.0
        if c.micro_batches - 1 / c.virtual >= forward + backward:
            # a longer stage hides more, but costs the pipeline more than it hides
            exposed = self.gradient_seconds(
                c,
                sum(g.elements for g in groups) / c.mesh.pp,
                forward * longest,
                backward * longest,
            )
        own = sum(g.elements / (g.shard if c.zero else 1) for g in groups)
        update = self.optimizer_seconds(own / c.mesh.pp)
        return exposed + update + self.stack.step_host_s

    def _ending(
        self,
        c: Configuration,
        solutions: Sequence[BlockSolution],
        times: Sequence[BlockTimes],
        counts: Counts,
        setup: MemorySetup,
    ) -> Ending:
        """What one rank does after its last backward."""
        if not self.training:
            return Ending()
        held = [(s, sum(r)) for s, r in zip(solutions, counts, strict=True) if sum(r)]
        groups = parameter_groups(setup, held)
        dense = sum(g.elements for g in groups if g.trainable)
        backward = forward = 0.0
        for t, row in zip(times, counts, strict=True):
            forward += sum(row) * t.forward
            backward += sum(row) * t.plain_backward
        exposed = self.gradient_seconds(c, dense, forward, backward)
        sync = sum(s.sync_bytes * n for s, n in held)
        tied = 0.0
        if c.mesh.pp > 1:
            shared = [
                p.numel for s, _ in held for p in s.parameters if p.name in self.tied
            ]
            nbytes = max(shared, default=0.0) * self.sharding(c).gradient_bytes
            tied = 2 * self.comm(c.mesh).p2p(nbytes)
        own = sum(
            g.elements / (g.shard if c.zero else 1) for g in groups if g.trainable
        )
        return Ending(
            exposed,
            self.comm(c.mesh).seconds("tp", "all_reduce", sync),
            tied,
            self.optimizer_seconds(own),
            self.stack.step_host_s,
        )

    def gradient_seconds(
        self, c: Configuration, elements: float, forward: float, backward: float
    ) -> float:
        """Exposed seconds of summing ``elements`` gradients over the data axes."""
        mesh, sharding = c.mesh, self.sharding(c)
        nbytes = elements * sharding.gradient_bytes
        if c.zero == 0:
            reduce_s, gather_s = self.bucketed(mesh, "dp", "all_reduce", nbytes), 0.0
        else:
            reduce_s = self.bucketed(mesh, "dp_shard", "reduce_scatter", nbytes)
            gathered = elements * sharding.parameter_bytes
            gather_s = self.bucketed(mesh, "dp_shard", "all_gather", gathered)
            shard_bytes = nbytes / (mesh.dp_shard * mesh.cp)
            across = self.bucketed(mesh, "dp_replicate", "all_reduce", shard_bytes)
            if c.zero >= 3:  # gathers and scatters are inside the blocks
                reduce_s = gather_s = 0.0
            if sharding.scatters_each_micro_batch:
                reduce_s = 0.0
            reduce_s += across
        return data_parallel(
            reduce_s / self.stack.dp_rate,
            gather_s / (self.stack.dp_gather_rate or self.stack.dp_rate),
            backward,
            forward,
            self.stack.dp_overlap,
            self.stack.overlap_slowdown,
        ).exposed_s

    def bucketed(self, mesh: Mesh, axis: str, kind: str, nbytes: float) -> float:
        """Seconds of a collective that the stack issues bucket by bucket."""
        comm, bucket = self.comm(mesh), self.stack.dp_bucket_bytes
        count = max(1, ceil(nbytes / bucket)) if bucket else 1
        return count * comm.seconds(axis, kind, nbytes / count)

    def optimizer_seconds(self, elements: float) -> float:
        """Reading and writing every state of ``elements`` parameters once."""
        recipe = RECIPES[self.recipe]
        states = OPTIMIZER_STATE_BYTES[self.optimizer] + recipe.master
        read = elements * (states + recipe.gradient)
        write = elements * (states + recipe.parameter)
        if read + write == 0:
            return 0.0
        update = pointwise_time(self.device, read, write, 12 * elements)
        return update.time_s / self.stack.optimizer_rate


def _recipe(precision: str) -> str:
    known = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "fp8"}
    return known.get(precision, "fp32")


def state_is_legal(facts: GraphFacts, state: BoundaryState, size: int) -> bool:
    """Whether every activation that crosses a block boundary can have this state,
    and at least one is divided by it (or it is plain replication)."""
    graph = facts.graph
    if state.name == "replicated":
        return True
    divided = False
    for name in facts.leaving:
        if name not in facts.producer:
            continue
        axis = facts.batch_axis(name)
        if not state.legal(graph, name, axis, size):
            return False
        divided |= state.placement(graph, name, axis).kind == "S"
    return divided


def tensor_limit(graph: OpGraph, size: int) -> str | None:
    """Why ``tp = size`` is not legal for the model's attention; None if it is."""
    if size == 1:
        return None
    made = {name: op for op in graph.ops for name in op.outputs}
    for op in graph.ops:
        if op.kind is not OpKind.ATTENTION:
            continue
        heads = op.number("q_heads")
        if heads % size:
            return f"{heads} heads not divisible by {size}"
        kv = key_value_heads(op, made)
        if kv % size:
            return f"{kv} key-value heads not divisible by {size}"
    return None


def key_value_heads(op: Op, made: Mapping[str, Op]) -> int:
    """Key-value heads of an attention before they are repeated for the query heads.

    Follows the keys' head axis back through views: a repetition merges the heads with
    an inner factor that is not in the keys before it.
    """
    heads = op.number("kv_heads")
    name, axes = op.space.inputs[1].tensor, op.space.inputs[1].axes
    position = len(axes) - 3
    while position >= 0 and name in made and made[name].kind in _MOVES:
        view = made[name]
        dims = view.space.outputs[view.outputs.index(name)].axes[position].dims
        if not dims or len(view.space.inputs) != 1:
            break
        heads = min(heads, view.space.dim(dims[0]).size)
        before = view.space.inputs[0]
        found = [i for i, axis in enumerate(before.axes) if dims[0] in axis.dims]
        if len(found) != 1 or before.axes[found[0]].dims[0] != dims[0]:
            break
        name, position = before.tensor, found[0]
    return heads


_MOVES = (OpKind.VIEW, OpKind.COPY)


def scaled_context(graph: OpGraph, cp: int) -> OpGraph:
    """Attention of a 1/cp sequence chunk sees the keys of all cp chunks."""
    ops = list(graph.ops)
    for i, op in enumerate(ops):
        if op.kind is not OpKind.ATTENTION:
            continue
        attrs = tuple(
            (k, op.number(k) * cp if k == "kv_len" else v) for k, v in op.attrs
        )
        ops[i] = replace(
            op,
            attrs=attrs,
            forward_flops=op.forward_flops * cp,
            backward_flops=op.backward_flops * cp,
        )
    return graph.with_ops(tuple(ops))


def layer_runs(job: Job) -> tuple[int, int]:
    """First run and end of the runs that hold the model's layers: the longest run, and
    its neighbours out of the same list of modules (``layers.0`` may differ from the
    rest because it alone keeps what all layers share)."""
    counts = [n for _, n in job.chain]
    lists = [block.name.rpartition(".")[0] for block, _ in job.chain]
    main = max(range(len(counts)), key=lambda i: counts[i])
    first, stop = main, main + 1
    while first > 0 and lists[main] and lists[first - 1] == lists[main]:
        first -= 1
    while stop < len(counts) and lists[main] and lists[stop] == lists[main]:
        stop += 1
    return first, stop


def stage_sizes(job: Job, pp: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Blocks per stage: layers of the longest run as given or as even as possible, the
    blocks before them on the first stage, those after on the last."""
    counts = [n for _, n in job.chain]
    first, stop = layer_runs(job)
    before, after = sum(counts[:first]), sum(counts[stop:])
    repeated = sum(counts[first:stop])
    if repeated < pp:  # no long run: cut all blocks evenly
        total = sum(counts)
        base, extra = divmod(total, pp)
        return tuple(base + (k < extra) for k in range(pp))
    if layers is None:
        base, extra = divmod(repeated, pp)
        # the ends hold the embedding and the head: spare layers go to the middle
        order = sorted(range(pp), key=lambda k: (k in (0, pp - 1), k))
        sizes = [base] * pp
        for k in order[:extra]:
            sizes[k] += 1
    else:
        if sum(layers) != repeated or len(layers) != pp:
            raise PlannerError(
                "layers per stage do not add up to the model's layers",
                f"{sum(layers)} of {repeated} on {len(layers)} stages",
                f"give {pp} counts that add up to {repeated}",
            )
        sizes = list(layers)
    sizes[0] += before
    sizes[-1] += after
    return tuple(sizes)


def recompute_layout(
    job: Job, sizes: Sequence[int], recompute: str | Sequence[int]
) -> tuple[Counts, ...]:
    """Counts for one recompute mode, or for a number of full ones on each stage."""
    if isinstance(recompute, str):
        mode = ("none", "selective", "full").index(recompute)
        layout = job.layout_of(sizes, [mode] * len(sizes))
        return tuple(_only_layers(job, counts) for counts in layout)
    layout = job.layout_of(sizes, [0] * len(sizes))
    first, stop = layer_runs(job)
    result: list[Counts] = []
    for counts, full in zip(layout, recompute, strict=True):
        rows, left = list(counts), full
        held = sum(sum(row) for row in rows[first:stop])
        if full > held:
            raise PlannerError(
                "more recomputed layers than the stage has", f"{full} of {held}"
            )
        for run in range(first, stop):
            here = min(left, sum(rows[run]))
            rows[run] = (sum(rows[run]) - here, 0, here)
            left -= here
        result.append(tuple(rows))
    return tuple(result)


def _only_layers(job: Job, counts: Counts) -> Counts:
    """Recompute is for repeated layers: single blocks keep their activations."""
    first, stop = layer_runs(job)
    return tuple(
        row
        if count > 1 or first <= run < stop or len(job.chain) > 8
        else (sum(row), 0, 0)
        for run, (row, (_, count)) in enumerate(zip(counts, job.chain, strict=True))
    )
