"""One block of each run stands for all of them: what the search sizes with.

A chain of 96 equal layers costs what 2 cost: the collapsed graph has the first block
of every run of equal consecutive blocks, and knows which activations leave each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.ir import Block, Op, OpGraph, TensorKind


@dataclass(frozen=True, slots=True)
class Collapsed:
    """``graph``: representatives only. ``counts[i]``: blocks of run i, whose
    representative is ``graph.blocks[i]``. ``leaving``: activations that other blocks
    read. ``buffer_bytes``: of the whole model. ``tied``: parameters of several blocks.
    """

    graph: OpGraph
    counts: tuple[int, ...]
    leaving: frozenset[str]
    buffer_bytes: int
    tied: tuple[str, ...]
    first_block: tuple[int, ...]  # index in the whole model, per run


def runs_of(graph: OpGraph) -> list[tuple[Block, int]]:
    """Runs of consecutive blocks of one kind: (first block, how many)."""
    chain: list[tuple[Block, int]] = []
    for block in graph.blocks:
        if chain and chain[-1][0].kind == block.kind:
            chain[-1] = (chain[-1][0], chain[-1][1] + 1)
        else:
            chain.append((block, 1))
    return chain


def collapse(graph: OpGraph) -> Collapsed:
    """Keep one block of each run. Needs blocks."""
    assert graph.blocks, "collapse needs a graph cut into blocks"
    owner: dict[str, int] = {}
    for block in graph.blocks:
        for op in graph.ops[block.start : block.stop]:
            owner.update(dict.fromkeys(op.outputs, block.index))
    leaving: set[str] = set()
    readers: dict[str, set[int]] = {}
    for block in graph.blocks:
        for op in graph.ops[block.start : block.stop]:
            for name in op.inputs:
                if owner.get(name, block.index) != block.index:
                    leaving.add(name)
                if graph.tensor(name).kind is TensorKind.PARAMETER:
                    readers.setdefault(name, set()).add(block.index)
    chain = runs_of(graph)
    ops: list[Op] = []
    blocks: list[Block] = []
    names: dict[str, None] = dict.fromkeys(graph.inputs)
    for number, (block, _) in enumerate(chain):
        start = len(ops)
        ops.extend(graph.ops[block.start : block.stop])
        blocks.append(replace(block, index=number, start=start, stop=len(ops)))
    for op in ops:
        names.update(dict.fromkeys(op.inputs + op.outputs))
        names.update(dict.fromkeys(s.tensor for s in op.saved))
    tensors = tuple(graph.tensor(n) for n in names)
    visible = set(graph.outputs) | leaving
    core = replace(
        graph,
        ops=tuple(ops),
        tensors=tensors,
        blocks=tuple(blocks),
        outputs=tuple(n for n in names if n in visible),
    )
    return Collapsed(
        core,
        tuple(n for _, n in chain),
        frozenset(leaving),
        sum(t.nbytes for t in graph.tensors if t.kind is TensorKind.BUFFER),
        tuple(sorted(n for n, used in readers.items() if len(used) > 1)),
        tuple(b.index for b, _ in chain),
    )
