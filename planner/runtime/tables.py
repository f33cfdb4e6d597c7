"""Where every tensor of a traced graph lies on one mesh axis, op by op.

A table holds the strategy of each op on one axis, the placement of stored tensors, the
placement of activations that cross a block boundary, and the two states of activations
that several ops of a block read (where it lies, and in which state its gradients are
summed). :func:`plan_table` reads all of it from a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir import Block, Op, OpGraph, OpKind, TensorKind
from planner.errors import PlannerError
from planner.plan.documents import Document
from planner.plan.names import expand, parse_placement, parse_range
from planner.plan.records import CollectiveRecord, PlacementRecord
from planner.runtime.comm import Move
from planner.search.placements import (
    PARTIAL,
    REPLICATED,
    Placement,
    gradient_reshard,
    reshard,
    shard,
)
from planner.search.strategies import Strategy, op_strategies

#: Boundary states that a plan may have without sequence parallelism.
STATES = ("replicated", "batch", "feature")
Shared = tuple[Placement, Placement]


def grad_need(placement: Placement) -> Placement:
    """The state in which the maker of a tensor wants its gradient."""
    return placement if placement.kind == "S" else REPLICATED


@dataclass(slots=True)
class Wiring:
    """Who makes and reads each tensor of a graph that is cut into blocks."""

    graph: OpGraph
    producer: dict[str, int] = field(default_factory=dict[str, int])
    block_of: list[int] = field(default_factory=list[int])
    leaving: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: OpGraph) -> Wiring:
        self = cls(graph)
        self.block_of = [0] * len(graph.ops)
        for block in graph.blocks:
            for i in range(block.start, block.stop):
                self.block_of[i] = block.index
                self.producer.update(dict.fromkeys(graph.ops[i].outputs, i))
        self.leaving = frozenset(
            name
            for i, op in enumerate(graph.ops)
            for name in op.inputs
            if name in self.producer
            and self.block_of[self.producer[name]] != self.block_of[i]
        )
        return self

    def made_in(self, name: str, block: Block) -> bool:
        """Whether an op of ``block`` makes the activation."""
        source = self.producer.get(name)
        return source is not None and block.start <= source < block.stop

    def shared(self, block: Block) -> dict[str, list[int]]:
        """Activations that several ops of the block (or ops and other blocks) read."""
        users: dict[str, list[int]] = {}
        for i in range(block.start, block.stop):
            for name in dict.fromkeys(self.graph.ops[i].inputs):
                if self.graph.tensor(name).kind is TensorKind.ACTIVATION:
                    users.setdefault(name, []).append(i)

        def leaves(name: str) -> bool:
            return name in self.leaving and self.made_in(name, block)

        return {n: u for n, u in users.items() if len(u) + int(leaves(n)) > 1}

    def entering(self, block: Block) -> list[str]:
        """Activations of earlier blocks that this one reads."""
        names = (
            name
            for op in self.graph.ops[block.start : block.stop]
            for name in op.inputs
            if self.graph.tensor(name).kind is TensorKind.ACTIVATION
            and not self.made_in(name, block)
        )
        return list(dict.fromkeys(names))

    def exits(self, block: Block) -> list[str]:
        """Activations of this block that others read."""
        return [
            name
            for op in self.graph.ops[block.start : block.stop]
            for name in op.outputs
            if name in self.leaving
        ]

    def batch_axis(self, name: str) -> int:
        """The axis of an activation that carries samples; -1 if none does."""
        rates = self.graph.tensor(name).per_sample
        return next((i for i, rate in enumerate(rates) if rate), -1)

    def position(self, op: Op, name: str) -> int:
        """Which operand of the op's space ``name`` is; -1 if only its type is read."""
        for k, operand in enumerate(op.space.inputs):
            if operand.tensor == name:
                return k
        return -1


@dataclass(slots=True)
class Table:
    """Placements on one axis; see the module."""

    wiring: Wiring
    size: int
    strategies: list[Strategy]
    stored: Mapping[str, Placement]
    state: str = "replicated"
    shared: dict[tuple[int, str], Shared] = field(
        default_factory=dict[tuple[int, str], Shared]
    )

    def boundary(self, name: str) -> Placement:
        """Placement of an activation that crosses a block boundary."""
        rank, batch = (
            len(self.wiring.graph.tensor(name).shape),
            self.wiring.batch_axis(name),
        )
        if self.state == "sequence" and rank == 3 and batch in (0, 1):
            return shard(1 - batch)
        if self.state == "batch" and batch >= 0:
            return shard(batch)
        if self.state == "feature" and rank >= 4 and batch == 0:
            return shard(1)
        return REPLICATED

    def arrival(self, name: str, block: Block) -> Placement:
        """Placement in which a block gets or makes an activation."""
        if not self.wiring.made_in(name, block):
            return self.boundary(name)
        source = self.wiring.producer[name]
        op = self.wiring.graph.ops[source]
        return self.strategies[source].outputs[op.outputs.index(name)]

    def have(self, name: str, block: Block) -> Shared:
        """Placement and gradient state from which the block's readers take it."""
        found = self.shared.get((block.index, name))
        if found is not None:
            return found
        arrival = self.arrival(name, block)
        return arrival, grad_need(arrival)

    def arrive(self, name: str, block: Block) -> Move:
        """From the maker (or the boundary) to the shared state."""
        before, (have, have_grad) = self.arrival(name, block), self.have(name, block)
        return Move(before, have, have_grad, grad_need(before))

    def use(self, i: int, name: str, block: Block) -> Move | None:
        """From what the block has to what op ``i`` wants."""
        op, strategy = self.wiring.graph.ops[i], self.strategies[i]
        at = self.wiring.position(op, name)
        if at < 0:
            return None
        have, needs = self.have(name, block)
        return Move(have, strategy.inputs[at], strategy.gradients[at], needs)

    def leave(self, name: str, block: Block) -> Move:
        """From what the block has to the boundary."""
        have, needs = self.have(name, block)
        want = self.boundary(name)
        return Move(have, want, grad_need(want), needs)

    def rows(self, block: Block) -> Iterator[tuple[str, str, str, int]]:
        """(where, kind, phase, bytes) of every collective of the block's moves."""
        graph = self.wiring.graph

        def moves(
            name: str, move: Move, where: str
        ) -> Iterator[tuple[str, str, str, int]]:
            tensor = graph.tensor(name)
            found = reshard(move.src, move.dst, tensor.nbytes, self.size)
            if found is None:
                raise _Illegal(f"{name}: {move.src} to {move.dst}")
            if found.kind:
                yield where, found.kind, "forward", int(found.nbytes)
            if tensor.requires_grad:
                back = gradient_reshard(
                    move.gives, move.needs, tensor.nbytes, self.size
                )
                if back is None:
                    raise _Illegal(f"{name}: {move.gives} to {move.needs}")
                if back.kind:
                    yield where, back.kind, "backward", int(back.nbytes)

        for index, name in self.shared:
            if index == block.index:
                yield from moves(name, self.arrive(name, block), name)
                if name in self.wiring.leaving and self.wiring.made_in(name, block):
                    yield from moves(name, self.leave(name, block), name)
        for i in range(block.start, block.stop):
            op = graph.ops[i]
            for name in dict.fromkeys(op.inputs):
                if graph.tensor(name).kind is TensorKind.ACTIVATION:
                    move = self.use(i, name, block)
                    if move is not None:
                        yield from moves(name, move, op.name)
            for name in op.outputs:
                alone = (block.index, name) not in self.shared
                if name in self.wiring.leaving and alone:
                    yield from moves(name, self.leave(name, block), op.name)


class _Illegal(Exception):
    """A move that has no collective."""


# ---- from a plan -----------------------------------------------------------------


class PlanReader:
    """Finds a plan's records for the ops and tensors of a graph."""

    def __init__(self, plan: Document, graph: OpGraph) -> None:
        self.plan, self.graph = plan, graph
        self.first = {b.kind: b for b in reversed(graph.blocks)}
        self.ops: dict[str, list[tuple[frozenset[str], str, PlacementRecord]]] = {}
        self.stored: dict[str, PlacementRecord] = {}
        for key, record in plan.placements.items():
            if record.what == "op":
                prefix, _, name = key.rpartition("/")
                blocks = frozenset(_expanded(prefix, record.layers))
                self.ops.setdefault(name, []).append((blocks, prefix, record))
            else:
                for name in _expanded(key, record.layers):
                    self.stored[name] = record

    def op(self, index: int, block: Block) -> tuple[str, PlacementRecord]:
        """The record of op ``index``, and the prefix that names its block."""
        first = self.first[block.kind]
        name = self.graph.ops[first.start + index - block.start].name
        for blocks, prefix, record in self.ops.get(name, ()):
            if block.name in blocks:
                return prefix, record
        raise PlannerError(
            "the plan is of another model",
            f"it has no {block.name}/{name}",
            "plan this model again",
        )


def _expanded(text: str, layers: str | None) -> list[str]:
    if layers is None or "*" not in text:
        return [text]
    assert parse_range(layers)
    return list(expand(text, layers))


def _placements(records: Iterable[object], axis: str) -> tuple[Placement, ...]:
    return tuple(
        parse_placement(r.placement.get(axis, "R"))  # type: ignore[attr-defined]
        for r in records
    )


def _strategy(op: Op, record: PlacementRecord, axis: str, size: int) -> Strategy:
    """The op's strategy with the plan's placements."""
    inputs = _placements(record.inputs, axis)
    outputs = _placements(record.outputs, axis)
    sizes = frozenset(d.size for d in op.space.dims)
    for strategy in op_strategies(op, size, sizes):
        if strategy.inputs == inputs and strategy.outputs == outputs:
            return strategy
    shown = ", ".join(map(str, inputs)), ", ".join(map(str, outputs))
    raise PlannerError(
        "the plan places an op as it can not run",
        f"{op.name} ({op.target}): {shown[0]} -> {shown[1]} over {size} ranks",
        "plan the model again",
    )


def plan_table(plan: Document, graph: OpGraph, axis: str = "tp") -> Table:
    """The plan's placements on ``axis``.

    The boundary state and the states of shared activations are those whose collectives
    are the plan's. Raises PlannerError where the plan is of another model.
    """
    wiring, reader = Wiring.of(graph), PlanReader(plan, graph)
    size = plan.mesh.size(axis)
    strategies: list[Strategy] = []
    labels: dict[int, str] = {}
    for block in graph.blocks:
        for i in range(block.start, block.stop):
            prefix, record = reader.op(i, block)
            labels[block.index] = prefix
            strategies.append(_strategy(graph.ops[i], record, axis, size))
    stored = {
        name: parse_placement(record.outputs[0].placement.get(axis, "R"))
        for name, record in reader.stored.items()
    }
    planned = _planned(plan, axis)
    states = ("sequence",) if plan.parallelism.sequence_parallel else STATES
    best: tuple[int, Table] | None = None
    for state in states:
        table = Table(wiring, size, strategies, stored, state)
        try:
            wrong = _settle(table, graph, labels, planned)
        except _Illegal:
            continue
        if best is None or wrong < best[0]:
            best = wrong, table
        if not wrong:
            break
    if best is None:
        raise PlannerError("the plan's placements do not fit together", axis)
    return best[1]


def _planned(plan: Document, axis: str) -> dict[str, Counter[tuple[str, str, int]]]:
    """Where to (kind, phase, bytes) per micro-batch and block."""
    result: dict[str, Counter[tuple[str, str, int]]] = {}
    seen: set[tuple[str, str, str, int]] = set()
    for row in plan.collectives:
        if row.axis != axis or row.phase not in ("forward", "backward"):
            continue
        key = (row.where, row.kind, row.phase, row.bytes)
        if key in seen:
            continue  # the same rows of another stage
        seen.add(key)
        calls = _calls(plan, row)
        result.setdefault(row.where, Counter())[(row.kind, row.phase, row.bytes)] += (
            calls
        )
    return result


def _calls(plan: Document, row: CollectiveRecord) -> int:
    """Calls per micro-batch and block behind one row."""
    label = row.where.rpartition("/")[0]
    names = {
        block
        for key, record in plan.placements.items()
        if record.what == "op" and key.rpartition("/")[0] == label
        for block in _expanded(label, record.layers)
    }
    held = sum(name in names for name in plan.stages[row.stage].blocks)
    micro = plan.parallelism.num_micro_batches or 1
    return max(1, row.count_per_step // max(1, held * micro))


def _settle(
    table: Table,
    graph: OpGraph,
    labels: Mapping[int, str],
    planned: Mapping[str, Counter[tuple[str, str, int]]],
) -> int:
    """Chooses the states of shared activations; how many collectives then differ."""
    wrong = 0
    settled: dict[int, tuple[list[Shared], int]] = {}
    for block in graph.blocks:
        names = list(table.wiring.shared(block))
        if block.kind in settled:
            states, miss = settled[block.kind]
            for name, state in zip(names, states, strict=True):
                table.shared[(block.index, name)] = state
            wrong += miss
            continue
        for name in names:
            table.shared[(block.index, name)] = (REPLICATED, REPLICATED)
        for name in names:
            table.shared[(block.index, name)] = _shared_state(
                table, block, name, labels[block.index], planned
            )
        made: dict[str, Counter[tuple[str, str, int]]] = {}
        for where, kind, phase, nbytes in table.rows(block):
            key = f"{labels[block.index]}/{where}"
            made.setdefault(key, Counter())[(kind, phase, nbytes)] += 1
        miss = 0
        losses = _loss_names(graph, block, labels[block.index])
        here = f"{labels[block.index]}/"
        for key in made.keys() | {k for k in planned if k.startswith(here)}:
            if key in losses:
                continue
            a, b = made.get(key, Counter()), planned.get(key, Counter())
            miss += ((a - b) + (b - a)).total()
        settled[block.kind] = (
            [table.shared[(block.index, name)] for name in names],
            miss,
        )
        wrong += miss
    return wrong


def _loss_names(graph: OpGraph, block: Block, label: str) -> set[str]:
    return {
        f"{label}/{op.name}"
        for op in graph.ops[block.start : block.stop]
        if op.kind is OpKind.LOSS
    }


_WEIGHT = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}


def _shared_state(
    table: Table,
    block: Block,
    name: str,
    label: str,
    planned: Mapping[str, Counter[tuple[str, str, int]]],
) -> Shared:
    """The state of one shared activation whose collectives are the plan's.

    Its arrival is listed under its own name, its uses under the readers'; where several
    states agree on the first, the one that moves least is taken, as the search does.
    """
    graph = table.wiring.graph
    wanted = planned.get(f"{label}/{name}", Counter())
    users = table.wiring.shared(block)[name]
    places = {REPLICATED, table.boundary(name), table.arrival(name, block)}
    for i in users:
        at = table.wiring.position(graph.ops[i], name)
        if at >= 0:
            places.add(table.strategies[i].inputs[at])
    places.discard(PARTIAL)
    best: tuple[float, float, Shared] | None = None
    for p in sorted(places, key=str):
        options: list[Shared] = [(p, grad_need(p))]
        if p.kind == "R" and graph.tensor(name).requires_grad:
            options.append((p, PARTIAL))
        for choice in options:
            table.shared[(block.index, name)] = choice
            try:
                found = list(table.rows(block))
            except _Illegal:
                continue
            own = Counter((k, ph, n) for w, k, ph, n in found if w == name)
            off = ((own - wanted) + (wanted - own)).total()
            cost = sum(_WEIGHT[k] * n for _, k, _, n in found)
            if best is None or (off, cost) < best[:2]:
                best = off, cost, choice
    if best is None:
        raise _Illegal(name)
    return best[2]
