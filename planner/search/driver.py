"""The search: enumerate shapes, bound them, solve the promising ones exactly.

Every legal shape (mesh, micro-batch, schedule, ZeRO level, boundary state) gets a lower
bound from its block solutions: ideal pipeline of perfectly split blocks without
recompute, plus the gradient and optimizer time that no split can avoid. Shapes are
solved by CP-SAT in order of their bound until the next bound is no better than the best
plan found; what is left is pruned by that. The smallest bound still open is the bound
of the whole search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from time import monotonic

from cost_models.memory import ParameterGroup
from passes.ir import OpKind
from planner.errors import InfeasibleError, PlannerError
from planner.search.blocks import BlockSolution
from planner.search.feasibility import (
    MEMORY_LINES,
    conflicts,
    thriftiest,
    what_would_fit,
)
from planner.search.interrupt import Stop, stopping
from planner.search.job import RATES, STATES, Configuration, Job, Priced, tensor_limit
from planner.search.mesh import Mesh, divisors, meshes
from planner.search.rank_memory import (
    activation_bytes,
    parameter_groups,
    state_bytes,
)
from planner.search.stages import MODES, bottleneck_bound, combine, solve_stages

Progress = Callable[[str], None]

#: Largest micro-batch that is considered; larger ones only lengthen the pipeline.
MAX_MICRO_BATCH = 64
#: Sequence length from which context parallelism is considered.
CONTEXT_TOKENS = 16384
#: Solve a shape again with tighter memory at most this often.
REPAIRS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows. ``pins``: Parallelism fields; ``solved``: most shapes that
    CP-SAT solves."""

    pins: Mapping[str, object] = field(default_factory=dict[str, object])
    solved: int = 400
    deterministic_s: float = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan with what the search did."""

    best: Priced
    bound_s: float
    enumerated: int
    pruned: int
    solved: int
    cut_off: int
    infeasible: int
    alternatives: tuple[Priced, ...]
    constraints: tuple[str, ...]
    interrupted: bool = False


class Search:
    """Finds the fastest configuration of a job for a global batch."""

    def __init__(
        self,
        job: Job,
        global_batch: int,
        limits: Limits | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.job, self.global_batch = job, global_batch
        self.limits = limits or Limits()
        self.progress = progress
        self.constraints: list[str] = []
        self._illegal: dict[int, str] = {}
        self._experts = next(
            (
                op.number("groups")
                for op in job.collapsed.graph.ops
                if op.kind is OpKind.GROUPED_GEMM
            ),
            0,
        )
        self._solved: dict[Configuration, Priced | None] = {}
        self._elements: tuple[tuple[float, bool, bool, float], ...] = ()
        # seconds that no layout of a solved shape beats; inf: none fits, proved
        self._proved: dict[Configuration, float] = {}

    # ---- shapes ----------------------------------------------------------------

    def _pin(self, name: str, default: int | None = None) -> int | None:
        value = self.limits.pins.get(name, default)
        return value if value is None else int(value)  # type: ignore[call-overload]

    def configurations(self) -> Iterator[Configuration]:
        """Every legal shape, in a fixed order."""
        job, gpus = self.job, self.job.cluster.num_gpus
        blocks = len(job.graph.blocks)
        cps = self._context_degrees(gpus)
        pins: dict[str, int] = {}
        for name in ("tp", "pp"):
            value = self._pin(name)
            if value is not None:
                pins[name] = value
        for cp in cps:
            if gpus % cp:
                continue
            for pp, tp, dp in meshes(
                gpus // cp,
                max_pp=blocks,
                max_tp=gpus,
                max_dp=self.global_batch,
                pins=pins,
            ):
                if self.global_batch % dp or not self._tensor_legal(tp):
                    continue
                for mesh in self._data_meshes(pp, tp, dp, cp):
                    yield from self._of_mesh(mesh)

    def _context_degrees(self, gpus: int) -> list[int]:
        pinned = self._pin("cp")
        if pinned is not None:
            return [pinned]
        seq = self.job.graph.seq_len
        if seq < CONTEXT_TOKENS or self.job.graph_at_cp is None:
            return [1]
        return [d for d in divisors(gpus) if seq % (2 * d) == 0 and d <= 16]

    def _tensor_legal(self, tp: int) -> bool:
        if tp not in self._illegal:
            self._illegal[tp] = tensor_limit(self.job.graph, tp) or ""
        return not self._illegal[tp]

    def _data_meshes(self, pp: int, tp: int, dp: int, cp: int) -> Iterator[Mesh]:
        """Splits of the data axis into replicas and shards, and expert degrees."""
        inside = max(1, self.job.cluster.gpus_per_node // (tp * cp))
        shards: set[int] = {1, dp}
        if 1 < inside < dp and dp % inside == 0:
            shards.add(inside)
        pinned = self._pin("dp_shard")
        if pinned is not None:
            shards = {n for n in (pinned,) if dp % n == 0}
        replicate = self._pin("dp_replicate")
        for n in sorted(shards):
            if replicate is not None and dp // n != replicate:
                continue
            for ep in self._expert_degrees(n * cp):
                yield Mesh(pp, dp // n, n, cp, tp, ep)

    def _expert_degrees(self, ranks: int) -> list[int]:
        pinned = self._pin("ep")
        if pinned is not None:
            return [pinned] if ranks % pinned == 0 else []
        if not self._experts:
            return [1]
        return [d for d in divisors(ranks) if self._experts % d == 0]

    def _of_mesh(self, mesh: Mesh) -> Iterator[Configuration]:
        per_replica = self.global_batch // mesh.dp
        for micro in divisors(per_replica):
            if micro > MAX_MICRO_BATCH:
                break
            if self._pin("micro_batch_size") not in (None, micro):
                continue
            count = per_replica // micro
            for zero in self._zero_levels(mesh):
                for schedule, virtual in self._schedules(mesh, count):
                    for state in self._states(mesh):
                        for rate in RATES if mesh.tp > 1 else RATES[:1]:
                            yield Configuration(
                                mesh,
                                micro,
                                count,
                                zero,
                                virtual,
                                schedule,
                                state,
                                rate,
                                sequence_parallel=state == "sequence",
                            )

    def _zero_levels(self, mesh: Mesh) -> list[int]:
        levels = [0] if mesh.dp_shard * mesh.cp == 1 else [1, 2, 3]
        if not self.job.training:
            levels = [0]
        pinned = self._pin("zero")
        return levels if pinned is None else [z for z in levels if z == pinned]

    def _schedules(self, mesh: Mesh, count: int) -> list[tuple[str, int]]:
        if mesh.pp == 1:
            return [("1f1b", 1)] if self._pin("vpp") in (None, 1) else []
        options: list[tuple[str, int]] = [("1f1b", 1)]
        longest = max(n for _, n in self.job.chain)
        if count % mesh.pp == 0:
            options += [
                ("interleaved", v)
                for v in range(2, longest // mesh.pp + 1)
                if longest % (mesh.pp * v) == 0
            ]
        pinned, schedule = self._pin("vpp"), self.limits.pins.get("schedule")
        return [
            (s, v) for s, v in options if pinned in (None, v) and schedule in (None, s)
        ]

    def _states(self, mesh: Mesh) -> list[str]:
        if mesh.tp == 1:
            return ["replicated"]
        wanted = self.limits.pins.get("sequence_parallel")
        return [
            s for s in STATES if wanted is None or (s == "sequence") == bool(wanted)
        ]

    # ---- bounds ----------------------------------------------------------------

    def floor(self, c: Configuration) -> float:
        """A bound without solving any block: every op at its fastest, no traffic."""
        each = self.job.floors(c)
        counts = [n for _, n in self.job.chain]
        total = sum(t * n for t, n in zip(each, counts, strict=True))
        return self._pipeline(c, total, max(each))

    def bound(self, c: Configuration) -> float:
        """Seconds that no layout of this shape can beat, by its block solutions."""
        if self.job.times(c) is None:
            return inf
        return self._split_perfectly(c) + self._beside_the_split(c)

    def memory_bound(self, c: Configuration) -> float:
        """:meth:`bound` with the slowest rank that memory allows; inf: nothing fits."""
        problem = self.job.stage_problem(c, self._modes())
        if problem is None:
            return inf
        return bottleneck_bound(problem) + self._beside_the_split(c)

    def _beside_the_split(self, c: Configuration) -> float:
        """Messages between stages, gradients and the update: in every layout."""
        return self.job.least_messages_s(c) + self.job.least_ending_s(c)

    def _split_perfectly(self, c: Configuration) -> float:
        times = self.job.times(c)
        assert times is not None
        counts = [n for _, n in self.job.chain]
        best = range(3) if len(self._modes()) > 1 else (MODES.index(self._modes()[0]),)
        each = [min(t.seconds(q) for q in best) for t in times]
        total = sum(t * n for t, n in zip(each, counts, strict=True))
        return self._pipeline(c, total, max(each))

    def _pipeline(self, c: Configuration, total: float, longest: float) -> float:
        longest = max(longest, total / c.mesh.pp)
        return combine(c.micro_batches, c.virtual, longest, total)

    def _groups(
        self, c: Configuration, solutions: tuple[BlockSolution, ...]
    ) -> tuple[ParameterGroup, ...]:
        counts = [n for _, n in self.job.chain]
        setup = self.job.memory_setup(c)
        return parameter_groups(setup, list(zip(solutions, counts, strict=True)))

    def states_alone(self, c: Configuration) -> float:
        """Bytes of parameter states that an average rank holds at the very least: every
        tensor divided by tp and, experts, by ep."""
        if not self._elements:
            self._elements = self.job.elements()
        mesh, setup = c.mesh, self.job.memory_setup(c)
        groups: list[ParameterGroup] = []
        for numel, expert, trainable, width in self._elements:
            n = numel / mesh.tp / (mesh.ep if expert else 1) / mesh.pp
            shard = max(1, setup.shard // mesh.ep) if expert else setup.shard
            groups.append(
                ParameterGroup(n, shard, trainable and self.job.training, width)
            )
        return state_bytes(setup, groups)

    def hopeless(self, c: Configuration) -> bool:
        """Whether an average rank can not hold its states and the inputs of its blocks:
        then no layout fits. A tensor of several blocks counts once."""
        solutions = self.job.solutions(c)
        if solutions is None:
            return True
        setup = self.job.memory_setup(c)
        least = state_bytes(setup, self._groups(c, solutions))
        least += sum(
            n * min(activation_bytes(setup, s))
            for s, (_, n) in zip(solutions, self.job.chain, strict=True)
        )
        return least / c.mesh.pp > self.job.limit_bytes

    # ---- solving ---------------------------------------------------------------

    def solve(self, c: Configuration) -> Priced | None:
        """The best layout of a shape that fits; None if none does."""
        if c not in self._solved:
            self._solved[c] = self._solve(c)
        return self._solved[c]

    def _modes(self) -> tuple[str, ...]:
        if not self.job.training:
            return ("none",)
        pinned = self.limits.pins.get("recompute")
        return MODES if pinned is None else (str(pinned),)

    def recompute_modes(self) -> tuple[int, ...]:
        """Numbers of the modes worth trying where memory is short."""
        modes = self._modes()
        return (MODES.index("full"),) if "full" in modes else (MODES.index(modes[0]),)

    def _solve(self, c: Configuration) -> Priced | None:
        """Solve with the least constants of any layout, which proves a bound, then with
        those of the layout found, until it fits and none was taken too high."""
        problem = self.job.stage_problem(c, self._modes())
        best: Priced | None = None
        for _ in range(REPAIRS):
            if problem is None:
                break
            found = solve_stages(problem, self.limits.deterministic_s)
            if c not in self._proved:
                beside = self._beside_the_split(c)
                self._proved[c] = found.bound_s + beside if found.counts else inf
            if not found.counts:
                break
            priced = self.job.price(c, found.counts)
            if priced.fits and (
                best is None or priced.terms.total_s < best.terms.total_s
            ):
                best = priced
            actual = self.job.constants(c, found.counts)
            pairs = list(zip(actual, problem.constant_bytes, strict=True))
            if priced.fits and all(a >= used - 2**20 for a, used in pairs):
                break
            if not priced.fits:  # never below what was tried: no oscillation
                actual = tuple(max(a, used) + 2**20 for a, used in pairs)
            problem = replace(problem, constant_bytes=actual)
        return best

    def run(self) -> Outcome:
        """Best-first search over all shapes; raises InfeasibleError. Ctrl-C after the
        first plan ends it with the best so far, ``interrupted``.

        A shape's bound is refined when it comes to the front: first the floor, then
        the bound of its block solutions, then it is solved.
        """
        self._started = monotonic()  # for the progress line only
        with stopping() as stop:
            return self._run(stop)

    def _run(self, stop: Stop) -> Outcome:
        queue: list[tuple[float, int, int, Configuration]] = []
        for number, c in enumerate(self.configurations()):
            queue.append((self.floor(c), number, 0, c))
        if not queue:
            raise self._nothing_legal()
        enumerated = len(queue)
        heapify(queue)
        best: Priced | None = None
        solved = infeasible = 0
        twins: set[tuple[object, ...]] = set()
        proved: list[float] = []
        undecided: list[float] = []
        others: dict[tuple[int, int, int, int], Priced] = {}
        while queue and solved < self.limits.solved and not stop.now:
            bound, number, level, c = queue[0]
            if best is not None and bound >= best.terms.total_s * (1 - 1e-9):
                break
            heappop(queue)
            if level == 0:
                if self.states_alone(c) > self.job.limit_bytes:
                    infeasible += 1
                    continue
                refined = self.bound(c)
                if refined == inf or self._is_twin(c, twins):
                    enumerated -= 1  # no legal placement, or one seen already
                elif self.hopeless(c):
                    infeasible += 1
                else:
                    heappush(queue, (max(bound, refined), number, 1, c))
                continue
            if level == 1:
                refined = self.memory_bound(c)
                if refined == inf:
                    infeasible += 1
                else:
                    heappush(queue, (max(bound, refined), number, 2, c))
                continue
            self._report(solved, best, bound, c, queue)
            priced = self.solve(c)
            least = max(bound, self._proved.get(c, bound))
            if priced is None:
                if least == inf:
                    infeasible += 1
                else:  # no layout was found, none was ruled out
                    undecided.append(least)
                continue
            proved.append(least)
            solved += 1
            mesh = c.mesh
            key = (mesh.tp, mesh.pp, mesh.cp, c.zero)
            if key not in others or priced.terms.total_s < others[key].terms.total_s:
                others[key] = priced
            if best is None or priced.terms.total_s < best.terms.total_s * (1 - 1e-12):
                best = priced
                stop.has_plan = True
        if best is None:
            raise self._does_not_fit()
        limit = best.terms.total_s * (1 - 1e-9)
        open_bounds = [entry[0] for entry in queue] + undecided
        cut_off = sum(b < limit for b in open_bounds)
        bound = min([best.terms.total_s, *proved, *open_bounds])
        ranked = sorted(
            (p for p in others.values() if p is not best),
            key=lambda p: p.terms.total_s,
        )
        return Outcome(
            best,
            bound,
            enumerated,
            len(open_bounds) - cut_off,
            solved,
            cut_off,
            infeasible,
            tuple(ranked[:8]),
            tuple(self.constraints),
            stop.now,
        )

    def _is_twin(self, c: Configuration, twins: set[tuple[object, ...]]) -> bool:
        """Whether a shape with the same block solutions was seen already."""
        solutions = self.job.solutions(c)
        assert solutions is not None
        choices = tuple((s.strategies, s.saved_bytes) for s in solutions)
        key = (
            c.mesh,
            c.micro_batch,
            c.zero,
            c.virtual,
            c.schedule,
            hash(choices),
        )
        if key in twins:
            return True
        twins.add(key)
        return False

    def _report(
        self,
        solved: int,
        best: Priced | None,
        bound: float,
        c: Configuration,
        queue: list[tuple[float, int, int, Configuration]],
    ) -> None:
        """What is tried now, the best so far, the gap, and how long it may take."""
        if self.progress is None:
            return
        m = c.mesh
        shape = f"tp{m.tp} pp{m.pp} dp{m.dp} zero{c.zero} mb{c.micro_batch}"
        if best is None:
            self.progress(f"no plan yet; trying {shape}")
            return
        now = best.terms.total_s
        left = sum(1 for entry in queue if entry[0] < now) + 1
        left = min(left, self.limits.solved - solved)
        each = (monotonic() - self._started) / max(1, solved)
        self.progress(
            f"best {now:.3g} s, gap {1 - bound / now:.1%}, {left} shapes left "
            f"({left * each:.0f} s): {shape}"
        )

    # ---- failures --------------------------------------------------------------

    def _nothing_legal(self) -> PlannerError:
        reasons = sorted({r for r in self._illegal.values() if r})
        pins = ", ".join(f"{k}={v}" for k, v in self.limits.pins.items())
        if reasons and "tp" in self.limits.pins:
            return InfeasibleError(
                "no plan is legal with the pins",
                pins,
                f"{reasons[0]}: unpin tp or pin a divisor of the heads",
            )
        return InfeasibleError(
            "no shape is legal",
            pins or f"{self.job.cluster.num_gpus} GPUs, batch {self.global_batch}",
            "; ".join(reasons) or "change the global batch or the number of GPUs",
        )

    def _does_not_fit(self) -> InfeasibleError:
        """By how many bytes the thriftiest shape misses, where, and what would fit."""
        found = thriftiest(self)
        if found is None:
            return InfeasibleError("no shape has a legal placement", None, "unpin")
        worst = max(range(len(found.memory)), key=lambda k: found.memory[k].over_bytes)
        lines = found.memory[worst]
        parts = {
            name.removesuffix("_bytes"): getattr(lines, name) for name in MEMORY_LINES
        }
        largest = max(parts, key=lambda name: parts[name])
        return InfeasibleError(
            "the model does not fit the cluster",
            f"{lines.over_bytes:.0f} bytes ({lines.over_bytes / 2**30:.1f} GiB) "
            f"missing on stage {worst} of the thriftiest shape, whose largest line is "
            f"{largest} with {parts[largest] / 2**30:.1f} GiB",
            "; ".join(
                note
                for note in (
                    conflicts(self, lines.over_bytes),
                    f"a limit of {lines.total_bytes:.0f} bytes fits"
                    if lines.limit_bytes < self.job.device.memory_bytes
                    and lines.total_bytes <= self.job.device.memory_bytes
                    else "",
                    what_would_fit(self),
                )
                if note
            ),
        )
