"""Lower a traced FX graph to the immutable :class:`OpGraph`.

Requires ``meta['val']`` on every node. Ensures one op per call with its iteration
space, attributes and FLOPs; dims and tensor axes that carry the batch are marked with
their size per sample, so :func:`with_batch` gives the graph of any micro-batch. An op
without a rule is UNKNOWN (replicated) and named in ``graph.warnings``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.collect import RawGraph, RawOp, collect
from passes.errors import PassError
from passes.ir import (
    Attr,
    Axis,
    Dim,
    IterationSpace,
    Op,
    Operand,
    OpGraph,
    OpKind,
    Tensor,
    TensorKind,
)
from passes.refine import (
    Factor,
    Node,
    adopt_factors,
    axis_factors,
    dim_rates,
    refine_backward,
)
from passes.spaces import RULES, Call, RuleMismatch, Spec
from passes.spaces.pointwise import elementwise
from passes.spaces.registry import Ref, Shape, whole
from passes.traced import TracedModel
from passes.work import Attrs, derived_attrs, op_work

# batches at which the structure is read: prime, so that factors of merged axes are
# not mistaken
PROBE, SECOND_PROBE = 7, 11


Rates = dict[str, tuple[int, ...]]


def batch_rates(
    first: RawGraph, second: RawGraph, sizes: tuple[int, int]
) -> Rates | None:
    """Per-sample size of every tensor axis, from the same graph at two batches.

    None where the graphs differ or an axis is not proportional to the batch.
    """
    if [o.name for o in first.ops] != [o.name for o in second.ops]:
        return None
    rates: Rates = {}
    for name, tensor in first.tensors.items():
        other = second.tensors.get(name)
        if other is None or len(other.shape) != len(tensor.shape):
            return None
        found: list[int] = []
        for a, b in zip(tensor.shape, other.shape, strict=True):
            if a == b:
                found.append(0)
            elif a % sizes[0] == 0 and a // sizes[0] * sizes[1] == b:
                found.append(a // sizes[0])
            else:
                return None
        rates[name] = tuple(found)
    return rates


def lower(traced: TracedModel) -> OpGraph:
    """Lower a traced model at its own micro-batch, without blocks.

    The structure is read at a probe batch, so that it does not depend on the batch
    traced (an axis of one sample looks like a broadcast). Raises :class:`PassError`
    where the graph holds what lowering can not read.
    """
    here = collect(traced.graph_module)
    if traced.symbolic:
        probe, other = PROBE, (here, traced.batch)
        if traced.batch == probe:
            other = collect(traced.at_batch(SECOND_PROBE)), SECOND_PROBE
            raw = here
        else:
            raw = collect(traced.at_batch(probe))
        rates = batch_rates(raw, other[0], (probe, other[1]))
        if rates is not None and any(any(r) for r in rates.values()):
            graph = lower_raw(raw, rates, probe, traced.tensors, traced.warnings)
            return with_batch(graph, traced.batch)
    fixed = {n: (0,) * len(t.shape) for n, t in here.tensors.items()}
    note = "the batch is fixed in the graph: trace again for another micro-batch"
    warnings = (*traced.warnings, note)
    return lower_raw(here, fixed, traced.batch, traced.tensors, warnings)


def lower_raw(
    raw: RawGraph,
    rates: Rates,
    batch: int,
    leaves: Sequence[Tensor] = (),
    warnings: Sequence[str] = (),
) -> OpGraph:
    """Lower a graph read at ``batch`` samples, given its per-sample sizes.

    ``leaves``: parameters and buffers of the whole model, those that the graph does
    not use included.
    """
    notes: list[str] = []
    nodes = _make_nodes(raw, rates, batch, notes)
    shapes = {n: t.shape for n, t in raw.tensors.items()}
    outside = {n for n, t in raw.tensors.items() if t.kind is not TensorKind.ACTIVATION}
    orphans = frozenset(refine_backward(nodes, outside, shapes))
    if orphans:
        nodes = _make_nodes(raw, rates, batch, [], orphans)
        refine_backward(nodes, outside, shapes)
    tensors = _tensors(raw, rates, leaves)
    roots = _parameter_roots(tensors, nodes)
    return OpGraph(
        ops=tuple(_op(node, tensors, roots) for node in nodes),
        tensors=tuple(tensors.values()),
        blocks=(),
        inputs=tuple(raw.inputs),
        outputs=tuple(raw.outputs),
        batch=batch,
        seq_len=_sequence_length(raw, rates),
        warnings=(*warnings, *notes),
    )


def find_spec(call: Call, pointwise: bool) -> Spec:
    """The space of one op by its rule; raises :class:`RuleMismatch` without one."""
    packet = call.target.rsplit(".", 1)[0]
    found = RULES.get(call.target) or RULES.get(packet)
    if found is not None:
        return found(call)
    if pointwise:
        return elementwise(call)
    found = RULES.get(packet.rstrip("_"))
    if found is None:
        raise RuleMismatch("no rule")
    return found(call)


def _make_nodes(
    raw: RawGraph,
    rates: Rates,
    batch: int,
    warnings: list[str],
    orphans: frozenset[str] = frozenset(),
) -> list[Node]:
    tiles = _tiled_slices(raw, orphans)
    factors: dict[str, tuple[tuple[Factor, ...], ...]] = {}
    nodes: list[Node] = []
    seen: set[str] = set()
    for op in raw.ops:
        inputs = [raw.tensors[n] for n in op.inputs]
        outputs = [raw.tensors[n] for n in op.outputs]
        known = [factors.get(n) for n in op.inputs]
        call = Call(
            op.target,
            op.args,
            tuple(Ref(i, t.shape, t.dtype) for i, t in enumerate(inputs)),
            tuple(t.shape for t in outputs),
            tuple(t.dtype for t in outputs),
            tuple(_sizes(t.shape, f) for t, f in zip(inputs, known, strict=True)),
            tiles.get(op.name, ()),
        )
        spec = _spec(call, op, warnings, seen)
        names = [op.inputs[i] for i in spec.order]
        node = Node(op.name, op.target, op.module, names, op.outputs, spec, {})
        operands = [(raw.tensors[n].shape, rates[n]) for n in names + op.outputs]
        node.rates = dim_rates(spec, operands, batch)
        for position, index in enumerate(spec.order):
            if known[index] is not None:
                adopt_factors(node, position, known[index] or ())
        for name, axes in zip(op.outputs, spec.outputs, strict=True):
            found = tuple(axis_factors(a, spec, node.rates) for a in axes)
            if any(found):
                factors[name] = found
        nodes.append(node)
    return nodes


def _sizes(
    shape: Shape, known: tuple[tuple[Factor, ...], ...] | None
) -> tuple[Shape, ...]:
    if known is None:
        return tuple((n,) for n in shape)
    return tuple(
        tuple(s for s, _ in f) if f else (n,) for n, f in zip(shape, known, strict=True)
    )


def _spec(call: Call, op: RawOp, warnings: list[str], seen: set[str]) -> Spec:
    try:
        return find_spec(call, op.pointwise)
    except RuleMismatch as error:
        if op.target not in seen:
            seen.add(op.target)
            where = f" in {op.module}" if op.module else ""
            warnings.append(
                f"replicated: unknown op {op.target} ({op.name}{where}): {error}"
            )
        return whole(call, OpKind.UNKNOWN)


def _tiled_slices(raw: RawGraph, orphans: frozenset[str]) -> dict[str, Shape]:
    """Slices of one axis that together cover it exactly once, as parts."""
    groups: dict[tuple[str, int], dict[tuple[int, int], list[str]]] = {}
    for op in raw.ops:
        if op.slice_of is not None and op.name not in orphans:
            tensor, axis, start, end = op.slice_of
            if end - start != raw.tensors[tensor].shape[axis]:
                ranges = groups.setdefault((tensor, axis), {})
                ranges.setdefault((start, end), []).append(op.name)
    result: dict[str, Shape] = {}
    for (tensor, axis), ranges in groups.items():
        ordered = sorted(ranges)
        at = 0
        for start, end in ordered:
            if start != at:
                break
            at = end
        else:
            if at == raw.tensors[tensor].shape[axis] and len(ordered) > 1:
                parts = tuple(end - start for start, end in ordered)
                for names in ranges.values():
                    result |= dict.fromkeys(names, parts)
    return result


def _tensors(
    raw: RawGraph, rates: Rates, leaves: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Parameters and buffers as the model lists them, then the graph's own tensors."""
    result = {t.name: t for t in leaves}
    for name, t in raw.tensors.items():
        if name not in result:
            result[name] = Tensor(
                name,
                t.shape,
                t.dtype,
                t.kind,
                trainable=t.kind is TensorKind.PARAMETER and t.requires_grad,
                persistent=not leaves or t.kind is not TensorKind.BUFFER,
                requires_grad=t.requires_grad,
                per_sample=rates[name] if any(rates[name]) else (),
            )
    return result


def _parameter_roots(
    tensors: Mapping[str, Tensor], nodes: Sequence[Node]
) -> dict[str, str]:
    """Parameters by name, seen through views and casts of them."""
    roots = {n: n for n, t in tensors.items() if t.kind is TensorKind.PARAMETER}
    for node in nodes:
        if (
            node.spec.kind in (OpKind.VIEW, OpKind.COPY)
            and len(node.inputs) == 1
            and node.inputs[0] in roots
        ):
            roots |= dict.fromkeys(node.outputs, roots[node.inputs[0]])
    return roots


def _sequence_length(raw: RawGraph, rates: Rates) -> int:
    """Tokens per sample of the first integer input [batch, length]."""
    for name in raw.inputs:
        tensor = raw.tensors[name]
        if tensor.dtype in ("int64", "int32") and len(tensor.shape) == 2:
            return tensor.shape[1] if rates[name][1] == 0 else tensor.shape[0]
    return 0


def _op(node: Node, tensors: Mapping[str, Tensor], roots: Mapping[str, str]) -> Op:
    spec = node.spec
    fixed: Attrs = dict(spec.attrs)
    if spec.kind in (OpKind.GEMM, OpKind.GROUPED_GEMM):
        owners = [roots.get(n, "") for n in node.inputs[:2]]
        fixed["weight"] = owners[1] or owners[0]
    made = IterationSpace(
        tuple(
            Dim(name, size, kind, node.rates.get(name, 0))
            for name, (size, kind) in spec.dims.items()
        ),
        tuple(
            Operand(n, axes) for n, axes in zip(node.inputs, spec.inputs, strict=True)
        ),
        tuple(
            Operand(n, axes) for n, axes in zip(node.outputs, spec.outputs, strict=True)
        ),
    )
    return _with_work(
        Op(
            name=node.name,
            target=node.target,
            kind=spec.kind,
            inputs=tuple(node.inputs),
            outputs=tuple(node.outputs),
            space=made,
            module=node.module,
            attrs=tuple(fixed.items()),
        ),
        tensors,
    )


_DERIVED = frozenset(
    (
        *("batch", "m", "n", "k"),
        *("ci", "co", "in_size", "out_size", "kernel"),
        *("q_heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim"),
    )
)


def _with_work(op: Op, tensors: Mapping[str, Tensor]) -> Op:
    """Fill in what follows from shapes: attributes and FLOPs."""
    fixed: dict[str, Attr] = {k: v for k, v in op.attrs if k not in _DERIVED}
    operands = [tensors[n] for n in op.inputs]
    shapes = [t.shape for t in operands] + [tensors[n].shape for n in op.outputs]
    attrs = derived_attrs(op.kind, op.space, shapes, fixed)
    trained = any(tensors[n].requires_grad for n in op.outputs)
    wants = tuple(trained and (t.requires_grad or t.trainable) for t in operands)
    work = op_work(op.kind, op.target, op.space, attrs, shapes, wants)
    return replace(
        op,
        attrs=tuple(attrs.items()),
        forward_flops=work.forward,
        backward_flops=work.backward,
        pointwise_flops=work.pointwise,
    )


def with_batch(graph: OpGraph, batch: int) -> OpGraph:
    """The same graph for another micro-batch, equal to lowering at that batch.

    Raises :class:`PassError` where the traced graph fixes its batch.
    """
    if batch == graph.batch:
        return graph
    if batch < 1:
        raise PassError("batch must be at least 1", batch, "Give a positive batch")
    if not any(t.per_sample for t in graph.tensors):
        raise PassError(
            f"the graph was traced for a batch of {graph.batch} and fixes it",
            batch,
            "Trace the model again at that batch",
        )
    tensors = {t.name: _resized(t, batch) for t in graph.tensors}
    ops = tuple(_op_at(op, tensors, graph.batch, batch) for op in graph.ops)
    return replace(graph, ops=ops, tensors=tuple(tensors.values()), batch=batch)


def _resized(tensor: Tensor, batch: int) -> Tensor:
    if not tensor.per_sample:
        return tensor
    shape = tuple(
        rate * batch if rate else size
        for size, rate in zip(tensor.shape, tensor.per_sample, strict=True)
    )
    return replace(tensor, shape=shape)


def _op_at(op: Op, tensors: Mapping[str, Tensor], old: int, new: int) -> Op:
    dims = tuple(
        replace(d, size=d.per_sample * new) if d.per_sample else d
        for d in op.space.dims
    )
    carried = {d.name for d in dims if d.per_sample}

    def axis(item: Axis) -> Axis:
        if not item.parts or not carried.intersection(item.dims):
            return item
        return replace(item, parts=tuple(p * new // old for p in item.parts))

    def operand(item: Operand) -> Operand:
        if not any(a.parts for a in item.axes):
            return item
        return replace(item, axes=tuple(axis(a) for a in item.axes))

    made = IterationSpace(
        dims,
        tuple(operand(o) for o in op.space.inputs),
        tuple(operand(o) for o in op.space.outputs),
    )
    return _with_work(replace(op, space=made), tensors)
