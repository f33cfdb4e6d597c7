"""A traced graph as blocks of steps that run on local shards.

The model is traced as the planner traces it, every layer, at the plan's micro-batch;
its operator graph gives blocks and iteration spaces, its call arguments what to run.
"""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from passes.cluster_layers import cluster_layers
from passes.collect import RawGraph, RawOp, collect
from passes.expand import expand
from passes.ir import Block, Op, OpGraph, OpKind, TensorKind
from passes.lower import lower
from passes.spaces.registry import Ref
from passes.traced import TracedModel
from planner.errors import PlannerError
from planner.runtime.comm import Axis, Move, Recorder, moved
from planner.runtime.layout import local_shape
from planner.runtime.localops import Call, Run, functional, packet_of, run_op
from planner.runtime.tables import Table, grad_need
from planner.search.placements import PARTIAL, REPLICATED, Placement

Values = dict[str, Tensor]
Lookup = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Hop:
    """A move on one axis of a tensor whose full shape on that axis is ``shape``."""

    axis: Axis
    move: Move
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor argument of a step: what it is and how it gets there."""

    name: str
    stored: bool
    hops: tuple[Hop, ...]
    shape: tuple[int, ...]  # full
    only_type: bool = False  # ``name`` is a dtype


@dataclass(frozen=True, slots=True)
class Step:
    """One op: its call with references into ``reads``."""

    op: Op
    raw: RawOp
    target: Any
    reads: tuple[Read, ...]
    runs: tuple[Run, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    no_grad: bool
    writes_buffer: bool
    core: bool  # inside attention, between its products


@dataclass(frozen=True, slots=True)
class BlockProgram:
    """Steps of one block, its arrivals and its exits."""

    block: Block
    steps: tuple[Step, ...]
    arrivals: Mapping[str, tuple[Hop, ...]]
    exits: tuple[tuple[str, tuple[Hop, ...]], ...]
    outputs: tuple[str, ...]  # of the whole graph
    entering: tuple[str, ...]
    stored: tuple[str, ...]  # parameters and buffers that it reads


class Program:
    """All blocks of a traced model on this rank's axes (outer to inner)."""

    def __init__(
        self,
        traced: TracedModel,
        graph: OpGraph,
        tables: Sequence[tuple[Axis, Table]],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.graph, self.tables, self.recorder = graph, tuple(tables), recorder
        self.device = device
        self.module = traced.graph_module
        self.raw: RawGraph = collect(traced.graph_module)
        self.nodes = {n.name: n for n in traced.graph_module.graph.nodes}
        self.lowered = lower(traced)
        self._check()
        self.wiring = self.tables[0][1].wiring
        self.partial = self._partial_parameters()
        self.core = attention_steps(graph)
        self.blocks = tuple(self._block(b) for b in graph.blocks)

    def _check(self) -> None:
        names = [op.name for op in self.lowered.ops]
        assert names == [op.name for op in self.raw.ops], "the graph is another trace"
        for op in self.raw.ops:
            if op.name not in self.nodes:
                raise PlannerError(
                    "the model writes into a part of a tensor",
                    f"{op.name} in {op.module or 'the model'}",
                    "write it without in-place changes of views",
                )

    # ---- parameters ------------------------------------------------------------

    def _partial_parameters(self) -> dict[str, frozenset[str]]:
        """Parameters whose gradients are sums over an axis: name to axis names."""
        found: dict[str, set[str]] = {}
        for axis, table in self.tables:
            for op, strategy in zip(self.graph.ops, table.strategies, strict=True):
                for operand, gives in zip(
                    op.space.inputs, strategy.gradients, strict=True
                ):
                    if (
                        self.graph.tensor(operand.tensor).kind
                        is not TensorKind.PARAMETER
                    ):
                        continue
                    summed = gives.kind == "P" and strategy.dim != "+"
                    if summed and not bias_once(op, operand.axes, strategy.outputs):
                        found.setdefault(operand.tensor, set()).add(axis.name)
        return {name: frozenset(axes) for name, axes in found.items()}

    # ---- build -----------------------------------------------------------------

    def _hop(
        self, k: int, move: Move, places: Sequence[Placement], shape: Sequence[int]
    ) -> Hop:
        """The move on axis ``k``; ``places``: where the tensor lies on the others."""
        full = tuple(shape)
        for j, (axis, _) in enumerate(self.tables):
            if j != k:
                full = local_shape(full, places[j], axis.size, axis.rank)
        return Hop(self.tables[k][0], move, full)

    def _hops(
        self, moves: Sequence[Move | None], shape: Sequence[int]
    ) -> tuple[Hop, ...]:
        places = [m.src if m else REPLICATED for m in moves]
        hops: list[Hop] = []
        for k, move in enumerate(moves):
            if move is None:
                continue
            if not move.idle and self.tables[k][0].size > 1:
                hops.append(self._hop(k, move, places, shape))
            places[k] = move.dst
        return tuple(hops)

    def _read(self, i: int, name: str, block: Block) -> Read:
        graph = self.graph
        tensor = graph.tensor(name)
        moves: list[Move | None] = []
        for axis, table in self.tables:
            if tensor.kind is TensorKind.ACTIVATION:
                moves.append(table.use(i, name, block))
                continue
            at = table.wiring.position(graph.ops[i], name)
            if at < 0:
                moves.append(None)
                continue
            strategy = table.strategies[i]
            have = table.stored.get(name, REPLICATED)
            gives, needs = strategy.gradients[at], grad_need(have)
            if tensor.kind is TensorKind.PARAMETER:
                operand = graph.ops[i].space.inputs[at]
                if bias_once(graph.ops[i], operand.axes, strategy.outputs):
                    gives = REPLICATED
                if axis.name in self.partial.get(name, ()):
                    needs = PARTIAL
            moves.append(Move(have, strategy.inputs[at], gives, needs))
        stored = tensor.kind in (TensorKind.PARAMETER, TensorKind.BUFFER)
        return Read(name, stored, self._hops(moves, tensor.shape), tensor.shape)

    def _like(self, name: str) -> Read:
        """A tensor that only gives an op its dtype or shape: none of its elements."""
        raw = self.raw.tensors[name]
        return Read(raw.dtype, False, (), raw.shape, only_type=True)

    def _step(self, i: int, block: Block) -> Step:
        op = self.graph.ops[i]
        raw, traced = self.raw.ops[op.fusion], self.lowered.ops[op.fusion]
        node = self.nodes[raw.name]
        names = dict(zip(traced.inputs, op.inputs, strict=True))
        target = node.target
        schema = getattr(target, "_schema", None)
        written = packet_of(op.target) in ("batch_norm", "instance_norm")
        if schema is not None and schema.is_mutable and raw.inputs:
            kinds = [self.raw.tensors[n].kind for n in raw.inputs]
            written = TensorKind.BUFFER in kinds
            first = kinds[0] is TensorKind.BUFFER
            if not first:
                target = functional(target)
        return Step(
            op=op,
            raw=raw,
            target=target,
            reads=tuple(
                self._read(i, names[name], block) if name in names else self._like(name)
                for name in raw.inputs
            ),
            runs=tuple(Run(axis, table.strategies[i]) for axis, table in self.tables),
            out_shapes=tuple(self.graph.tensor(n).shape for n in op.outputs),
            no_grad=bool(node.meta.get("no_grad")),
            writes_buffer=written,
            core=i in self.core,
        )

    def _block(self, block: Block) -> BlockProgram:
        graph, wiring = self.graph, self.wiring
        shape = {t.name: t.shape for t in graph.tensors}
        shared = wiring.shared(block)
        arrivals = {
            name: self._hops(
                [t.arrive(name, block) for _, t in self.tables], shape[name]
            )
            for name in shared
        }
        exits = tuple(
            (
                name,
                self._hops([t.leave(name, block) for _, t in self.tables], shape[name]),
            )
            for name in wiring.exits(block)
        )
        made = {n for op in graph.ops[block.start : block.stop] for n in op.outputs}
        stored = (
            n
            for op in graph.ops[block.start : block.stop]
            for n in op.inputs
            if graph.tensor(n).kind in (TensorKind.PARAMETER, TensorKind.BUFFER)
        )
        return BlockProgram(
            block,
            tuple(self._step(i, block) for i in range(block.start, block.stop)),
            arrivals,
            exits,
            tuple(n for n in graph.outputs if n in made),
            tuple(wiring.entering(block)),
            tuple(dict.fromkeys(stored)),
        )

    # ---- run -------------------------------------------------------------------

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a boundary activation on this rank."""
        shape: tuple[int, ...] = self.graph.tensor(name).shape
        for axis, table in self.tables:
            shape = local_shape(shape, table.boundary(name), axis.size, axis.rank)
        return shape

    def output_placement(self, name: str) -> list[tuple[Axis, Placement]]:
        """Where a graph output lies on each axis."""
        source = self.wiring.producer[name]
        block = self.graph.blocks[self.wiring.block_of[source]]
        return [(axis, table.arrival(name, block)) for axis, table in self.tables]

    def run_block(
        self,
        program: BlockProgram,
        values: Values,
        stored: Lookup,
        *,
        selective: bool = False,
    ) -> Values:
        """Exits and outputs of one block, given what enters it (and the inputs).

        ``selective``: attention keeps its operands and runs again in backward.
        """
        env: Values = dict(values)
        for name, hops in program.arrivals.items():
            if name in env:
                env[name] = self._apply(env[name], hops, name)
        for step in program.steps:
            self._run_step(step, env, stored, program.arrivals, selective and step.core)
        result: Values = {}
        for name, hops in program.exits:
            result[name] = self._apply(env[name], hops, name)
        for name in program.outputs:
            result.setdefault(name, env[name])
        return result

    def _apply(self, x: Tensor, hops: Sequence[Hop], where: str) -> Tensor:
        for hop in hops:
            self.recorder.where = where
            x = moved(x, hop.move, hop.shape, hop.axis)
        return x

    def _run_step(
        self,
        step: Step,
        env: Values,
        stored: Lookup,
        arrivals: Mapping[str, tuple[Hop, ...]],
        again: bool,
    ) -> None:
        self.recorder.where = step.op.name
        tensors: list[Tensor] = []
        for read in step.reads:
            if read.only_type:
                dtype = getattr(torch, read.name)
                x = torch.zeros((), dtype=dtype, device=self.device).expand(read.shape)
                tensors.append(x)
                continue
            x = (
                stored(read.name)
                if read.stored and read.name not in env
                else env[read.name]
            )
            tensors.append(self._apply(x, read.hops, step.op.name))
        full = {id(t): r.shape for t, r in zip(tensors, step.reads, strict=True)}
        if step.writes_buffer and self.recorder.in_backward:
            tensors = [t.clone() if r.stored and not t.requires_grad else t
                       for t, r in zip(tensors, step.reads, strict=True)]  # fmt: skip
            full = {id(t): r.shape for t, r in zip(tensors, step.reads, strict=True)}

        def fill(item: object) -> object:
            if isinstance(item, Ref):
                return tensors[item.index]
            if isinstance(item, list):
                return [fill(x) for x in item]  # pyright: ignore[reportUnknownVariableType]
            return item

        call = Call(
            step.op,
            step.target,
            {key: fill(value) for key, value in step.raw.args.items()},
            step.runs,
            step.out_shapes,
            full,
            self.device,
        )
        with torch.no_grad() if step.no_grad else nullcontext():
            out = (
                checkpoint(run_op, call, use_reentrant=False) if again else run_op(call)
            )
        items = (
            [out]
            if isinstance(out, Tensor)
            else [x for x in out if isinstance(x, Tensor)]
        )
        for name, item in zip(step.op.outputs, items, strict=False):
            hops = arrivals.get(name)
            env[name] = self._apply(item, hops, name) if hops else item


def bias_once(op: Op, axes: Sequence[object], outputs: Sequence[Placement]) -> bool:
    """A bias added after the sum of a divided reduction: its gradient is whole."""
    return (
        op.kind in (OpKind.GEMM, OpKind.CONV)
        and len(axes) == 1
        and all(p.kind == "P" for p in outputs)
    )


def attention_steps(graph: OpGraph) -> frozenset[int]:
    """Ops that selective recompute runs again: fused attention, or what lies between
    the two products of an unfused one."""
    return frozenset(i for i, op in enumerate(graph.ops) if op.kind is OpKind.ATTENTION)


def graph_of(traced: TracedModel, kinds: Mapping[str, int]) -> OpGraph:
    """The whole model's operator graph, with blocks of the given kinds by name.

    ``fusion`` of every op is the number of the traced op that it runs: layers that the
    trace left out run the calls of their equals.
    """
    lowered = lower(traced)
    tagged = lowered.with_ops(
        tuple(replace(op, fusion=i) for i, op in enumerate(lowered.ops))
    )
    graph = cluster_layers(expand(tagged, traced.runs))
    blocks = tuple(replace(b, kind=kinds.get(b.name, -1)) for b in graph.blocks)
    return replace(graph, blocks=blocks)


def constants(module: fx.GraphModule, names: Sequence[str]) -> dict[str, Tensor]:
    """Values that the trace lifted out of the model's code."""
    return {name: operator.attrgetter(name)(module) for name in names}
