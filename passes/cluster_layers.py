"""Partition ops into blocks by module path and find the repeated ones.

Ensures: blocks are contiguous in op order and cover the graph; two blocks have one
``kind`` exactly where their ops, shapes, dtypes, attributes and wiring agree (names
do not matter). Elements of a numbered container ("layers.0", "layer1.0", "stages.1
.blocks.2") are blocks; what comes before is "embed", what comes after "head"; small
glue joins a neighbour.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from passes.ir import Block, Op, Operand, OpGraph, OpKind

# containers of layers inside a numbered stage, as vision backbones name them
_INNER = frozenset({"blocks", "layers", "units"})
_MATRIX = (
    OpKind.GEMM,
    OpKind.GROUPED_GEMM,
    OpKind.CONV,
    OpKind.ATTENTION,
    OpKind.SCAN,
    OpKind.EMBEDDING,
    OpKind.UNKNOWN,
)


def _numbered(part: str) -> bool:
    return part.partition("@")[0][-1:].isdigit()


def _numeric(part: str) -> bool:
    return part.partition("@")[0].isdigit()


def container_prefixes(paths: Sequence[str]) -> frozenset[str]:
    """Paths of numbered modules that are layers.

    A number alone is an element of a list; a name that ends in digits ("layer1") is
    one where two or more such siblings have modules inside ("conv1" has none).
    """
    inside: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        parts = path.split(".") if path else []
        for k, part in enumerate(parts[:-1]):
            if _numbered(part) and not _numeric(part):
                stem = part.partition("@")[0].rstrip("0123456789")
                inside.setdefault((".".join(parts[:k]), stem), set()).add(part)
    named = {
        f"{parent}.{part}" if parent else part
        for (parent, _), members in inside.items()
        if len(members) > 1
        for part in members
    }
    result: set[str] = set()
    for path in paths:
        parts = path.split(".") if path else []
        for k, part in enumerate(parts):
            prefix = ".".join(parts[: k + 1])
            if _numeric(part) or prefix in named:
                result.add(prefix)
    return frozenset(result)


def layer_of(path: str, layers: frozenset[str]) -> str:
    """The layer that a module path lies in, "" outside all."""
    parts = path.split(".") if path else []
    found, start = "", -1
    for k in range(len(parts)):
        prefix = ".".join(parts[: k + 1])
        if prefix in layers:
            chained = start < 0 or k == start + 1
            nested = k == start + 2 and parts[k - 1] in _INNER
            if not (chained or nested):
                break
            found, start = prefix, k
    return found


@dataclass(slots=True)
class _Run:
    key: str
    start: int
    stop: int


def _runs(ops: Sequence[Op], keys: Sequence[str]) -> list[_Run]:
    runs: list[_Run] = []
    for i, key in enumerate(keys):
        if runs and runs[-1].key == key:
            runs[-1].stop = i + 1
        else:
            runs.append(_Run(key, i, i + 1))
    return runs


def _repeats(ops: Sequence[Op], keys: Sequence[str]) -> list[str]:
    """Number the passes through a layer that is called again and again.

    A pass begins where the layer's first op with a parameter recurs in its run.
    """
    result = list(keys)
    for key in dict.fromkeys(keys):
        inside = [i for i, k in enumerate(keys) if k == key]
        marks = [
            (ops[i].target, ops[i].module, tuple(n for n in ops[i].inputs if "." in n))
            for i in inside
        ]
        first = next((k for k, m in enumerate(marks) if m[1] and m[2]), None)
        if not key or first is None:
            continue
        starts = [k - first for k, m in enumerate(marks) if m == marks[first]]
        period = starts[1] if len(starts) > 1 else 0
        regular = all(b - a == period for a, b in pairwise(starts))
        alike = regular and all(
            [m[:2] for m in marks[k : k + period]] == [m[:2] for m in marks[:period]]
            for k in starts[:-1]
        )
        for number, k in enumerate(starts[1:] if alike else (), start=2):
            stop = starts[number] if number < len(starts) else len(marks)
            for i in inside[k:stop]:
                result[i] = f"{key}#{number}"
    return result


def _heavy(ops: Sequence[Op]) -> bool:
    return any(op.kind in _MATRIX for op in ops)


def _merge(ops: Sequence[Op], runs: list[_Run]) -> list[_Run]:
    """Join glue between layers, and layers without matrix work, to what is before."""
    result: list[_Run] = []
    for k, run in enumerate(runs):
        body = ops[run.start : run.stop]
        last = k == len(runs) - 1
        light = not _heavy(body)
        edge = last and not run.key
        after = result[-1] if result else None
        same = after is not None and run.key != "" and after.key == run.key
        joins = light and not edge and not (after and after.key == "" and run.key)
        if after is not None and (same or joins):
            after.stop = run.stop
        else:
            result.append(replace(run))
    return result


def _name(run: _Run, ops: Sequence[Op], first: bool, last: bool, alone: bool) -> str:
    if run.key:
        return run.key
    if alone:
        return "model"
    if first:
        return "embed"
    if last:
        return "head"
    owner = next((op.module for op in ops[run.start : run.stop] if op.module), "")
    return owner or "glue"


def partition(ops: Sequence[Op]) -> list[tuple[str, int, int]]:
    """(name, start, stop) of every block, names unique."""
    paths = [op.module for op in ops]
    layers = container_prefixes(paths)
    keys = _repeats(ops, [layer_of(p, layers) for p in paths])
    if len(set(keys) - {""}) < 2:
        keys = _top_level(paths)
    runs = _merge(ops, _runs(ops, keys))
    result: list[tuple[str, int, int]] = []
    used: dict[str, int] = {}
    for k, run in enumerate(runs):
        name = _name(run, ops, k == 0, k == len(runs) - 1, len(runs) == 1)
        used[name] = used.get(name, 0) + 1
        if used[name] > 1:
            name = f"{name}#{used[name]}"
        result.append((name, run.start, run.stop))
    return result


def _top_level(paths: Sequence[str]) -> list[str]:
    """Children with modules inside, of the root or of the only such child.

    A leaf (one linear, one norm) is no block of its own: products that belong together
    must be solved together.
    """
    for depth in range(1, 4):
        prefixes = [".".join(p.split(".")[:depth]) if p else "" for p in paths]
        nested = {x for x, p in zip(prefixes, paths, strict=True) if p != x}
        keys = [x if x in nested else "" for x in prefixes]
        if len(set(keys) - {""}) > 1:
            return keys
    return ["" for _ in paths]


def structure(
    graph: OpGraph, start: int, stop: int, consumers: dict[str, int]
) -> Hashable:
    """What makes two blocks alike: everything about their ops but the names.

    ``consumers``: index of the last op that reads each tensor (outputs: the end).
    """
    labels: dict[str, int] = {}
    outside: list[Hashable] = []

    def label(name: str) -> int:
        if name not in labels:
            labels[name] = len(labels)
            t = graph.tensor(name)
            outside.append(
                (
                    labels[name],
                    t.shape,
                    t.dtype,
                    t.kind,
                    t.trainable,
                    t.requires_grad,
                    t.per_sample,
                )
            )
        return labels[name]

    def operands(items: Sequence[Operand]) -> Hashable:
        return tuple((label(o.tensor), o.axes) for o in items)

    body: list[Hashable] = []
    for op in graph.ops[start:stop]:
        body.append(
            (
                op.target,
                op.kind,
                op.space.dims,
                operands(op.space.inputs),
                operands(op.space.outputs),
                op.forward_flops,
                op.backward_flops,
                op.pointwise_flops,
                operands(op.saved),
                op.phase,
                tuple((k, v) for k, v in op.attrs if k != "weight"),
                tuple(consumers.get(n, -1) >= stop for n in op.outputs),
            )
        )
    return (tuple(body), tuple(outside))


def last_readers(graph: OpGraph) -> dict[str, int]:
    """Index of the last op that reads each tensor; past the end for outputs."""
    result: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            result[name] = i
    return result | dict.fromkeys(graph.outputs, len(graph.ops))


def settle_saved(graph: OpGraph, spans: Sequence[tuple[str, int, int]]) -> OpGraph:
    """What many blocks read and the first of them keeps belongs to the op that made it.

    A rotary table or mask counts once; owned by its first reader it would make that
    layer differ from the others.
    """
    block_of = [
        n for n, (_, start, stop) in enumerate(spans) for _ in range(start, stop)
    ]
    made: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    for i, op in enumerate(graph.ops):
        made.update(dict.fromkeys(op.outputs, i))
        for name in op.inputs:
            readers.setdefault(name, set()).add(block_of[i])
    ops = list(graph.ops)
    for i, op in enumerate(graph.ops):
        kept: list[Operand] = []
        for operand in op.saved:
            source = made.get(operand.tensor)
            far = source is not None and block_of[source] != block_of[i]
            if source is None or not far or len(readers.get(operand.tensor, ())) < 3:
                kept.append(operand)
                continue
            maker = ops[source]
            own = maker.space.outputs[maker.outputs.index(operand.tensor)]
            ops[source] = replace(maker, saved=(*maker.saved, own))
        if len(kept) != len(op.saved):
            ops[i] = replace(ops[i], saved=tuple(kept))
    return graph.with_ops(tuple(ops))


def cluster_layers(graph: OpGraph) -> OpGraph:
    """The graph with its blocks."""
    spans = partition(graph.ops)
    graph = settle_saved(graph, spans)
    readers = last_readers(graph)
    kinds: dict[Hashable, int] = {}
    blocks: list[Block] = []
    for index, (name, start, stop) in enumerate(spans):
        key = structure(graph, start, stop, readers)
        kind = kinds.setdefault(key, len(kinds))
        blocks.append(Block(index, name, kind, start, stop))
    return replace(graph, blocks=tuple(blocks))
