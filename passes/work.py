"""What an op's space and shapes say about its work: attributes and FLOPs.

The only source of both, so that a graph rescaled to another batch carries exactly the
numbers of a graph lowered at that batch.

FLOPs follow torch's FlopCounterMode: 2 per multiply-add of a matrix product, nothing
else; attention is counted whole, causal or not. It differs where torch's count is
known to be wrong: grouped products count (torch has no formula), and the weight
gradient of a grouped convolution is not multiplied by the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import NamedTuple

from passes.ir import Attr, DimKind, IterationSpace, OpKind

Attrs = dict[str, Attr]
Shape = tuple[int, ...]


class Work(NamedTuple):
    """FLOPs of one op, forward, backward and vector."""

    forward: int
    backward: int
    pointwise: int


def _ints(value: Attr) -> int:
    assert isinstance(value, int)
    return value


def product_sizes(space: IterationSpace) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a matrix product of the first two operands."""
    a = {d for axis in space.inputs[0].axes for d in axis.dims}
    b = {d for axis in space.inputs[1].axes for d in axis.dims}
    out = {d for axis in space.outputs[0].axes for d in axis.dims}
    batch = m = n = k = 1
    for dim in space.dims:
        if dim.name not in out:
            k *= dim.size
        elif dim.name in a and dim.name in b:
            batch *= dim.size
        elif dim.name in a:
            m *= dim.size
        else:
            n *= dim.size
    return batch, m, n, k


def derived_attrs(
    kind: OpKind, space: IterationSpace, shapes: Sequence[Shape], fixed: Attrs
) -> Attrs:
    """Attributes by kind, from the space, the operands' shapes and the fixed ones.

    ``shapes``: inputs then outputs, in the space's order.
    """
    if kind in (OpKind.GEMM, OpKind.GROUPED_GEMM):
        batch, m, n, k = product_sizes(space)
        groups = _ints(fixed.get("groups", 1))
        grouped = kind is OpKind.GROUPED_GEMM
        if grouped and batch == groups:
            batch = 1
        elif grouped:  # rows not divisible by the groups
            m = -(-m // groups)
        return {"batch": batch, "m": m, "n": n, "k": k, "groups": groups} | fixed
    if kind is OpKind.CONV:
        return _conv_attrs(space, shapes, fixed)
    if kind is OpKind.ATTENTION:
        return _attention_attrs(shapes) | fixed
    return fixed


def _conv_attrs(space: IterationSpace, shapes: Sequence[Shape], fixed: Attrs) -> Attrs:
    x, w, y = shapes[0], shapes[1], shapes[len(space.inputs)]
    rank = len(w) - 2
    return {
        "n": x[0] if len(x) == rank + 2 else 1,
        "ci": x[-rank - 1],
        "co": y[-rank - 1],
        "groups": fixed["groups"],
        "transposed": fixed["transposed"],
        "in_size": x[-rank:],
        "out_size": y[-rank:],
        "kernel": w[2:],
    } | {name: fixed[name] for name in ("stride", "padding", "dilation")}


def _attention_attrs(shapes: Sequence[Shape]) -> Attrs:
    q, k, v = shapes[:3]
    rank = len(q)
    return {
        "batch": prod(q[: rank - 3]) if rank > 3 else q[0],
        "q_heads": q[rank - 3] if rank > 3 else 1,
        "kv_heads": k[rank - 3] if rank > 3 else 1,
        "q_len": q[rank - 2],
        "kv_len": k[rank - 2],
        "qk_dim": q[rank - 1],
        "v_dim": v[rank - 1],
    }


_PER_ELEMENT = {
    OpKind.POINTWISE: 1,
    OpKind.RANDOM: 2,
    OpKind.REDUCE: 1,
    OpKind.NORM: 6,
    OpKind.SOFTMAX: 5,
    OpKind.LOSS: 6,
    OpKind.POOL: 1,
}
# arithmetic ops per output element where it is not one
_POINTWISE = {
    "gelu": 10,
    "silu": 5,
    "sigmoid": 4,
    "tanh": 6,
    "mish": 10,
    "hardswish": 4,
    "softplus": 6,
    "elu": 5,
    "exp": 3,
    "log": 3,
    "pow": 4,
    "sin": 4,
    "cos": 4,
    "erf": 6,
    "sqrt": 2,
    "rsqrt": 2,
    "addcmul": 3,
    "addcdiv": 3,
    "lerp": 3,
    "glu": 6,
}


def pointwise_flops(
    kind: OpKind,
    target: str,
    space: IterationSpace,
    shapes: Sequence[Shape],
) -> int:
    """Vector work: arithmetic ops per element of the largest operand that sets it."""
    count = len(space.inputs)
    inputs = [prod(s) for s in shapes[:count]]
    outputs = [prod(s) for s in shapes[count:]]
    if kind is OpKind.SORT and inputs:
        coupled = [d.size for d in space.dims if d.kind is DimKind.COUPLED]
        return inputs[0] * max(1, round(log2(max(2, prod(coupled)))))
    each = _PER_ELEMENT.get(kind, 0)
    if kind is OpKind.POINTWISE and outputs:
        base = target.split(".")[1] if "." in target else target
        return outputs[0] * _POINTWISE.get(base.rstrip("_"), 1)
    if kind is OpKind.RANDOM and outputs:
        return outputs[0] * each
    if each and inputs:
        return max(inputs[0], outputs[0] if outputs else 0) * each
    return 0


def op_work(
    kind: OpKind,
    target: str,
    space: IterationSpace,
    attrs: Attrs,
    shapes: Sequence[Shape],
    wants: tuple[bool, ...],
) -> Work:
    """FLOPs of one op.

    ``wants``: for each input, whether backward computes its gradient. Attention's
    backward is five products.
    """
    pointwise = pointwise_flops(kind, target, space, shapes)
    if kind in (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV):
        forward = 2 * prod(d.size for d in space.dims)
        return Work(forward, forward * sum(wants[:2]), pointwise)
    if kind is OpKind.ATTENTION:
        names = ("batch", "q_heads", "q_len", "kv_len")
        volume = 2 * prod(_ints(attrs[n]) for n in names)
        e, v = _ints(attrs["qk_dim"]), _ints(attrs["v_dim"])
        backward = volume * (3 * e + 2 * v) if any(wants[:3]) else 0
        return Work(volume * (e + v), backward, pointwise)
    if kind is OpKind.SCAN:
        rows = prod(shapes[0][:-1]) if shapes and len(shapes[0]) else 0
        forward = 2 * rows * _ints(attrs.get("macs_per_row", 0))
        return Work(forward, 2 * forward if any(wants) else 0, pointwise)
    return Work(0, 0, pointwise)
