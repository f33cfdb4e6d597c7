"""Matrix products: an einsum string each."""

from __future__ import annotations

from passes.ir import DimKind, OpKind
from passes.spaces.registry import Call, Labels, RuleMismatch, Spec, lead, rule, space


def einsum(call: Call, inputs: dict[str, Labels], output: Labels, sums: str) -> Spec:
    """A matrix product that contracts ``sums``, or a product without contraction."""
    return space(call, OpKind.GEMM, inputs, [output], reduction=sums)


@rule("aten.linear")
def linear(call: Call) -> Spec:
    x, w = call.ref("input"), call.ref("weight")
    rows = lead(x.rank - 1)
    if w.rank == 1 or x.rank == 1:
        n = ["n"] if w.rank == 2 else []
        operands: dict[str, Labels] = {"input": [*rows, "k"], "weight": [*n, "k"]}
        spec = space(
            call, OpKind.REDUCE, operands | {"bias": n}, [[*rows, *n]], reduction="k"
        )
        if w.rank == 2 and call.has("bias"):
            spec.kind = OpKind.GEMM  # runs as addmm
        return spec
    return einsum(
        call, {"input": [*rows, "k"], "weight": "nk", "bias": "n"}, [*rows, "n"], "k"
    )


@rule("aten.mm")
def mm(call: Call) -> Spec:
    return einsum(call, {"self": "mk", "mat2": "kn"}, "mn", "k")


@rule("aten.bmm")
def bmm(call: Call) -> Spec:
    return einsum(call, {"self": "bmk", "mat2": "bkn"}, "bmn", "k")


def _align(shape: tuple[int, ...], labels: str) -> str:
    return labels[len(labels) - len(shape) :]


@rule("aten.addmm", "aten.addmm_")
def addmm(call: Call) -> Spec:
    bias = _align(call.ref("self").shape, "mn")
    return einsum(call, {"mat1": "mk", "mat2": "kn", "self": bias}, "mn", "k")


@rule("aten._addmm_activation")
def addmm_activation(call: Call) -> Spec:
    return addmm(call)


@rule("aten.baddbmm", "aten.baddbmm_")
def baddbmm(call: Call) -> Spec:
    bias = _align(call.ref("self").shape, "bmn")
    return einsum(call, {"batch1": "bmk", "batch2": "bkn", "self": bias}, "bmn", "k")


@rule("aten._scaled_mm")
def scaled_mm(call: Call) -> Spec:
    return einsum(call, {"self": "mk", "mat2": "kn"}, "mn", "k")


@rule("aten.mv")
def mv(call: Call) -> Spec:
    return space(call, OpKind.REDUCE, {"self": "mk", "vec": "k"}, ["m"], reduction="k")


@rule("aten.dot", "aten.vdot")
def dot(call: Call) -> Spec:
    other = "tensor" if call.has("tensor") else "other"
    return space(call, OpKind.REDUCE, {"self": "k", other: "k"}, [""], reduction="k")


@rule("aten.outer", "aten.ger")
def outer(call: Call) -> Spec:
    return space(call, OpKind.POINTWISE, {"self": "m", "vec2": "n"}, ["mn"])


@rule("aten.matmul")
def matmul(call: Call) -> Spec:
    a, b = call.ref("self"), call.ref("other")
    rank = max(a.rank, b.rank, 2)
    batch = lead(rank - 2) if rank != 3 else ["b"]
    left = [*batch, "m", "k"][rank - a.rank :] if a.rank > 1 else ["k"]
    right = [*batch, "k", "n"][rank - b.rank :] if b.rank > 1 else ["k"]
    if batch and "m" in batch:
        raise RuleMismatch("too many batch dims")
    out = [
        *batch,
        *(["m"] if a.rank > 1 else []),
        *(["n"] if b.rank > 1 else []),
    ]
    out = out[len(out) - len(call.out) :]
    vector = a.rank == 1 or b.rank == 1
    if vector and max(a.rank, b.rank) > 2:
        vector = False  # folded into one mm with a unit dim, or mv
        vector = b.rank == 1
    kind = OpKind.REDUCE if vector or len(out) < 2 else OpKind.GEMM
    return space(call, kind, {"self": left, "other": right}, [out], reduction="k")


@rule("aten.einsum")
def einsum_op(call: Call) -> Spec:
    equation = str(call.args.get("equation", "")).replace(" ", "")
    refs = call.refs("tensors")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(refs):
        raise RuleMismatch(f"equation {equation!r}")
    # "..." stands for the leading dims of the highest-rank operand, right-aligned
    extra = max(
        (r.rank - (len(t) - 3) for t, r in zip(terms, refs, strict=True) if "..." in t),
        default=0,
    )
    dots = [f"e{i}" for i in range(extra)]

    def expand(term: str, rank: int | None) -> list[str]:
        if "..." not in term:
            return list(term)
        before, _, after = term.partition("...")
        width = extra if rank is None else rank - len(before) - len(after)
        return [*before, *dots[extra - width :], *after]

    labels = [expand(t, r.rank) for t, r in zip(terms, refs, strict=True)]
    if not arrow:
        seen = [x for term in labels for x in term]
        once = sorted({x for x in seen if seen.count(x) == 1 and x not in dots})
        output: list[str] = [*dots, *once]
    else:
        output = expand(right, None)
    if any(len(set(term)) != len(term) for term in labels):
        raise RuleMismatch(f"repeated label in {equation!r}")
    sums = [x for x in dict.fromkeys(y for t in labels for y in t) if x not in output]
    contracted = [x for x in sums if sum(x in term for term in labels) > 1]
    if len(refs) == 1:
        kind = OpKind.REDUCE if sums else OpKind.VIEW
    elif contracted and len(refs) == 2:
        kind = OpKind.GEMM
    elif contracted:
        raise RuleMismatch("einsum of more than two operands")
    else:
        kind = OpKind.POINTWISE
    return space(call, kind, {"tensors": labels}, [output], reduction=sums)


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback")
def grouped_mm(call: Call) -> Spec:
    """Rows sorted by group: 2d x 3d, ``offs`` ends of the groups.

    The rows' axis is (e, m) with m rows a group when divided evenly.
    """
    names = list(call.args)
    a, b = call.ref(names[0]), call.ref(names[1])
    groups = 0
    if a.rank == 2 and b.rank == 3:
        groups, rows = b.shape[0], a.shape[0]
        left: Labels = [("e", "m"), "k"]
        right: Labels = ["e", "k", "n"]
        out: Labels = [("e", "m"), "n"]
    elif a.rank == 3 and b.rank == 3:
        return einsum(call, {names[0]: "emk", names[1]: "ekn"}, "emn", "k")
    else:
        raise RuleMismatch("grouped product of this rank")
    inputs: dict[str, Labels] = {names[0]: left, names[1]: right}
    offs = "offs"
    if call.has(offs):
        inputs[offs] = "e"
    if rows % groups:
        inputs[names[0]], inputs[names[1]] = ["m", "k"], [None, "k", "n"]
        inputs.pop(offs, None)
        return space(
            call, OpKind.GROUPED_GEMM, inputs, ["mn"], "k", attrs={"groups": groups}
        )
    sizes = {"e": groups, "m": rows // groups}
    return space(
        call,
        OpKind.GROUPED_GEMM,
        inputs,
        [out],
        reduction="k",
        sizes=sizes,
        attrs={"groups": groups},
    )


@rule("aten.bilinear")
def bilinear(call: Call) -> Spec:
    rows = lead(call.ref("input1").rank - 1)
    return space(
        call,
        OpKind.GEMM,
        {
            "input1": [*rows, "i"],
            "weight": "nij",
            "input2": [*rows, "j"],
            "bias": "n",
        },
        [[*rows, "n"]],
        reduction="ij",
    )


@rule("aten.cdist")
def cdist(call: Call) -> Spec:
    rank = call.ref("x1").rank
    batch = lead(rank - 2)[: rank - 2] if rank != 3 else ["b"]
    spec = space(
        call,
        OpKind.REDUCE,
        {"x1": [*batch, "i", "k"], "x2": [*batch, "j", "k"]},
        [[*batch, "i", "j"]],
        coupled="k",
    )
    assert all(kind is not DimKind.REDUCTION for _, kind in spec.dims.values())
    return spec
