"""What every exporter shares: the facts of a plan, gaps, and the written result.

An exporter is a function ``Plan -> Export``. What the target can not say becomes a
:class:`Gap` (and the file does the nearest thing); what the target would refuse to run
raises PlannerError.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cost_models.schedules import Backend, Schedule, legal
from planner.errors import PlannerError
from planner.plan import Plan
from planner.plan.documents import write_atomic
from planner.plan.summary import gib
from planner.workload import Parallelism, Training


@dataclass(frozen=True, slots=True)
class Gap:
    """``what`` of the plan the target can not express, and what the file does."""

    what: str
    instead: str

    def __str__(self) -> str:
        return f"not expressible: {self.what}; {self.instead}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers that have to agree: ``global_batch = data_parallel x micro_batch x
    accumulation`` and the ranks of the whole job."""

    world: int
    data_parallel: int
    micro_batch: int
    accumulation: int
    global_batch: int

    def __post_init__(self) -> None:
        product = self.data_parallel * self.micro_batch * self.accumulation
        assert product == self.global_batch, self


@dataclass(frozen=True, slots=True)
class Export:
    """``files``: name to text. ``command``: how to start the job with them. ``notes``:
    what a reader should know though nothing is lost."""

    target: str
    files: tuple[tuple[str, str], ...]
    figures: Figures
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""

    def text(self, name: str) -> str:
        """The content of one file."""
        return dict(self.files)[name]

    def readme(self) -> str:
        """What was written, the numbers, and everything that could not be said."""
        f = self.figures
        lines = [
            f"Exported for {self.target} by parallel-planner.",
            "",
            f"{f.world} ranks; global batch {f.global_batch} = {f.data_parallel} "
            f"data-parallel x {f.micro_batch} micro-batch x {f.accumulation} "
            "accumulated.",
        ]
        if self.command:
            lines += ["", "Start it with:", "", f"    {self.command}"]
        lines += ["", "Not expressible in this target:" if self.gaps else "Everything "
                  "in the plan's parallelism is expressed."]  # fmt: skip
        lines += [f"- {gap.what}; {gap.instead}" for gap in self.gaps]
        if self.notes:
            lines += ["", "Notes:", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Writes the files and a README.txt, each whole or not at all."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlannerError(
                f"can not make the folder ({error.strerror})", path, "give another one"
            ) from error
        written: list[Path] = []
        for name, text in (*self.files, ("README.txt", self.readme())):
            write_atomic(path / name, text)
            written.append(path / name)
        return tuple(written)


@dataclass(frozen=True, slots=True)
class Facts:
    """What exporters ask of a plan, computed once."""

    plan: Plan
    training: Training
    p: Parallelism
    figures: Figures
    layer_list: str  # "model.layers" of model.layers.0 ...
    chunks: tuple[tuple[str, ...], ...]  # block names by virtual stage, model order

    @classmethod
    def of(cls, plan: Plan) -> Facts:
        """Raises PlannerError for a plan that does not train."""
        if not isinstance(plan.workload, Training):
            raise PlannerError(
                "the target trains, the plan serves",
                plan.workload.kind,
                "export it to vllm, sglang or tensorrt-llm",
            )
        p = plan.parallelism
        batch, count = plan.workload.global_batch, p.num_micro_batches
        assert batch is not None
        assert count is not None
        figures = Figures(p.num_gpus, p.data_parallel, p.micro_batch_size, count, batch)
        prefixes = Counter(
            name.rpartition(".")[0]
            for name in (b.name for b in plan.model.blocks)
            if name.rpartition(".")[2].isdigit()
        )
        main = prefixes.most_common(1)[0][0] if prefixes else ""
        return cls(plan, plan.workload, p, figures, main, virtual_stages(plan))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the repeated layers in model order."""
        return tuple(
            name for part in self.chunks for name in part if self.is_layer(name)
        )

    def is_layer(self, name: str) -> bool:
        head, _, tail = name.rpartition(".")
        return bool(self.layer_list) and head == self.layer_list and tail.isdigit()

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Repeated layers of each virtual stage."""
        return tuple(sum(map(self.is_layer, part)) for part in self.chunks)

    @property
    def even(self) -> bool:
        """Whether every virtual stage holds as many layers as the others."""
        return len(set(self.layers_per_chunk)) == 1

    @property
    def nodes(self) -> int:
        return sum(g.nodes for g in self.plan.cluster.groups)

    @property
    def gpus_per_node(self) -> int:
        """Raises PlannerError where nodes differ: launchers take one number."""
        sizes = {g.gpus_per_node for g in self.plan.cluster.groups}
        if len(sizes) > 1:
            raise PlannerError(
                "nodes differ in their number of GPUs",
                sorted(sizes),
                "launchers take one number per node: start the nodes by hand",
            )
        return sizes.pop()

    def modes(self) -> dict[str, int]:
        """Recompute mode of the repeated layers: mode to number of layers."""
        return dict(Counter(self.plan.recompute.get(n, "none") for n in self.layers))

    def recomputed_per_chunk(self, mode: str) -> tuple[int, ...]:
        """Layers in ``mode`` on each virtual stage."""
        return tuple(
            sum(self.is_layer(n) and self.plan.recompute.get(n) == mode for n in part)
            for part in self.chunks
        )

    def torchrun(self, script: str) -> str:
        """A launch line for every node."""
        head = f"torchrun --nproc-per-node {self.gpus_per_node}"
        if self.nodes > 1:
            head += f" --nnodes {self.nodes} --rdzv-backend c10d"
            head += " --rdzv-endpoint $HEAD_NODE:29500"
        return f"{head} {script}"

    def state_gap(self, level: int, name: str) -> Gap | None:
        """What it costs if the target divides at ZeRO ``level`` and not as planned."""
        planned = self.p.zero if self.p.dp_shard * self.p.cp > 1 else 0
        if planned == level:
            return None
        worst = max(
            self.plan.estimate.memory_per_stage,
            key=lambda m: m.total_bytes - m.limit_bytes,
        )
        shard = self.p.dp_shard * self.p.cp
        extra = 0.0
        for at, size in (
            (1, worst.optimizer_bytes),
            (2, worst.gradients_bytes),
            (3, worst.parameters_bytes),
        ):
            before = shard if planned >= at else 1
            after = shard if level >= at else 1
            extra += size * before / after - size
        total = worst.total_bytes + extra
        sign = "more" if extra >= 0 else "less"
        effect = f"about {gib(abs(extra))} {sign} per GPU"
        if total > worst.limit_bytes:
            effect += f", {gib(total - worst.limit_bytes)} over the limit"
        return Gap(f"ZeRO-{planned}", f"{name}, {effect}")


def virtual_stages(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Block names by virtual stage in model order (see docs/plan-format.md)."""
    pp, vpp = plan.parallelism.pp, plan.parallelism.vpp
    folded = plan.parallelism.schedule == "zero_bubble" and vpp == 2
    parts: dict[int, tuple[str, ...]] = {}
    for stage in plan.stages:
        at = 0
        for chunk, size in enumerate(stage.chunks):
            number = chunk * pp + stage.index
            if folded and chunk == 1:
                number = 2 * pp - 1 - stage.index
            parts[number] = stage.blocks[at : at + size]
            at += size
    return tuple(parts[k] for k in sorted(parts))


def check_schedule(facts: Facts, backend: Backend, name: str) -> None:
    """Raises PlannerError where ``name`` refuses this number of micro-batches.

    torch's and Megatron's rules differ: see :func:`cost_models.schedules.legal`.
    """
    p = facts.p
    schedule = Schedule(p.schedule)
    if backend is Backend.MEGATRON and schedule is Schedule.ZERO_BUBBLE:
        return  # a gap: another schedule runs in its place
    why = legal(schedule, p.pp, facts.figures.accumulation, p.vpp, backend)
    if why is None:
        return
    step = p.data_parallel * p.micro_batch_size * p.pp
    raise PlannerError(
        f"{name} refuses the plan's schedule",
        why,
        f"plan again with --pin vpp=1, or with a global batch that is a multiple of "
        f"{step}",
    )


def present(*gaps: Gap | None) -> tuple[Gap, ...]:
    """The gaps that exist."""
    return tuple(g for g in gaps if g is not None)


#: Numeric formats that stock trainers name.
DTYPE_NAME = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "tf32": "tf32"}
