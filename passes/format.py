"""Text of an OpGraph: one op a line, its space in einsum-like form.

``linear = aten.linear.default(x, w) gemm bsk,nk->bsn b:4@1 s:32 k:64+ n:192``: dims
with their size, ``@`` the size per sample, ``+`` reduction, ``!`` coupled. In the
einsum ``.`` is a whole axis, ``(bs)`` a merged one, ``(y~i)`` a window,
``(dr|64,64)`` one in parts, ``{kv}`` a name of several letters.
"""

from __future__ import annotations

from passes.ir import Attr, Axis, Dim, DimKind, IterationSpace, Op, Operand, OpGraph

_MARK = {DimKind.PARALLEL: "", DimKind.REDUCTION: "+", DimKind.COUPLED: "!"}


def _name(dim: str) -> str:
    return dim if len(dim) == 1 else "{" + dim + "}"


def format_axis(axis: Axis) -> str:
    if not axis.dims:
        return "."
    text = ("~" if axis.window else "").join(_name(d) for d in axis.dims)
    if axis.parts:
        return f"({text}|{','.join(map(str, axis.parts))})"
    return text if len(axis.dims) == 1 and not axis.window else f"({text})"


def _operand(operand: Operand) -> str:
    return "".join(format_axis(a) for a in operand.axes) or "1"


def format_space(space: IterationSpace) -> str:
    """``bsk,nk->bsn`` of a space."""
    left = ",".join(_operand(o) for o in space.inputs)
    return f"{left}->{','.join(_operand(o) for o in space.outputs)}"


def _dim(dim: Dim) -> str:
    rate = f"@{dim.per_sample}" if dim.per_sample else ""
    return f"{dim.name}:{dim.size}{rate}{_MARK[dim.kind]}"


def _value(value: Attr) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value) if value != "" else '""'


def format_op(op: Op) -> str:
    """One line of an op."""
    words = [
        f"{', '.join(op.outputs)} = {op.target}({', '.join(op.inputs)})",
        str(op.kind),
        format_space(op.space),
        *(_dim(d) for d in op.space.dims),
    ]
    if op.forward_flops or op.backward_flops:
        words.append(f"flops={op.forward_flops}/{op.backward_flops}")
    if op.pointwise_flops:
        words.append(f"vector={op.pointwise_flops}")
    if op.fusion >= 0:
        words.append(f"fusion={op.fusion}")
    if op.module:
        words.append(f"in={op.module}")
    words += [f"{k}={_value(v)}" for k, v in op.attrs]
    if op.saved:
        words.append(f"saved={','.join(o.tensor for o in op.saved)}")
    return " ".join(words)


def format_graph(graph: OpGraph) -> str:
    """Text of a whole graph: header, leaf tensors, blocks with their ops."""
    lines = [f"graph batch={graph.batch} seq_len={graph.seq_len}"]
    made = {name for op in graph.ops for name in op.outputs}
    for t in graph.tensors:
        if t.name in made:
            continue
        flags = [t.kind]
        flags += ["trainable"] if t.trainable else []
        flags += [] if t.persistent else ["non-persistent"]
        flags += [f"aliases={','.join(t.aliases)}"] if t.aliases else []
        shape = "x".join(map(str, t.shape)) or "scalar"
        lines.append(f"  {t.name}: {t.dtype} {shape} {' '.join(flags)}")
    starts = {b.start: b for b in graph.blocks}
    for i, op in enumerate(graph.ops):
        if i in starts:
            lines.append(f"block {starts[i].name} kind={starts[i].kind}")
        results = " ".join(
            f"{graph.tensor(n).dtype}[{'x'.join(map(str, graph.tensor(n).shape))}]"
            + ("*" if graph.tensor(n).requires_grad else "")
            for n in op.outputs
        )
        lines.append(f"  {format_op(op)} -> {results}")
    lines.append(f"return {', '.join(graph.outputs)}")
    lines += [f"warning {w}" for w in graph.warnings]
    return "\n".join(lines) + "\n"
