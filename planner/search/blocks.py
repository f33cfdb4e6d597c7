"""Solve one block on one tensor axis: which strategy for each op, and what it costs.

The problem of a block (the ops of one pipeline block, ``size`` ranks):

* a node per op; its choices are the op's strategies, its cost is device time forward
  and backward, the gradient synchronisation of parameters that the axis leaves
  replicated, and ``seconds_per_byte`` times the activation bytes it keeps;
* a node per activation that several ops read, so that one gather serves them all; its
  choices are a placement and the state in which gradients are summed;
* an edge per use, costing the collective that turns the producer's placement into the
  reader's, and the reader's gradient back into the producer's;
* activations that enter or leave the block have the placement of the boundary state.

:func:`planner.search.intra_op.solve` finds the optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from passes.ir import Block, Op, Operand, OpGraph, OpKind, TensorKind
from planner.search import intra_op
from planner.search.placements import (
    PARTIAL,
    REPLICATED,
    Placement,
    gradient_reshard,
    reshard,
    shard,
)
from planner.search.pricing import Pricer, expert_dims
from planner.search.strategies import Strategy, op_strategies, share

INFINITE = float("inf")
#: Weights with a side below this are left whole by tensor parallelism as frameworks run
#: it: routers and low-rank adapters.
NARROW_WEIGHT = 512
Matrix: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """Placement of every activation that crosses a block boundary.

    ``replicated``; ``sequence``: axis 1 of (batch, sequence, feature) activations;
    ``batch``: the axis that carries samples; ``feature``: channels of image tensors.
    """

    name: str

    def placement(self, graph: OpGraph, tensor: str, batch_axis: int) -> Placement:
        shape = graph.tensor(tensor).shape
        if self.name == "sequence" and len(shape) == 3 and batch_axis == 0:
            return shard(1)
        if self.name == "sequence" and len(shape) == 3 and batch_axis == 1:
            return shard(0)
        if self.name == "batch" and batch_axis >= 0:
            return shard(batch_axis)
        if self.name == "feature" and len(shape) >= 4 and batch_axis == 0:
            return shard(1)
        return REPLICATED

    def legal(self, graph: OpGraph, tensor: str, batch_axis: int, size: int) -> bool:
        p = self.placement(graph, tensor, batch_axis)
        return p.kind == "R" or graph.tensor(tensor).shape[p.axis] % size == 0


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective of a block on the solved axis, per micro-batch."""

    where: str
    kind: str
    nbytes: float
    phase: str  # forward | backward
    time_s: float


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as one rank of the axis holds it; ``expert``: ep divides it too."""

    name: str
    placement: Placement
    numel: float
    expert: bool = False
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class BlockSolution:
    """A block's choice and its price per micro-batch on one rank (seconds, bytes)."""

    strategies: tuple[Strategy, ...]
    state: str
    forward_s: float
    backward_s: float
    comm_forward_s: float
    comm_backward_s: float
    forward_kernels: int
    backward_kernels: int
    core_forward_s: float
    core_flops: float
    comms: tuple[Comm, ...]
    forward_flops: float
    backward_flops: float
    saved_bytes: float
    selective_bytes: float
    input_bytes: float
    output_bytes: float
    transient_bytes: float
    logits_bytes: float
    parameters: tuple[LocalParameter, ...]
    expert_tokens_bytes: float  # a rank's rows entering the experts, per forward
    attention_kv_bytes: float  # keys and values of one rank, all attentions
    sync_bytes: float  # gradients summed over the axis once per step
    status: str
    seconds: float  # objective of the block problem


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts of a collapsed graph that every block problem needs, computed once."""

    graph: OpGraph
    leaving: frozenset[str]
    producer: dict[str, int]
    consumers: dict[str, list[int]]
    core: frozenset[int]
    vocabularies: frozenset[int]

    @classmethod
    def of(cls, graph: OpGraph, leaving: frozenset[str]) -> GraphFacts:
        producer: dict[str, int] = {}
        consumers: dict[str, list[int]] = {}
        for i, op in enumerate(graph.ops):
            producer.update(dict.fromkeys(op.outputs, i))
            for name in dict.fromkeys(op.inputs):
                consumers.setdefault(name, []).append(i)
        core = attention_core(graph, producer, consumers)
        return cls(graph, leaving, producer, consumers, core, vocabulary_sizes(graph))

    def batch_axis(self, name: str) -> int:
        """The axis of an activation that carries samples; -1 if none does."""
        rates = self.graph.tensor(name).per_sample
        return next((i for i, rate in enumerate(rates) if rate), -1)


def attention_core(
    graph: OpGraph, producer: dict[str, int], consumers: dict[str, list[int]]
) -> frozenset[int]:
    """Ops between the two batched products of an unfused attention."""

    def batched(op: Op) -> bool:
        return op.kind is OpKind.GEMM and not any(
            graph.tensor(t).kind is TensorKind.PARAMETER for t in op.inputs
        )

    light = {
        OpKind.SOFTMAX,
        OpKind.POINTWISE,
        OpKind.RANDOM,
        OpKind.VIEW,
        OpKind.COPY,
    }
    core: set[int] = set()
    for i, op in enumerate(graph.ops):
        if op.kind is not OpKind.SOFTMAX:
            continue
        before = producer.get(op.inputs[0])
        chain = [i]
        while before is not None and graph.ops[before].kind in light:
            chain.append(before)
            before = producer.get(graph.ops[before].inputs[0])
        after: int | None = i
        while after is not None and graph.ops[after].kind in light:
            chain.append(after)
            users = consumers.get(graph.ops[after].outputs[0], [])
            after = users[0] if users else None
        if (
            before is not None
            and after is not None
            and batched(graph.ops[before])
            and batched(graph.ops[after])
        ):
            core.update(chain)
    return frozenset(core)


def vocabulary_sizes(graph: OpGraph) -> frozenset[int]:
    """Sizes of dims that padding may extend: embedding rows and loss classes."""
    sizes: set[int] = set()
    for op in graph.ops:
        if op.kind is OpKind.EMBEDDING:
            for name in op.inputs:
                tensor = graph.tensor(name)
                if tensor.kind is TensorKind.PARAMETER and len(tensor.shape) == 2:
                    sizes.add(tensor.shape[0])
        if op.kind is OpKind.LOSS and graph.tensor(op.inputs[0]).shape:
            sizes.add(graph.tensor(op.inputs[0]).shape[-1])
    return frozenset(s for s in sizes if s >= 1000)


Price = Callable[[str, float], float]


Shared: TypeAlias = tuple[Placement, Placement]  # placement, state of the gradient


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the problem: an op (``index`` >= 0) or a shared activation."""

    index: int
    tensor: str
    shared: tuple[Shared, ...] = ()


class BlockProblem:
    """Builds and solves the problem of one block for one axis size and state."""

    def __init__(
        self,
        facts: GraphFacts,
        block: Block,
        pricer: Pricer,
        comm: Price,
        size: int,
        state: BoundaryState,
        *,
        seconds_per_byte: float = 1e-15,
        sequence_parallel: bool = True,
        fixed: dict[str, Placement] | None = None,
        ep: int = 1,
        split_weights: bool = False,
    ) -> None:
        self.ep, self.split_weights = ep, split_weights
        self.facts, self.graph, self.block = facts, facts.graph, block
        self.pricer, self.comm, self.size, self.state = pricer, comm, size, state
        self.rate, self.sequence_parallel = seconds_per_byte, sequence_parallel
        self.fixed = fixed or {}
        self.indices = range(block.start, block.stop)
        self.strategies = {i: self._strategies(i) for i in self.indices}
        self.shared = self.shared_activations()
        self.nodes: list[_Node] = []
        self.edges: dict[tuple[int, int], Matrix] = {}
        self.costs: list[Matrix] = []

    def _strategies(self, index: int) -> tuple[Strategy, ...]:
        op = self.graph.ops[index]
        result = op_strategies(op, self.size, self.facts.vocabularies)
        keep: list[Strategy] = []
        for strategy in result:
            if not self.sequence_parallel and self._sequence_shard(op, strategy):
                continue
            if any(
                operand.tensor in self.fixed and placement != self.fixed[operand.tensor]
                for operand, placement in zip(
                    op.space.inputs, strategy.inputs, strict=True
                )
            ):
                continue
            keep.append(strategy)
        if self.split_weights:
            keep = [s for s in keep if self._divides_weight(op, s)] or keep
        return tuple(keep)

    def _divides_weight(self, op: Op, strategy: Strategy) -> bool:
        """Whether a product's weight is divided, or too narrow to be (a router)."""
        return op.kind is not OpKind.GEMM or all(
            placement.kind == "S"
            for operand, placement in zip(op.space.inputs, strategy.inputs, strict=True)
            if self._is_wide_weight(operand.tensor)
        )

    def _is_wide_weight(self, name: str) -> bool:
        tensor = self.graph.tensor(name)
        wide = len(tensor.shape) == 2 and min(tensor.shape) >= NARROW_WEIGHT
        return wide and tensor.kind is TensorKind.PARAMETER

    def _sequence_shard(self, op: Op, strategy: Strategy) -> bool:
        """Whether the strategy divides tokens outside a matrix op's own dims."""
        if op.kind in (OpKind.ATTENTION, OpKind.CONV) or strategy.dim in ("", "+"):
            return False
        for operand, placement in zip(op.space.outputs, strategy.outputs, strict=True):
            if placement.kind != "S":
                continue
            shape = self.graph.tensor(operand.tensor).shape
            batch = self.facts.batch_axis(operand.tensor)
            if len(shape) == 3 and batch in (0, 1) and placement.axis == 1 - batch:
                return True
        return False

    # ---- nodes -----------------------------------------------------------------

    def _op_cost(self, index: int, strategy: Strategy) -> float:
        price = self.pricer.price(index, strategy.dim, self.size, self.ep)
        op = self.graph.ops[index]
        total = price.forward_s + price.backward_s
        total += self._sync_s(op, strategy)
        if op.kind is OpKind.LOSS and strategy.dim not in ("", "+"):
            total += self._loss_exchange(op, strategy)
        kept = sum(
            self.graph.tensor(s.tensor).nbytes * share(s, strategy, op, self.size)
            for s in op.saved
        )
        weights = sum(
            self.graph.tensor(o.tensor).nbytes * share(o, strategy, op, self.size)
            for o in op.space.inputs
            if self.graph.tensor(o.tensor).kind is TensorKind.PARAMETER
        )
        return total + self.rate * (kept + 8 * weights)

    def _sync_bytes(self, op: Op, strategy: Strategy) -> float:
        if not self.pricer.training:
            return 0.0
        return sum(
            self.graph.tensor(operand.tensor).nbytes
            for operand, gradient in zip(
                op.space.inputs, strategy.gradients, strict=True
            )
            if self.graph.tensor(operand.tensor).trainable
            and gradient.kind == "P"
            and strategy.dim != "+"
            and not self._is_bias(op, operand, strategy)
        )

    @staticmethod
    def _is_bias(op: Op, operand: Operand, strategy: Strategy) -> bool:
        """A bias added after the sum of a divided reduction has a whole gradient."""
        return (
            op.kind in (OpKind.GEMM, OpKind.CONV)
            and len(operand.axes) == 1
            and all(p.kind == "P" for p in strategy.outputs)
        )

    def _sync_s(self, op: Op, strategy: Strategy) -> float:
        nbytes = self._sync_bytes(op, strategy)
        return self.comm("all_reduce", nbytes) if nbytes else 0.0

    def _loss_messages(self, op: Op, strategy: Strategy) -> tuple[float, ...]:
        """Bytes of the all-reduces of a divided loss: per row the maximum, the sum and
        the target's logit where the classes are divided; else the sum and, for a mean
        over rows that count, their number."""
        if strategy.inputs[0].kind != "S":
            return ()
        classes = "cross_entropy" in op.target or "nll_loss" in op.target
        if not classes:
            return (4.0,)
        if strategy.dim != "c":
            return (4.0, 4.0)
        shape = self.graph.tensor(op.inputs[0]).shape
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        return (4.0 * rows,) * 3

    def _loss_exchange(self, op: Op, strategy: Strategy) -> float:
        """Seconds of what a divided loss exchanges."""
        messages = self._loss_messages(op, strategy)
        return sum(self.comm("all_reduce", nbytes) for nbytes in messages)

    def shared_activations(self) -> dict[str, list[int]]:
        """Activations of the block that several of its ops (or ops and out) read."""
        result: dict[str, list[int]] = {}
        for i in self.indices:
            for name in dict.fromkeys(self.graph.ops[i].inputs):
                tensor = self.graph.tensor(name)
                if tensor.kind is TensorKind.ACTIVATION:
                    result.setdefault(name, []).append(i)
        return {
            name: users
            for name, users in result.items()
            if len(users) + int(self._leaves(name)) > 1
        }

    def _made_here(self, name: str) -> bool:
        source = self.facts.producer.get(name)
        return source is not None and self.block.start <= source < self.block.stop

    def _leaves(self, name: str) -> bool:
        return name in self.facts.leaving and self._made_here(name)

    def _enters(self, name: str) -> bool:
        return not self._made_here(name)

    def _state_of(self, name: str) -> Placement:
        return self.state.placement(self.graph, name, self.facts.batch_axis(name))

    # ---- edges -----------------------------------------------------------------

    def _move(self, name: str, src: Placement, dst: Placement, backward: bool) -> float:
        nbytes = self.graph.tensor(name).nbytes
        convert = gradient_reshard if backward else reshard
        found = convert(src, dst, nbytes, self.size)
        if found is None:
            return INFINITE
        return self.comm(found.kind, found.nbytes) if found.kind else 0.0

    def _needs_grad(self, name: str) -> bool:
        return self.pricer.training and self.graph.tensor(name).requires_grad

    def _use_cost(
        self,
        name: str,
        have: Placement,
        want_grad: Placement,
        want: Placement,
        give_grad: Placement,
    ) -> float:
        cost = self._move(name, have, want, backward=False)
        if self._needs_grad(name):
            cost += self._move(name, give_grad, want_grad, backward=True)
        return cost

    @staticmethod
    def _grad_need(placement: Placement) -> Placement:
        return placement if placement.kind == "S" else REPLICATED

    def _position(self, op: Op, name: str) -> int:
        return op.inputs.index(name)

    # ---- build -----------------------------------------------------------------

    def build(self) -> intra_op.Problem:
        """The problem as plain arrays."""
        node_of_op: dict[int, int] = {}
        for i in self.indices:
            choices = self.strategies[i]
            node_of_op[i] = len(self.nodes)
            self.nodes.append(_Node(i, ""))
            self.costs.append(np.array([self._op_cost(i, s) for s in choices]))
        shared = self.shared
        for name, users in shared.items():
            self._add_shared(name, users, node_of_op)
        for i in self.indices:
            op = self.graph.ops[i]
            for name in dict.fromkeys(op.inputs):
                if name not in shared:
                    self._add_single(name, i, node_of_op)
            for name in op.outputs:
                if self._leaves(name) and name not in shared:
                    self._add_exit(name, i, node_of_op)
        self._tie_parameters(node_of_op)
        return intra_op.Problem.make(
            self.costs, edges=[(i, j, m) for (i, j), m in self.edges.items()]
        )

    def _edge(self, a: int, b: int, matrix: Matrix) -> None:
        if a > b:
            a, b, matrix = b, a, np.transpose(matrix)
        found = self.edges.get((a, b))
        self.edges[(a, b)] = matrix if found is None else found + matrix

    def _output(self, index: int, name: str, strategy: Strategy) -> Placement:
        return strategy.outputs[self.graph.ops[index].outputs.index(name)]

    def _add_single(self, name: str, user: int, node_of_op: dict[int, int]) -> None:
        tensor = self.graph.tensor(name)
        if tensor.kind is not TensorKind.ACTIVATION:
            return
        op = self.graph.ops[user]
        where = self._position(op, name)
        choices = self.strategies[user]
        if self._enters(name):
            have = self._state_of(name)
            self.costs[node_of_op[user]] += np.array(
                [
                    self._use_cost(
                        name,
                        have,
                        self._grad_need(have),
                        s.inputs[where],
                        s.gradients[where],
                    )
                    for s in choices
                ]
            )
            return
        source = self.facts.producer[name]
        matrix = np.array(
            [
                [
                    self._use_cost(
                        name,
                        have,
                        self._grad_need(have),
                        s.inputs[where],
                        s.gradients[where],
                    )
                    for s in choices
                ]
                for have in (
                    self._output(source, name, p) for p in self.strategies[source]
                )
            ]
        )
        self._edge(node_of_op[source], node_of_op[user], matrix)

    def _add_exit(self, name: str, source: int, node_of_op: dict[int, int]) -> None:
        want = self._state_of(name)
        self.costs[node_of_op[source]] += np.array(
            [
                self._use_cost(
                    name, have, self._grad_need(have), want, self._grad_need(want)
                )
                for have in (
                    self._output(source, name, s) for s in self.strategies[source]
                )
            ]
        )

    def shared_choices(self, name: str) -> tuple[Shared, ...]:
        """Placement and gradient state that a shared activation may have."""
        users = self.shared[name]
        placements = {REPLICATED, self._state_of(name)}
        if self._made_here(name):
            source = self.facts.producer[name]
            placements.update(
                self._output(source, name, s) for s in self.strategies[source]
            )
        for user in users:
            where = self._position(self.graph.ops[user], name)
            placements.update(s.inputs[where] for s in self.strategies[user])
        placements.discard(PARTIAL)
        choices: list[Shared] = []
        for p in sorted(placements, key=str):
            choices.append((p, self._grad_need(p)))
            if p.kind == "R" and self._needs_grad(name):
                choices.append((p, PARTIAL))
        return tuple(choices)

    def _add_shared(
        self, name: str, users: list[int], node_of_op: dict[int, int]
    ) -> None:
        choices = self.shared_choices(name)
        number = len(self.nodes)
        self.nodes.append(_Node(-1, name, choices))
        self.costs.append(np.zeros(len(choices)))
        grads = self._needs_grad(name)

        def arrive(have: Placement, choice: Shared) -> float:
            cost = self._move(name, have, choice[0], backward=False)
            if grads:
                cost += self._move(
                    name, choice[1], self._grad_need(have), backward=True
                )
            return cost

        if self._enters(name):
            have = self._state_of(name)
            self.costs[number] += np.array([arrive(have, c) for c in choices])
        else:
            source = self.facts.producer[name]
            matrix = np.array(
                [
                    [arrive(self._output(source, name, s), c) for c in choices]
                    for s in self.strategies[source]
                ]
            )
            self._edge(node_of_op[source], number, matrix)
        if self._leaves(name):
            want = self._state_of(name)
            self.costs[number] += np.array(
                [
                    self._use_cost(name, c[0], c[1], want, self._grad_need(want))
                    for c in choices
                ]
            )
        for user in users:
            where = self._position(self.graph.ops[user], name)
            matrix = np.array(
                [
                    [
                        self._use_cost(
                            name, c[0], c[1], s.inputs[where], s.gradients[where]
                        )
                        for s in self.strategies[user]
                    ]
                    for c in choices
                ]
            )
            self._edge(number, node_of_op[user], matrix)

    def _tie_parameters(self, node_of_op: dict[int, int]) -> None:
        """A parameter that two ops of the block read has one placement."""
        readers: dict[str, list[int]] = {}
        for i in self.indices:
            for name in dict.fromkeys(self.graph.ops[i].inputs):
                if self.graph.tensor(name).kind is TensorKind.PARAMETER:
                    readers.setdefault(name, []).append(i)
        for name, users in readers.items():
            first = users[0]
            for other in users[1:]:
                a = self._position(self.graph.ops[first], name)
                b = self._position(self.graph.ops[other], name)
                matrix = np.array(
                    [
                        [
                            0.0 if p.inputs[a] == q.inputs[b] else INFINITE
                            for q in self.strategies[other]
                        ]
                        for p in self.strategies[first]
                    ]
                )
                self._edge(node_of_op[first], node_of_op[other], matrix)

    def floor(self) -> float:
        """Seconds below which no choice can be: every op at its fastest, no traffic."""
        return sum(
            min(
                (p := self.pricer.price(i, s.dim, self.size, self.ep)).forward_s
                + p.backward_s
                for s in choices
            )
            for i, choices in self.strategies.items()
        )

    # ---- solve -----------------------------------------------------------------

    def solve(self) -> BlockSolution | None:
        """The optimal choice with its price; None if no choice is legal."""
        if any(not s for s in self.strategies.values()):
            return None
        if self.size == 1:  # nothing to divide, nothing to choose
            only = {i: choices[0] for i, choices in self.strategies.items()}
            whole = dict.fromkeys(self.shared, (REPLICATED, REPLICATED))
            seconds = sum(self._op_cost(i, s) for i, s in only.items())
            return self.measure(only, whole, "optimal", seconds)
        problem = self.build()
        solution = intra_op.solve(problem, deterministic=True)
        if solution.choice is None:
            return None
        chosen: dict[int, Strategy] = {}
        shared: dict[str, Shared] = {}
        for node, c in zip(self.nodes, solution.choice.tolist(), strict=True):
            if node.index >= 0:
                chosen[node.index] = self.strategies[node.index][c]
            else:
                shared[node.tensor] = node.shared[c]
        return self.measure(chosen, shared, solution.status, solution.cost)

    def measure(
        self,
        chosen: dict[int, Strategy],
        shared: dict[str, Shared],
        status: str,
        objective: float,
    ) -> BlockSolution:
        """Price a given choice, term by term."""
        graph, size = self.graph, self.size
        forward = backward = core = core_flops = fflops = bflops = 0.0
        fkernels = bkernels = 0
        saved = selective = transient = logits = 0.0
        sync = 0.0
        weights: dict[str, LocalParameter] = {}
        rows = keys = 0.0
        has_loss = any(graph.ops[i].kind is OpKind.LOSS for i in self.indices)
        for i in self.indices:
            op, strategy = graph.ops[i], chosen[i]
            price = self.pricer.price(i, strategy.dim, size, self.ep)
            forward += price.forward_s
            backward += price.backward_s
            fkernels += price.forward_kernels
            bkernels += price.backward_kernels
            fflops += price.forward_flops
            bflops += price.backward_flops
            if i in self.facts.core or op.kind is OpKind.ATTENTION:
                core += price.forward_s
                core_flops += price.forward_flops
            for kept in op.saved:
                nbytes = graph.tensor(kept.tensor).nbytes * share(
                    kept, strategy, op, size
                )
                saved += nbytes
                if i not in self.facts.core:
                    selective += nbytes
                if has_loss and self._vocabulary_sized(kept.tensor):
                    logits += nbytes
            for operand in op.space.outputs:
                local = graph.tensor(operand.tensor).nbytes * share(
                    operand, strategy, op, size
                )
                transient = max(transient, local)
                if has_loss and self._vocabulary_sized(operand.tensor):
                    logits = max(logits, local)
            for operand, placement in zip(
                op.space.inputs, strategy.inputs, strict=True
            ):
                tensor = graph.tensor(operand.tensor)
                if tensor.kind is TensorKind.PARAMETER:
                    expert = expert_dims(graph, op) is not None
                    local = tensor.numel * share(operand, strategy, op, size)
                    weights[operand.tensor] = LocalParameter(
                        operand.tensor,
                        placement,
                        local / (self.ep if expert else 1),
                        expert,
                        tensor.trainable,
                    )
            sync += self._sync_bytes(op, strategy)
            first = op.space.inputs[0] if op.space.inputs else None
            if first is not None and expert_dims(graph, op) is not None:
                entering = graph.tensor(first.tensor).nbytes
                rows = max(rows, entering * share(first, strategy, op, size))
            if op.kind is OpKind.ATTENTION:
                keys += sum(
                    graph.tensor(o.tensor).nbytes * share(o, strategy, op, size)
                    for o in op.space.inputs[1:3]
                )
        comms = self.collectives(chosen, shared)
        return BlockSolution(
            strategies=tuple(chosen[i] for i in self.indices),
            state=self.state.name,
            forward_s=forward,
            backward_s=backward,
            comm_forward_s=sum(c.time_s for c in comms if c.phase == "forward"),
            comm_backward_s=sum(c.time_s for c in comms if c.phase == "backward"),
            forward_kernels=fkernels,
            backward_kernels=bkernels,
            core_forward_s=core,
            core_flops=core_flops,
            comms=comms,
            forward_flops=fflops,
            backward_flops=bflops,
            saved_bytes=saved,
            selective_bytes=selective,
            input_bytes=self._boundary_bytes(entering=True),
            output_bytes=self._boundary_bytes(entering=False),
            transient_bytes=transient,
            logits_bytes=logits,
            parameters=tuple(weights[n] for n in sorted(weights)),
            expert_tokens_bytes=rows,
            attention_kv_bytes=keys,
            sync_bytes=sync,
            status=status,
            seconds=objective,
        )

    def _vocabulary_sized(self, name: str) -> bool:
        shape = self.graph.tensor(name).shape
        return bool(shape) and shape[-1] in self.facts.vocabularies

    def _boundary_bytes(self, *, entering: bool) -> float:
        names: dict[str, None] = {}
        for i in self.indices:
            op = self.graph.ops[i]
            for name in op.inputs if entering else op.outputs:
                tensor = self.graph.tensor(name)
                crosses = self._enters(name) if entering else self._leaves(name)
                if tensor.kind is TensorKind.ACTIVATION and crosses:
                    names[name] = None
        total = 0.0
        for name in names:
            p = self._state_of(name)
            total += self.graph.tensor(name).nbytes / (
                self.size if p.kind == "S" else 1
            )
        return total

    def is_legal(self, chosen: dict[int, Strategy], shared: dict[str, Shared]) -> bool:
        """Whether every move that a choice needs exists and shared tensors agree."""
        try:
            self.collectives(chosen, shared)
        except AssertionError:
            return False
        return True

    def _record(
        self,
        out: list[Comm],
        name: str,
        src: Placement,
        dst: Placement,
        backward: bool,
        where: str,
    ) -> None:
        convert = gradient_reshard if backward else reshard
        found = convert(src, dst, self.graph.tensor(name).nbytes, self.size)
        assert found is not None, f"illegal move of {name}: {src} -> {dst}"
        if found.kind:
            out.append(
                Comm(
                    where,
                    found.kind,
                    found.nbytes,
                    "backward" if backward else "forward",
                    self.comm(found.kind, found.nbytes),
                )
            )

    def collectives(
        self,
        chosen: dict[int, Strategy],
        shared: dict[str, Shared],
    ) -> tuple[Comm, ...]:
        """Every collective that a choice issues, in graph order."""
        out: list[Comm] = []
        for name, (have, have_grad) in shared.items():
            before = self._arrival(name, chosen)
            self._record(out, name, before, have, False, name)
            if self._needs_grad(name):
                self._record(out, name, have_grad, self._grad_need(before), True, name)
            if self._leaves(name):
                want = self._state_of(name)
                self._record(out, name, have, want, False, name)
                if self._needs_grad(name):
                    self._record(
                        out, name, self._grad_need(want), have_grad, True, name
                    )
        for i in self.indices:
            op, strategy = self.graph.ops[i], chosen[i]
            for name in dict.fromkeys(op.inputs):
                if self.graph.tensor(name).kind is not TensorKind.ACTIVATION:
                    continue
                where = self._position(op, name)
                have, grad = (
                    shared[name]
                    if name in shared
                    else (
                        self._arrival(name, chosen),
                        self._grad_need(self._arrival(name, chosen)),
                    )
                )
                self._record(out, name, have, strategy.inputs[where], False, op.name)
                if self._needs_grad(name):
                    self._record(
                        out, name, strategy.gradients[where], grad, True, op.name
                    )
            for name in op.outputs:
                if self._leaves(name) and name not in shared:
                    have, want = self._output(i, name, strategy), self._state_of(name)
                    self._record(out, name, have, want, False, op.name)
                    if self._needs_grad(name):
                        self._record(
                            out,
                            name,
                            self._grad_need(want),
                            self._grad_need(have),
                            True,
                            op.name,
                        )
            if op.kind is OpKind.LOSS and strategy.dim not in ("", "+"):
                for nbytes in self._loss_messages(op, strategy):
                    seconds = self.comm("all_reduce", nbytes)
                    out.append(Comm(op.name, "all_reduce", nbytes, "forward", seconds))
        return tuple(out)

    def _arrival(self, name: str, chosen: dict[int, Strategy]) -> Placement:
        if self._enters(name):
            return self._state_of(name)
        source = self.facts.producer[name]
        return self._output(source, name, chosen[source])
