"""Elementwise ops, with broadcasting, and ops that keep the shape."""

from __future__ import annotations

from passes.ir import OpKind
from passes.spaces.registry import Call, Labels, Spec, positional, rule, space


def elementwise(call: Call, kind: OpKind = OpKind.POINTWISE) -> Spec:
    """Operands aligned right against the output; axes of size 1 broadcast."""
    labels = positional(len(call.out))
    inputs: dict[str, Labels | list[Labels]] = {}
    for name, value in call.args.items():
        if hasattr(value, "shape"):
            inputs[name] = _aligned(labels, call.ref(name).rank)
        elif isinstance(value, (list, tuple)) and call.refs(name):
            inputs[name] = [_aligned(labels, r.rank) for r in call.refs(name)]
    outputs = [_aligned(labels, len(shape)) for shape in call.outputs]
    return space(call, kind, inputs, outputs)


def _aligned(labels: list[str], rank: int) -> list[str | None]:
    return list(labels[len(labels) - rank :])


# elementwise, but without torch's pointwise tag
@rule(
    "aten.where",
    "aten.masked_fill",
    "aten.masked_fill_",
    "aten.rsub",
    "aten.add",
    "aten.add_",
    "aten.sub",
    "aten.sub_",
    "aten.mul",
    "aten.mul_",
    "aten.div",
    "aten.div_",
    "aten.floor_divide",
    "aten.true_divide",
    "aten.hardswish",
    "aten.hardswish_",
    "aten.hardsigmoid_",
    "aten.polar",
    "aten.complex",
    "aten.__and__",
    "aten.__or__",
    "aten.__xor__",
    "aten.__lshift__",
    "aten.__rshift__",
    "aten.__iand__",
    "aten.__ior__",
    "aten.fill",
    "aten.real",
    "aten.imag",
    "aten.conj",
    "aten._conj",
    "aten.resolve_conj",
    "aten.resolve_neg",
    "aten.square_",
    "aten.log_sigmoid",
    "aten.log_sigmoid_forward",
    "aten.isclose",
    "aten.softplus",
    "aten.gelu_",
    "aten.silu_",
    "aten.mish_",
    "aten.elu_",
    "aten.threshold_",
    "aten.clamp_min_",
    "aten.clamp_max_",
    "aten.clip",
    "aten.clip_",
    "aten.hardtanh_",
    "aten.softshrink",
    "aten.hardshrink",
    "aten.logaddexp",
    "aten.xlogy",
    "aten.frac",
    "aten.rrelu",
    "aten.celu",
    "aten.celu_",
    "aten.relu6_",
    "aten.leaky_relu_",
    "aten.pow_",
    "aten.nan_to_num_",
    "aten.absolute",
    "aten.subtract",
    "aten.multiply",
    "aten.divide",
    "aten.negative",
    "aten.greater",
    "aten.greater_equal",
    "aten.less",
    "aten.less_equal",
    "aten.not_equal",
    "aten.fake_quantize_per_tensor_affine",
)
def untagged(call: Call) -> Spec:
    return elementwise(call)


@rule("aten.copy_", "aten.copy", "aten.fill_", "aten.zero_")
def copy_into(call: Call) -> Spec:
    return elementwise(call, OpKind.COPY)


@rule("aten.prelu")
def prelu(call: Call) -> Spec:
    labels = positional(len(call.out))
    weight = call.ref("weight")
    scale = [labels[1] if len(labels) > 1 else labels[0]] if weight.rank else []
    return space(call, OpKind.POINTWISE, {"self": labels, "weight": scale}, [labels])


@rule("aten.glu")
def glu(call: Call) -> Spec:
    """Halves of one axis, multiplied: the axis has two parts."""
    from passes.spaces.views import split_axes

    shape = call.ref("self").shape
    axis = call.axis("dim", len(shape), -1)
    labels: list[str] = positional(len(shape))
    half = shape[axis] // 2
    joined, each, sizes = split_axes(labels[axis], (half, half))
    source = [joined if i == axis else x for i, x in enumerate(labels)]
    output = [each[0] if i == axis else x for i, x in enumerate(labels)]
    return space(call, OpKind.POINTWISE, {"self": source}, [output], sizes=sizes)


@rule(
    "aten.dropout",
    "aten.dropout_",
    "aten.native_dropout",
    "aten.alpha_dropout",
    "aten.feature_dropout",
    "aten.feature_dropout_",
    "aten.feature_alpha_dropout",
    "aten.bernoulli",
    "aten.bernoulli_",
    "aten.normal_",
    "aten.uniform_",
    "aten.exponential_",
    "aten.rrelu_with_noise",
    "aten.rrelu_with_noise_functional",
    "aten.poisson",
)
def random(call: Call) -> Spec:
    return elementwise(call, OpKind.RANDOM)


@rule(
    "aten.clone",
    "aten.contiguous",
    "aten._to_copy",
    "aten.lift_fresh_copy",
    "aten.to",
    "aten.type_as",
    "aten._autocast_to_reduced_precision",
    "aten._autocast_to_full_precision",
)
def copy(call: Call) -> Spec:
    """A copy of one tensor; other tensors only name a dtype or device."""
    labels = positional(len(call.out))
    spec = space(
        call,
        OpKind.COPY,
        {next(iter(call.args)): list(labels)},
        [list(labels)],
        only_named=True,
    )
    if call.out_dtypes and call.tensors[0].dtype == call.out_dtypes[0]:
        base = call.target.split(".")[1]
        if base in ("to", "type_as", "_to_copy"):
            spec.kind = OpKind.VIEW
    return spec


@rule(
    "aten.alias",
    "aten.detach",
    "aten.detach_",
    "aten.lift_fresh",
    "aten.view_as_real",
    "aten.view_as_complex",
    "aten.cpu",
    "aten.requires_grad_",
)
def alias(call: Call) -> Spec:
    x = call.tensors[0]
    rank = min(x.rank, len(call.out))
    labels: list[str | None] = list(positional(rank))
    source = labels + [None] * (x.rank - rank)
    output = labels + [None] * (len(call.out) - rank)
    return space(call, OpKind.VIEW, {next(iter(call.args)): source}, [output])
