"""Peak bytes while a block runs again and then backward.

A recomputed block keeps only its input. Its backward first repeats the forward, which
fills everything the block keeps, then walks the ops in reverse with gradients in
flight. The peak is taken over that walk, from live ranges:

    forward, op i    kept by ops 0..i + outputs that a later op of the block reads
    backward, op i   kept by ops 0..i + gradients of activations that are alive

A view shares the memory of what it views, in both directions. Gradients of parameters
are not counted (they have their own line), nor is the block's input, which is the
checkpoint. Sizes are for one micro-batch on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir import Block, Op, OpGraph, OpKind, TensorKind


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Peaks in bytes of the repeated forward and of the backward after it."""

    forward_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


def block_working_set(graph: OpGraph, block: Block) -> int:
    """Peak bytes of ``block``'s repeated forward and backward on one device."""
    return working_set(graph, block).peak_bytes


def working_set(graph: OpGraph, block: Block) -> WorkingSet:
    """Both peaks of ``block``; see the module's text."""
    ops = graph.ops[block.start : block.stop]
    roots = _roots(ops)
    kept = [[roots.get(s.tensor, s.tensor) for s in op.saved] for op in ops]
    made = {roots[n] for op in ops for n in op.outputs}
    for op in ops:
        made.update(
            s.tensor
            for s in op.saved
            if graph.tensor(s.tensor).kind is TensorKind.SAVED
        )
    return WorkingSet(
        _forward_peak(graph, block, ops, roots, kept, made),
        _backward_peak(graph, block, ops, roots, kept, made),
    )


def _roots(ops: tuple[Op, ...]) -> dict[str, str]:
    """The tensor whose memory each tensor lives in."""
    roots: dict[str, str] = {}
    for op in ops:
        for name in op.inputs:
            roots.setdefault(name, name)
        for name in op.outputs:
            view = op.kind is OpKind.VIEW and bool(op.inputs)
            roots[name] = roots[op.inputs[0]] if view else name
    return roots


def _size(graph: OpGraph, names: set[str]) -> int:
    return sum(graph.tensor(n).nbytes for n in names)


def _forward_peak(
    graph: OpGraph,
    block: Block,
    ops: tuple[Op, ...],
    roots: dict[str, str],
    kept: list[list[str]],
    made: set[str],
) -> int:
    last = {roots[n]: i for i, op in enumerate(ops) for n in (*op.inputs, *op.outputs)}
    for name in _leaving(graph, block, roots):
        last[name] = len(ops)
    held: set[str] = set()
    alive: set[str] = set()
    peak = 0
    for i, op in enumerate(ops):
        alive.update(roots[n] for n in op.outputs)
        held.update(n for n in kept[i] if n in made)
        peak = max(peak, _size(graph, (alive & made) | held))
        alive = {n for n in alive if last[n] > i}
    return peak


def _leaving(graph: OpGraph, block: Block, roots: dict[str, str]) -> set[str]:
    """What ops outside the block, or the graph's caller, read from it."""
    inside = {n for op in graph.ops[block.start : block.stop] for n in op.outputs}
    read = {n for op in graph.ops[block.stop :] for n in op.inputs}
    return {roots[n] for n in inside & (read | set(graph.outputs))}


def _backward_peak(
    graph: OpGraph,
    block: Block,
    ops: tuple[Op, ...],
    roots: dict[str, str],
    kept: list[list[str]],
    made: set[str],
) -> int:
    def flows(name: str) -> bool:
        tensor = graph.tensor(name)
        return tensor.kind is TensorKind.ACTIVATION and tensor.requires_grad

    # a kept tensor goes when the first op (last in backward) that keeps it has run
    held = {n for names in kept for n in names if n in made}
    gradients = {n for n in _leaving(graph, block, roots) if flows(n)}
    peak = _size(graph, held) + _size(graph, gradients)
    for i in reversed(range(len(ops))):
        op = ops[i]
        incoming = {roots[n] for n in op.outputs if flows(n)}
        outgoing = {roots[n] for n in op.inputs if flows(n)}
        if incoming or gradients.intersection(incoming):
            fresh = outgoing - incoming
            # a second contribution is computed before it is added to the first
            added = _size(graph, fresh & gradients)
            gradients |= fresh
            live = _size(graph, held) + _size(graph, gradients | incoming)
            peak = max(peak, live + added)
        producers = {n for n in op.outputs if roots[n] == n}
        gradients -= producers
        held -= {n for n in kept[i] if n in made}
    return peak
