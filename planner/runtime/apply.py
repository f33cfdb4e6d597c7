"""A plan and a model become one rank of a running job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cost_models.schedules import Schedule, stage_of
from passes.errors import PassError
from passes.ir import OpGraph, TensorKind
from passes.trace import trace
from passes.traced import TracedModel
from planner.errors import PlannerError
from planner.models import resolve_model
from planner.plan.documents import Document
from planner.runtime import checkpoint
from planner.runtime.comm import Axis, Recorder
from planner.runtime.faults import guarded
from planner.runtime.inputs import InputMap
from planner.runtime.pipeline import Mail, Pipeline
from planner.runtime.program import Program, Values, constants, graph_of
from planner.runtime.reduce import clip_gradients, reduce_gradients
from planner.runtime.stagework import Chunk
from planner.runtime.store import Store
from planner.runtime.tables import plan_table
from planner.runtime.topology import Topology, build_topology, check_world
from planner.runtime.weights import Init, default_init, values_of
from planner.search.placements import REPLICATED
from planner.workload import Training

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_TRACED = {**_MIXED, "fp32": torch.float32, "tf32": torch.float32}


def apply(
    plan: Document,
    model: Any = None,
    example_inputs: Any = None,
    *,
    device: torch.device | str | None = None,
    init: Init = default_init,
    seed: int = 0,
) -> Parallel:
    """This rank's part of ``model``, divided as ``plan`` says.

    ``model``: the module that was planned (its values are cut, it is not changed), or
    one on the meta device, or whatever ``planner.optimize`` takes; None where the plan
    names its model. ``example_inputs`` as for ``optimize``. Values of meta parameters
    come from ``init(module)`` under ``seed``, module by module. Call it on every rank
    after ``init_process_group``.

    Raises PlannerError for another world size, another model, or what does not run.
    """
    if not isinstance(plan.workload, Training):
        raise PlannerError("the runtime trains", "an Inference plan", "plan a training")
    check_world(plan.parallelism)
    refuse(plan)
    where = torch.device(device or _default_device())
    given = plan.model.source if model is None else model
    if isinstance(given, str) and given.startswith("object:"):
        raise PlannerError(
            "the plan's model was handed in as an object", given, "pass the module"
        )
    traced, inputs, module = traced_model(plan, given, example_inputs)
    graph = graph_of(traced, {b.name: b.kind for b in plan.model.blocks})
    check_same_model(plan, graph)
    return Parallel(plan, given, module, traced, graph, inputs, where, init, seed)


def _default_device() -> str:
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend()):
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def refuse(plan: Document) -> None:
    """Raises for what the runtime can not execute, naming it."""
    p = plan.parallelism
    for name, value, fix in (
        ("context parallelism", p.cp, "plan with cp=1"),
        ("expert parallelism", p.ep, "plan with ep=1"),
    ):
        if value > 1:
            raise PlannerError(f"the runtime has no {name} yet", value, fix)


def traced_model(
    plan: Document, model: Any, example_inputs: Any
) -> tuple[TracedModel, InputMap, nn.Module]:
    """The model traced at the plan's micro-batch, as the planner traces it."""
    workload = plan.workload
    assert isinstance(workload, Training)
    source = resolve_model(
        model,
        seq_len=workload.seq_len,
        image_size=workload.image_size,
        dtype=_TRACED[workload.precision],
        example_inputs=example_inputs,
        mode="train",
    )
    module, args, kwargs = source.build()
    try:
        traced = trace(
            module,
            args,
            kwargs,
            batch=plan.parallelism.micro_batch_size,
        )
    except PassError as error:
        raise PlannerError(error.what, error.value, error.fix) from error
    return traced, InputMap.of(module, traced, args, kwargs), module


def check_same_model(plan: Document, graph: OpGraph) -> None:
    """Raises unless the graph has the plan's blocks and parameters."""
    names = [b.name for b in graph.blocks]
    planned = [b.name for b in plan.model.blocks]
    count = graph.parameter_count
    if names != planned or count != plan.model.parameters:
        found = f"{len(names)} blocks and {count} parameters"
        wanted = f"{len(planned)} blocks and {plan.model.parameters} parameters"
        raise PlannerError(
            "the plan is of another model",
            f"{found}, planned {wanted} ({plan.model.name})",
            "plan this model",
        )


@dataclass(frozen=True, slots=True)
class Virtual:
    """What one virtual stage holds: block numbers, and what crosses its edges."""

    blocks: tuple[int, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def virtual_stages(plan: Document, graph: OpGraph) -> list[Virtual]:
    """All virtual stages in execution order."""
    schedule = Schedule(plan.parallelism.schedule)
    ranks = plan.parallelism.pp
    index = {b.name: b.index for b in graph.blocks}
    held: dict[int, list[int]] = {}
    for stage in plan.stages:
        at = 0
        for chunk, count in enumerate(stage.chunks):
            names = stage.blocks[at : at + count]
            held[stage_of(schedule, stage.index, chunk, ranks)] = [
                index[n] for n in names
            ]
            at += count
    number = [held[v] for v in sorted(held)]
    stage_of_block = {b: v for v, blocks in enumerate(number) for b in blocks}
    made: dict[str, int] = {}
    used: dict[str, int] = {}
    for block in graph.blocks:
        v = stage_of_block[block.index]
        for op in graph.ops[block.start : block.stop]:
            for name in op.inputs:
                if name in made:
                    used[name] = max(used.get(name, -1), v)
            made.update(dict.fromkeys(op.outputs, v))
    cuts = [
        tuple(n for n in made if made[n] < v <= used.get(n, -1))
        for v in range(len(number) + 1)
    ]
    return [
        Virtual(tuple(blocks), cuts[v], cuts[v + 1] if v + 1 < len(number) else ())
        for v, blocks in enumerate(number)
    ]


def loss_name(graph: OpGraph) -> str:
    """The graph output that is trained on: the first scalar with a gradient."""
    for name in graph.outputs:
        tensor = graph.tensor(name)
        if tensor.requires_grad and tensor.numel == 1:
            return name
    raise PlannerError(
        "the model returns no scalar loss",
        ", ".join(graph.outputs) or "nothing",
        "wrap it in a module whose forward returns the loss",
    )


class Parallel:
    """One rank of a plan that runs.

    ``parameters()`` go to the user's optimizer; ``step(*args, **kwargs)`` runs forward
    and backward of this data rank's samples of one global batch and leaves the reduced
    gradients in them; ``clip_grad_norm_`` clips by the norm over all ranks.
    """

    def __init__(
        self,
        plan: Document,
        model: Any,
        module: nn.Module,
        traced: TracedModel,
        graph: OpGraph,
        inputs: InputMap,
        device: torch.device,
        init: Init | None,
        seed: int,
    ) -> None:
        workload = plan.workload
        assert isinstance(workload, Training)
        self.plan, self.graph, self.inputs, self.device = plan, graph, inputs, device
        self.recorder = Recorder()
        self.topology: Topology = build_topology(
            plan.parallelism, device, self.recorder
        )
        self.table = plan_table(plan, graph)
        self.program = Program(
            traced, graph, [(self.topology.tp, self.table)], self.recorder, device
        )
        self.loss = loss_name(graph)
        stages = virtual_stages(plan, graph)
        ranks = plan.parallelism.pp
        schedule = Schedule(plan.parallelism.schedule)
        mine = [
            stages[stage_of(schedule, self.topology.stage, c, ranks)]
            for c in range(plan.parallelism.vpp)
        ]
        self.store = Store(
            self.topology,
            plan.parallelism.zero,
            _MIXED.get(workload.precision),
            _DTYPES[workload.gradient_dtype] if workload.gradient_dtype else None,
        )
        self.stages = stages
        self._fill(model if isinstance(model, nn.Module) else module, mine, init, seed)
        chunks = tuple(
            Chunk(
                self.program, self.store, v.blocks, v.takes, v.gives, plan.recompute,
                self.loss,
            )
            for v in mine
        )  # fmt: skip
        self.tied = self._tied()
        mail = Mail(self.topology, self.program, self.recorder)
        self.pipeline = Pipeline(schedule, chunks, self.topology, mail)

    # ---- set-up ----------------------------------------------------------------

    def _fill(
        self, model: nn.Module, mine: Sequence[Virtual], init: Init | None, seed: int
    ) -> None:
        graph, held = self.graph, self._held(mine)
        known = {n: graph.tensor(n) for n in held}
        lifted = [n for n in held if not _has(model, n)]
        for name, value in constants(self.program.module, lifted).items():
            self.store.add_buffer(name, value, REPLICATED)
        names = [n for n in held if n not in lifted]
        for name, value in values_of(model, names, seed=seed, init=init, dtype=None):
            tensor = known[name]
            place = self.table.stored.get(name, REPLICATED)
            if tensor.kind is TensorKind.PARAMETER:
                self.store.add_parameter(
                    name, value, place, trainable=tensor.trainable,
                    summed="tp" in self.program.partial.get(name, ()),
                )  # fmt: skip
            else:
                kind = getattr(torch, tensor.dtype)
                self.store.add_buffer(name, value.to(kind), place)

    def _held(self, mine: Sequence[Virtual]) -> list[str]:
        """Stored tensors that this rank's blocks read, and on the first stage those
        that nothing reads."""
        graph = self.graph
        kinds = (TensorKind.PARAMETER, TensorKind.BUFFER)
        read = {n for b in self.program.blocks for n in b.stored}
        here = {
            n for v in mine for b in v.blocks for n in self.program.blocks[b].stored
        }
        first = self.topology.stage == 0
        return [
            t.name
            for t in graph.tensors
            if t.kind in kinds
            and (
                t.name in here or (first and t.name not in read and t.kind == kinds[0])
            )
        ]

    # ---- training --------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's trainable parameters: DTensors, fp32 under mixed precision."""
        for stored in self.store.parameters.values():
            if stored.trainable:
                yield stored.master

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the model's own names."""
        for name, stored in self.store.parameters.items():
            if stored.trainable:
                yield name, stored.master

    @property
    def local_batch(self) -> int:
        """Samples of one step that this rank's data-parallel group member takes."""
        p = self.plan.parallelism
        assert p.num_micro_batches is not None
        return p.micro_batch_size * p.num_micro_batches

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank takes, of ``data_parallel``."""
        c = self.topology.coordinates
        return c["dp_replicate"] * self.plan.parallelism.dp_shard + c["dp_shard"]

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch; the mean loss, on every rank.

        The arguments hold this data rank's samples (all ranks of one data rank give the
        same). Gradients of earlier steps are replaced, not added to.
        """
        bound = self.inputs.bind(args, kwargs, self.device)
        with guarded():
            return self.mean_loss(self.run(bound))

    __call__ = step

    def run(self, bound: Values) -> Tensor | None:
        """The step on bound inputs; this rank's mean loss where the loss is made."""
        p = self.plan.parallelism
        count, size = p.num_micro_batches or 1, p.micro_batch_size
        self.store.refresh()
        for stored in self.store.parameters.values():
            stored.leaf.grad, stored.gradient, stored.master.grad = None, None, None

        def micro(index: int) -> Values:
            return self.inputs.micro(bound, index, size)

        scale = 1.0 / (count * p.data_parallel)
        loss = self.pipeline.run(micro, count, scale)
        reduce_gradients(self.store, self.tied)
        self.store.stale = True
        return loss

    def mean_loss(self, loss: Tensor | None) -> Tensor:
        """Averaged over data ranks and known on every pipeline stage."""
        topology = self.topology
        value = torch.zeros(1, dtype=torch.float64, device=self.device)
        if loss is not None:
            value += loss.detach().double()
            for axis, place in self.program.output_placement(self.loss):
                if place.kind == "P" and axis.size > 1:
                    dist.all_reduce(value, group=axis.group)
        if topology.dp.size > 1:
            dist.all_reduce(value, group=topology.dp.group)
            value /= topology.dp.size
        if topology.pp.size > 1:
            dist.all_reduce(value, group=topology.pp.group)
        return value[0].float()

    def _tied(self) -> list[tuple[str, Axis]]:
        """Parameters that several stages hold, with the group that shares each."""
        holders: dict[str, list[int]] = {}
        p = self.plan.parallelism
        schedule = Schedule(p.schedule)
        for stage in range(p.pp):
            mine = [
                self.stages[stage_of(schedule, stage, c, p.pp)] for c in range(p.vpp)
            ]
            for name in {
                n for v in mine for b in v.blocks for n in self.program.blocks[b].stored
            }:
                holders.setdefault(name, []).append(stage)
        groups: dict[tuple[int, ...], Axis] = {}
        result: list[tuple[str, Axis]] = []
        for tensor in self.graph.parameters:
            stages = tuple(holders.get(tensor.name, ()))
            if len(stages) < 2 or not tensor.trainable:
                continue
            if stages not in groups:
                groups[stages] = self.topology.stage_group(stages)
            if self.topology.stage in stages:
                result.append((tensor.name, groups[stages]))
        return result

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all ranks is at most
        ``max_norm``; returns the norm before."""
        skip = {name for name, axis in self.tied if axis.rank > 0}
        return clip_gradients(self.store, max_norm, skip)

    # ---- state -----------------------------------------------------------------

    def full_parameter(self, name: str) -> Tensor:
        """The whole parameter in the model's own order, on every rank of its stage."""
        stored = self.store.parameters[name]
        return self.store.full(name, self.store.local_master(stored))

    def full_gradient(self, name: str) -> Tensor:
        """The whole reduced gradient of a parameter."""
        stored = self.store.parameters[name]
        grad = stored.master.grad
        assert isinstance(grad, DTensor), f"{name} has no gradient"
        return self.store.full(name, grad.to_local())

    def save(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Write a checkpoint that any plan of the model reads."""
        checkpoint.save(self, path, optimizer)

    def load(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Read a checkpoint that any plan of the model wrote."""
        checkpoint.load(self, path, optimizer)


def _has(model: nn.Module, name: str) -> bool:
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(getattr(module, key, None), Tensor)
