"""Fits the constants of software stacks and sustained clocks to measured steps.

    python -m benchmarks.fit.fit_stacks [DATA.csv[.gz]] [--stage NAME ...] [--hold-out]

Every stage fits a few constants of one stack family to its rows: residuals are the logs
of predicted over measured seconds under a soft loss, with a weak pull to the starting
value. Block solutions are found once; per trial their times are put together again from
matrix, expert, attention and memory-bound parts, and the step is priced by the
product's own code. ``--hold-out`` fits on two thirds of the (model, GPU, count) groups
and prints the error on the rest. Results go to ``cost_models/specs/stacks.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy_train import RowPricer
from benchmarks.row_models import Graphs
from benchmarks.rows import DATA, Case, SkipRowError, case_of, read_rows
from cost_models import stacks as stack_module
from cost_models.errors import SpecError
from cost_models.hardware import DeviceSpec
from cost_models.stacks import StackProfile, load_stack, sustained_of, sustained_rate
from passes.ir import OpKind
from planner.api import configuration_of
from planner.errors import PlannerError
from planner.search.blocks import BlockSolution
from planner.search.job import Configuration, Job, recompute_layout, stage_sizes
from planner.search.stages import Counts

OUT = Path(stack_module.__file__).parent / "specs" / "stacks.json"
PRIOR = 0.15  # pull to the start: residual per unit of log (or of fraction)
LARGEST = 260  # rows of one stage; larger sets are thinned evenly
Fields = dict[str, float]


@dataclass(frozen=True, slots=True)
class Parameter:
    """``targets``: stacks that share the constant, or one "sustained" key."""

    targets: tuple[str, ...]
    field: str
    start: float
    low: float
    high: float
    prior: float = PRIOR

    @property
    def sustained(self) -> bool:
        return self.field == "sustained"


def rate(field: str, *targets: str, start: float = 1.0, low: float = 0.3,
         high: float = 1.1, prior: float = PRIOR) -> Parameter:  # fmt: skip
    return Parameter(targets, field, start, low, high, prior)


def sustained(key: str, start: float = 0.9) -> Parameter:
    return Parameter((key,), "sustained", start, 0.4, 1.3)


def micros(field: str, *targets: str, start: float, high: float) -> Parameter:
    return Parameter(targets, field, start * 1e-6, 0.2e-6, high * 1e-6, 0.05)


def share(field: str, *targets: str, start: float) -> Parameter:
    return Parameter(targets, field, start, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """Constants that are fitted together, and the rows that say them."""

    name: str
    rows: Callable[[Case], bool]
    parameters: tuple[Parameter, ...]


def _groups(*names: str) -> Callable[[Case], bool]:
    return lambda case: case.group in names and case.quality in ("A", "B")


def _within_node(group: str) -> Callable[[Case], bool]:
    """Rows without tensor parallelism over nodes, which no constant fits."""
    inside = _groups(group)
    return lambda case: inside(case) and case.parallelism.tp <= 8


OLD = ("megatron-2021",)
DS = ("megatron-deepspeed",)
TITAN = (
    "torchtitan",
    "torchtitan-async-tp",
    "torchtitan-eager",
    "torchtitan-rowwise",
)
PLAIN = (*TITAN, "compiled")  # what torch.compile gives anyone
FOUNDRY = ("llm-foundry", "eager", "fsdp")
BRIDGE = ("megatron-bridge",)
MLPERF = ("nemo-mlperf",)

STAGES = (
    Stage(
        "megatron-2021",
        _groups("megatron-sc21", "korthikanti"),
        (
            sustained("A100/fp16"),
            rate("memory_rate", *OLD, start=0.9),
            rate("attention_rate", *OLD, start=0.9),
            rate("tp_rate", *OLD, start=0.8, high=1.0),
            rate("dp_rate", *OLD, start=0.8, high=1.0),
            micros("stage_host_s", *OLD, start=50, high=2000),
        ),
    ),
    Stage(
        "megatron-2020",
        _groups("megatron-2020"),
        (
            sustained("V100/fp16"),
            rate("matrix_rate", "megatron-2020"),
            rate("memory_rate", "megatron-2020", start=0.9),
            rate("attention_rate", "megatron-2020", start=0.9),
            rate("tp_rate", "megatron-2020", start=0.8, high=1.0),
            rate("dp_rate", "megatron-2020", start=0.8, high=1.0),
        ),
    ),
    Stage(
        "megatron-deepspeed",
        _groups("vtrain-multi", "vtrain-single"),
        (
            rate("matrix_rate", *DS),
            rate("memory_rate", *DS, start=0.9, low=0.2, high=1.8),
            rate("attention_rate", *DS, start=0.9, low=0.2),
            rate("tp_rate", *DS, start=0.8, low=0.1, high=1.0),
            rate("dp_rate", *DS, start=0.8, low=0.1, high=1.0),
            rate("optimizer_rate", *DS, start=0.8, low=0.05, high=1.0),
            micros("launch_s", *DS, start=40, high=200),
            micros("collective_host_s", *DS, start=100, high=800),
            micros("stage_host_s", *DS, start=100, high=5000),
            micros("step_host_s", *DS, start=5000, high=100000),
        ),
    ),
    Stage(
        "llm-foundry",
        _groups("mosaicml"),
        (
            sustained("A100/bf16"),
            sustained("H100/bf16", 0.8),
            rate("memory_rate", *FOUNDRY, start=0.8),
            rate("attention_rate", *FOUNDRY, start=0.7, low=0.2),
            rate("hopper_attention_rate", "llm-foundry", start=0.4, low=0.1),
            rate("dp_rate", "llm-foundry", start=0.8, low=0.2, high=1.0),
            share("dp_overlap", "llm-foundry", start=0.8),
            micros("launch_s", "llm-foundry", start=8, high=40),
            micros("step_host_s", "llm-foundry", start=5000, high=100000),
        ),
    ),
    Stage(
        "nanotron",
        _within_node("ultrascale"),
        (
            rate("matrix_rate", "nanotron", start=0.9),
            rate("memory_rate", "nanotron", start=0.5, low=0.2),
            rate("hopper_attention_rate", "nanotron", start=0.6, low=0.2),
            rate("tp_rate", "nanotron", start=0.6, low=0.1, high=1.0),
            rate("dp_rate", "nanotron", start=0.5, low=0.05, high=1.0),
            rate("dp_gather_rate", "nanotron", start=0.3, low=0.03, high=1.0),
            share("dp_overlap", "nanotron", start=0.3),
            rate("optimizer_rate", "nanotron", start=0.5, low=0.05, high=1.0),
            Parameter(("nanotron",), "accumulate_bytes", 10.0, 0.0, 20.0, 0.02),
            Parameter(("nanotron",), "dp_bucket_bytes", 80e6, 5e6, 3e8, 0.05),
            share("tp_overlap", "nanotron", start=0.4),
            micros("launch_s", "nanotron", start=10, high=80),
            micros("collective_host_s", "nanotron", start=450, high=2000),
            micros("staged_collective_host_s", "nanotron", start=260, high=1000),
            micros("stage_host_s", "nanotron", start=1700, high=8000),
            micros("step_host_s", "nanotron", start=30000, high=200000),
        ),
    ),
    Stage(
        "torchtitan",
        _groups("torchtitan", "fms-fsdp"),
        (
            rate("matrix_rate", *PLAIN),
            sustained("H100-SXM-96GB/bf16", 0.7),
            sustained("H100-SXM-96GB/fp8", 0.6),
            rate("memory_rate", *PLAIN, start=0.8),
            rate("attention_rate", *PLAIN, start=0.8),
            rate("hopper_attention_rate", *PLAIN, start=0.6, low=0.2),
            rate("tp_rate", *PLAIN, start=0.8, high=1.0),
            share("tp_overlap", "torchtitan-async-tp", start=0.6),
            share("selective_share", *TITAN, start=0.5),
            rate("dp_rate", *PLAIN, start=0.8, high=1.0),
            Parameter(TITAN[:3], "cast_passes", 1.0, 0.0, 4.0, 0.05),
            Parameter(TITAN[3:], "cast_passes", 3.0, 0.0, 12.0, 0.02),
        ),
    ),
    Stage(
        "internevo",
        _groups("internevo"),
        (
            rate("matrix_rate", "internevo"),
            rate("memory_rate", "internevo", start=0.8),
            rate("attention_rate", "internevo", start=0.8),
            rate("tp_rate", "internevo", start=0.8, low=0.2, high=1.0),
            rate("dp_rate", "internevo", start=0.8, low=0.1, high=1.0),
            share("dp_overlap", "internevo", start=0.5),
            rate("optimizer_rate", "internevo", start=0.6, low=0.05, high=1.0),
            Parameter(("internevo",), "accumulate_bytes", 6.0, 0.0, 20.0, 0.02),
            micros("step_host_s", "internevo", start=5000, high=200000),
        ),
    ),
    Stage(
        "megatron-exposed",
        _groups("simumax-b200"),
        (
            sustained("B200/bf16", 0.7),
            rate("memory_rate", "megatron-exposed", start=0.9),
            rate("expert_rate", "megatron-exposed", start=0.8),
            rate("attention_rate", "megatron-exposed", start=0.9),
            rate("tp_rate", "megatron-exposed", start=0.8, high=1.0),
            rate("ep_rate", "megatron-exposed", start=0.8, low=0.1, high=1.0),
            rate("dp_rate", "megatron-exposed", start=0.8, high=1.0),
            micros("step_host_s", "megatron-exposed", start=5000, high=100000),
        ),
    ),
    Stage(
        "megatron-bridge",
        _groups("megatron-bridge", "nemo-2407", "nemo-longctx"),
        (
            sustained("H100/fp8"),
            sustained("B200/fp8"),
            sustained("B300/fp8"),
            sustained("B300/bf16"),
            sustained("GB200/fp8"),
            sustained("GB200/bf16"),
            sustained("GB300/fp8"),
            sustained("GB300/bf16"),
            sustained("GB200/fp4"),
            sustained("GB300/fp4"),
            rate("memory_rate", *BRIDGE, start=0.9, high=1.5),
            rate("expert_rate", *BRIDGE, start=0.8),
            rate("attention_rate", *BRIDGE, start=0.9, high=1.3),
            rate("tp_rate", *BRIDGE, start=0.8, high=1.0),
            share("tp_overlap", *BRIDGE, start=0.5),
            rate("ep_rate", *BRIDGE, start=0.8, low=0.1, high=1.0),
            share("ep_overlap", *BRIDGE, start=0.2),
            rate("dp_rate", *BRIDGE, start=0.8, low=0.2, high=1.0),
            Parameter(BRIDGE, "cast_passes", 0.5, 0.0, 4.0, 0.05),
            micros("launch_s", *BRIDGE, start=4, high=20),
            micros("expert_host_s", *BRIDGE, start=50, high=2000),
            micros("step_host_s", *BRIDGE, start=5000, high=100000),
        ),
    ),
    Stage(
        "nemo-mlperf",
        _groups("mlperf-8b", "mlperf-lora70b", "mlperf-405b", "mlperf-gpt3"),
        (
            sustained("B200/fp4"),
            rate("matrix_rate", *MLPERF, start=0.9),
            rate("memory_rate", *MLPERF, start=0.9, high=1.5),
            rate("attention_rate", *MLPERF, start=0.9),
            rate("tp_rate", *MLPERF, start=0.8, high=1.0),
            share("tp_overlap", *MLPERF, start=0.5),
            rate("dp_rate", *MLPERF, start=0.8, low=0.2, high=1.0),
            share("dp_overlap", *MLPERF, start=0.8),
            Parameter(MLPERF, "cast_passes", 0.5, 0.0, 4.0, 0.05),
            micros("launch_s", *MLPERF, start=4, high=30),
            micros("step_host_s", *MLPERF, start=5000, high=100000),
        ),
    ),
    Stage(
        "megatron",
        _groups("megatron-h100", "llama3-paper"),
        (
            rate("matrix_rate", "megatron"),
            rate("memory_rate", "megatron", start=0.9),
            rate("attention_rate", "megatron", start=0.9),
            rate("tp_rate", "megatron", start=0.8, high=1.0),
            rate("dp_rate", "megatron", start=0.8, high=1.0),
            micros("step_host_s", "megatron", start=5000, high=100000),
        ),
    ),
    Stage(
        "nemo",
        _groups("nemo-launcher"),
        (
            rate("matrix_rate", "nemo"),
            rate("memory_rate", "nemo", start=0.9),
            rate("attention_rate", "nemo", start=0.8),
            rate("tp_rate", "nemo", start=0.8, high=1.0),
            rate("dp_rate", "nemo", start=0.8, high=1.0),
            micros("step_host_s", "nemo", start=5000, high=200000),
        ),
    ),
    Stage(
        "megatron-deterministic",
        _groups("megatron-ci"),
        (
            rate("matrix_rate", "megatron-deterministic"),
            rate("memory_rate", "megatron-deterministic", start=0.8),
            rate("attention_rate", "megatron-deterministic", start=0.6, low=0.1),
        ),
    ),
    Stage(
        "bert-dle",
        _groups("bert-dle"),
        (
            sustained("A100/tf32"),
            sustained("V100/fp32"),
            rate("matrix_rate", "bert-dle"),
            rate("memory_rate", "bert-dle", start=0.8),
            rate("attention_rate", "bert-dle", start=0.9),
            rate("dp_rate", "bert-dle", start=0.8, high=1.0),
        ),
    ),
)  # fmt: skip

KINDS = ("matrix", "expert", "attention", "math", "memory", "cast")


@dataclass(slots=True)
class Prepared:
    """One row with its block solutions and the parts of their device times."""

    case: Case
    job: Job
    configuration: Configuration
    layout: tuple[Counts, ...]
    solutions: tuple[BlockSolution, ...]
    parts: tuple[Mapping[tuple[str, str, str], float], ...]  # (kind, dtype, phase)


def neutral(name: str) -> StackProfile:
    """The stack without rates: its parts are what the kernel models say."""
    return replace(
        load_stack(name),
        matrix_rate=1.0,
        expert_rate=1.0,
        attention_rate=1.0,
        hopper_attention_rate=0.0,
        memory_rate=1.0,
        cast_passes=0.0,
    )


def prepare(case: Case, pricer: RowPricer, casts: RowPricer) -> Prepared:
    """Solves a row's blocks and takes their times apart."""
    job = pricer.job(case)
    c = configuration_of(case.parallelism)
    solutions = job.solutions(c)
    if solutions is None:
        raise PlannerError("no legal placement", case.id)
    sizes = stage_sizes(job, c.mesh.pp, case.parallelism.layers_per_stage)
    layout = recompute_layout(job, sizes, case.parallelism.recompute)
    job.price(c, layout)  # raises what it raises
    plain, facts = job.pricer(c.micro_batch, c.mesh.cp)
    casting, _ = casts.job(case).pricer(c.micro_batch, c.mesh.cp)
    parts: list[dict[tuple[str, str, str], float]] = []
    for solution, (block, _) in zip(solutions, job.chain, strict=True):
        found: dict[tuple[str, str, str], float] = {}
        for i, strategy in zip(
            range(block.start, block.stop), solution.strategies, strict=True
        ):
            op = facts.graph.ops[i]
            price = plain.price(i, strategy.dim, c.mesh.tp, c.mesh.ep)
            kind = "memory"
            if op.kind is OpKind.GROUPED_GEMM:
                kind = "expert"
            elif op.kind is OpKind.GEMM or op.kind is OpKind.CONV:
                kind = "matrix"
            elif op.kind is OpKind.ATTENTION:
                kind = "math" if case.attention == "math" else "attention"
            dtype = plain.dtype(op) if kind in ("matrix", "expert") else ""
            clock = 1.0  # the one in use now: taken out of the parts
            if dtype and op.kind is not OpKind.CONV:
                clock = sustained_rate(job.device.name, job.device.family, dtype)
            _add(found, (kind, dtype, "f"), price.forward_s * clock)
            _add(found, (kind, dtype, "b"), price.backward_s * clock)
            if op.kind is OpKind.ATTENTION or i in facts.core:
                _add(found, (kind, dtype, "core"), price.forward_s * clock)
            if dtype in ("fp8", "fp4"):
                with_cast = casting.price(i, strategy.dim, c.mesh.tp, c.mesh.ep)
                _add(found, ("cast", "", "f"), with_cast.forward_s - price.forward_s)
                _add(found, ("cast", "", "b"), with_cast.backward_s - price.backward_s)
        parts.append(found)
    return Prepared(case, job, c, layout, solutions, tuple(parts))


def _add(found: dict[Any, float], key: Any, value: float) -> None:
    found[key] = found.get(key, 0.0) + value


def _rated(
    parts: Mapping[tuple[str, str, str], float],
    phase: str,
    stack: StackProfile,
    clocks: Mapping[str, float],
    device: DeviceSpec,
) -> float:
    total = 0.0
    modern = device.arch in ("hopper", "blackwell")
    for (kind, dtype, when), seconds in parts.items():
        if when != phase:
            continue
        if kind in ("matrix", "expert"):
            speed = stack.matrix_rate if kind == "matrix" else stack.expert_rate
            clock = sustained_of(clocks, device.name, device.family, dtype)
            total += seconds / (speed * clock)
        elif kind == "attention":
            speed = stack.attention_rate
            if modern:
                speed = stack.hopper_attention_rate or speed
            total += seconds / speed
        elif kind == "math":
            total += seconds / stack.attention_rate
        elif kind == "cast":
            total += seconds * stack.cast_passes
        else:
            total += seconds / stack.memory_rate
    return total


def step_seconds(
    row: Prepared, stack: StackProfile, clocks: Mapping[str, float]
) -> float:
    """The step of a prepared row under other constants."""
    job, c = row.job, row.configuration
    args = (stack, clocks, job.device)
    solutions = tuple(
        replace(
            s,
            forward_s=_rated(parts, "f", *args),
            backward_s=_rated(parts, "b", *args),
            core_forward_s=_rated(parts, "core", *args),
        )
        for s, parts in zip(row.solutions, row.parts, strict=True)
    )
    kept = job.stack
    job.stack = stack
    try:
        return job.step_terms(c, row.layout, solutions).total_s
    finally:
        job.stack = kept


class Fit:
    """All stages over one set of rows."""

    def __init__(self, rows: Sequence[Mapping[str, str]], graphs: Graphs) -> None:
        base = RowPricer(graphs, neutral)
        casts = RowPricer(graphs, lambda n: replace(neutral(n), cast_passes=1.0))
        self.graphs, self.base, self.casts = graphs, base, casts
        self.cases: list[Case] = []
        for row in rows:
            try:
                self.cases.append(case_of(row))
            except SkipRowError:
                continue
        self.fitted: dict[str, dict[str, dict[str, Any]]] = json.loads(
            OUT.read_text("utf-8")
        )

    def rows(self, stage: Stage) -> list[Prepared]:
        """The stage's rows, thinned evenly where there are many."""
        chosen = [case for case in self.cases if stage.rows(case)]
        chosen.sort(key=lambda case: hashlib.sha256(case.id.encode()).hexdigest())
        found: list[Prepared] = []
        names = sorted({case.group for case in chosen})
        kept = [  # equal numbers of every group, while it has them
            case
            for name in names
            for case in [x for x in chosen if x.group == name][: LARGEST // len(names)]
        ]
        for case in kept if len(chosen) > LARGEST else chosen:
            try:
                found.append(prepare(case, self.base, self.casts))
            except (PlannerError, SpecError):
                continue
        return found

    def clocks(self) -> dict[str, float]:
        table = self.fitted["sustained"]
        return {key: float(entry["value"]) for key, entry in table.items()}

    def known(self, p: Parameter) -> float:
        """The constant as last fitted, or its start."""
        section = "sustained" if p.sustained else p.targets[0]
        field = p.targets[0] if p.sustained else p.field
        entry = self.fitted.get(section, {}).get(field)
        return _inner(p, float(entry["value"]) if entry else p.start)

    def run(
        self, stage: Stage, rows: Sequence[Prepared], fresh: bool = False
    ) -> Fields:
        """Best constants of a stage on ``rows``, by "target.field"."""
        parameters = stage.parameters
        start = np.array([_inner(p, p.start) for p in parameters])
        low = np.array([_inner(p, p.low) for p in parameters])
        high = np.array([_inner(p, p.high) for p in parameters])
        clocks = self.clocks()
        first = start if fresh else np.array([self.known(p) for p in parameters])

        def residuals(x: np.ndarray) -> np.ndarray:
            errors = np.log(predict(rows, parameters, x, clocks, self.fitted))
            pull = [
                p.prior * (v - s) for p, v, s in zip(parameters, x, start, strict=True)
            ]
            return np.concatenate([errors, pull])

        best = least_squares(
            residuals,
            np.clip(first, low + 1e-6, high - 1e-6),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=0.06,
            diff_step=0.02,
            max_nfev=16,
        )
        return {
            f"{'+'.join(p.targets)}.{p.field}": _outer(p, v)
            for p, v in zip(parameters, best.x, strict=True)
        }

    def keep(self, stage: Stage, values: Fields, rows: Sequence[Prepared]) -> None:
        """Writes a stage's constants with the error they leave."""
        x = np.array(
            [
                _inner(p, values[f"{'+'.join(p.targets)}.{p.field}"])
                for p in stage.parameters
            ]
        )
        ratio = predict(rows, stage.parameters, x, self.clocks(), self.fitted)
        error = round(float(np.median(np.abs(ratio - 1))), 4)
        source = f"benchmarks/fit/fit_stacks.py, stage {stage.name}, {len(rows)} rows"
        for p in stage.parameters:
            value = values[f"{'+'.join(p.targets)}.{p.field}"]
            entry = {"value": float(f"{value:.4g}"), "error": error, "source": source}
            for target in p.targets:
                section = "sustained" if p.sustained else target
                field = target if p.sustained else p.field
                self.fitted.setdefault(section, {})[field] = entry


def _inner(p: Parameter, value: float) -> float:
    """Rates and seconds are fitted as logs, fractions as they are."""
    return math.log(max(value, 1e-9)) if p.low > 0 else value


def _outer(p: Parameter, x: float) -> float:
    return math.exp(x) if p.low > 0 else float(x)


def predict(
    rows: Sequence[Prepared],
    parameters: Sequence[Parameter],
    x: np.ndarray,
    clocks: Mapping[str, float],
    fitted: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> np.ndarray:
    """Predicted over measured seconds of every row."""
    here, by_stack = dict(clocks), dict[str, Fields]()
    for p, v in zip(parameters, x, strict=True):
        for target in p.targets:
            if p.sustained:
                here[target] = _outer(p, v)
            else:
                by_stack.setdefault(target, {})[p.field] = _outer(p, v)
    known: dict[tuple[str, str], StackProfile] = {}
    ratios: list[float] = []
    for row in rows:
        name, attention = row.case.stack, row.case.attention
        if (name, attention) not in known:
            before = {k: float(e["value"]) for k, e in fitted.get(name, {}).items()}
            values: dict[str, Any] = {**before, **by_stack.get(name, {})}
            values["attention_kernel"] = attention
            known[name, attention] = replace(neutral(name), **values)
        seconds = step_seconds(row, known[name, attention], here)
        ratios.append(seconds / row.case.measured_s)
    return np.array(ratios)


def _held_out(case: Case) -> bool:
    text = repr(case.model_key)
    return hashlib.sha256(text.encode()).digest()[0] % 3 == 0


def _figures(ratio: np.ndarray) -> str:
    ape = np.abs(ratio - 1)
    if not len(ape):
        return "no rows"
    return (
        f"n {len(ape)}  median {np.median(ape):.3f}  p90 {np.quantile(ape, 0.9):.3f}  "
        f"mean {ape.mean():.3f}  bias {np.median(ratio - 1):+.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", default=str(DATA / "train_llm.csv.gz"))
    parser.add_argument("--stage", action="append")
    parser.add_argument("--hold-out", action="store_true")
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--stale-graphs", action="store_true")
    args = parser.parse_args()
    graphs = Graphs(args.graphs, args.stale_graphs)
    fit = Fit(read_rows(Path(args.data)), graphs)
    for stage in STAGES:
        if args.stage and stage.name not in args.stage:
            continue
        rows = fit.rows(stage)
        if not rows:
            continue
        if args.hold_out:
            inside = [r for r in rows if not _held_out(r.case)]
            outside = [r for r in rows if _held_out(r.case)]
            values = fit.run(stage, inside, fresh=True)
            x = np.array([
                _inner(p, values[f"{'+'.join(p.targets)}.{p.field}"])
                for p in stage.parameters
            ])  # fmt: skip
            for name, part in (("fitted", inside), ("held out", outside)):
                ratio = predict(part, stage.parameters, x, fit.clocks(), fit.fitted)
                print(f"{stage.name:20s} {name:9s} {_figures(ratio)}", flush=True)
            continue
        values = fit.run(stage, rows)
        fit.keep(stage, values, rows)
        x = np.array([
            _inner(p, values[f"{'+'.join(p.targets)}.{p.field}"])
            for p in stage.parameters
        ])  # fmt: skip
        ratio = predict(rows, stage.parameters, x, fit.clocks(), fit.fitted)
        print(f"{stage.name:20s} {_figures(ratio)}")
        for name, value in values.items():
            print(f"    {name} = {value:.4g}")
        sys.stdout.flush()
        OUT.write_text(json.dumps(fit.fitted, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
