"""Reductions, norms, softmax, sorts and scans along an axis."""

from __future__ import annotations

from collections.abc import Iterable

from passes.ir import OpKind
from passes.spaces.registry import (
    Call,
    Label,
    Labels,
    RuleMismatch,
    Spec,
    lead,
    positional,
    rule,
    space,
)


def _reduced_axes(call: Call, rank: int) -> set[int]:
    value = call.args.get("dim")
    if value is None:
        return set(range(rank))
    axes = call.ints("dim")
    return {a % rank for a in axes} if axes and rank else set(range(rank))


def reduced(call: Call, kind: OpKind, summable: bool) -> Spec:
    """Reduce axes: sums may be partial, other reductions need the axis whole."""
    x = call.tensors[0]
    axes = _reduced_axes(call, x.rank)
    labels = positional(x.rank)
    gone = [v for k, v in enumerate(labels) if k in axes]

    def output(rank: int) -> list[Label]:
        if rank == x.rank:
            return [None if k in axes else v for k, v in enumerate(labels)]
        return [v for k, v in enumerate(labels) if k not in axes]

    return space(
        call,
        kind,
        {next(iter(call.args)): list(labels)},
        [output(len(shape)) for shape in call.outputs],
        reduction=gone if summable else (),
        coupled=() if summable else gone,
    )


@rule("aten.sum", "aten.mean", "aten.nansum", "aten.nanmean", "aten.count_nonzero")
def sums(call: Call) -> Spec:
    return reduced(call, OpKind.REDUCE, True)


@rule(
    "aten.amax",
    "aten.amin",
    "aten.max",
    "aten.min",
    "aten.argmax",
    "aten.argmin",
    "aten.any",
    "aten.all",
    "aten.prod",
    "aten.var",
    "aten.std",
    "aten.var_mean",
    "aten.std_mean",
    "aten.logsumexp",
    "aten.norm",
    "aten.linalg_vector_norm",
    "aten.linalg_norm",
    "aten.aminmax",
    "aten.median",
    "aten.mode",
)
def coupled_reductions(call: Call) -> Spec:
    if call.has("other"):  # max(a, b) is elementwise
        from passes.spaces.pointwise import elementwise

        return elementwise(call)
    return reduced(call, OpKind.REDUCE, False)


def along(call: Call, kind: OpKind, axes: Iterable[int]) -> Spec:
    """An op that keeps the shape and couples the given axes."""
    x = call.tensors[0]
    labels = positional(x.rank)
    tied = [labels[a] for a in axes] if x.rank else []
    outputs: list[Labels] = []
    for shape in call.outputs:
        same = [v if n == m else None for v, n, m in zip(labels, shape, x.shape)]  # noqa: B905
        outputs.append(same if len(shape) == x.rank else [None] * len(shape))
    return space(
        call, kind, {next(iter(call.args)): list(labels)}, outputs, coupled=tied
    )


@rule(
    "aten.softmax",
    "aten._softmax",
    "aten._safe_softmax",
    "aten.log_softmax",
    "aten._log_softmax",
    "aten.gumbel_softmax",
)
def softmax(call: Call) -> Spec:
    return along(call, OpKind.SOFTMAX, [call.axis("dim", call.tensors[0].rank, -1)])


@rule(
    "aten.cumsum",
    "aten.cumsum_",
    "aten.cumprod",
    "aten.cummax",
    "aten.cummin",
    "aten.logcumsumexp",
    "aten.sort",
    "aten.argsort",
    "aten.topk",
    "aten.kthvalue",
    "aten.msort",
)
def sorts(call: Call) -> Spec:
    default = -1 if "sort" in call.target or "topk" in call.target else 0
    return along(call, OpKind.SORT, [call.axis("dim", call.tensors[0].rank, default)])


@rule("aten.diff")
def diff(call: Call) -> Spec:
    x = call.tensors[0]
    axis = call.axis("dim", x.rank, -1)
    labels: list[Label] = [
        None if k == axis else v for k, v in enumerate(positional(x.rank))
    ]
    return space(call, OpKind.POINTWISE, {"self": labels}, [labels])


@rule("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
def triangle(call: Call) -> Spec:
    labels = positional(len(call.out))
    return space(call, OpKind.COPY, {"self": labels}, [labels])


@rule("aten.bincount", "aten.histc")
def histogram(call: Call) -> Spec:
    return space(
        call,
        OpKind.REDUCE,
        {"self": positional(call.tensors[0].rank)},
        [[None]],
        reduction=positional(call.tensors[0].rank),
    )


@rule("aten.bucketize", "aten.searchsorted")
def bucketize(call: Call) -> Spec:
    labels = positional(len(call.out))
    if not call.has("self") or "searchsorted" in call.target:
        raise RuleMismatch("searchsorted has no map")
    return space(call, OpKind.POINTWISE, {"self": labels}, [labels])


@rule(
    "aten.layer_norm",
    "aten.native_layer_norm",
    "aten.rms_norm",
    "aten._fused_rms_norm",
)
def layer_norm(call: Call) -> Spec:
    x = call.ref("input")
    tail = len(call.ints("normalized_shape", 1))
    rows = lead(x.rank - tail)
    inner = ["d"] if tail == 1 else [f"d{k}" for k in range(tail)]
    stats: list[Labels] = [
        [*rows, *([None] * (len(shape) - len(rows)))] for shape in call.outputs[1:]
    ]
    return space(
        call,
        OpKind.NORM,
        {"input": [*rows, *inner], "weight": inner, "bias": inner},
        [[*rows, *inner], *stats],
        coupled=inner,
    )


@rule(
    "aten.batch_norm",
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit_no_training",
    "aten.cudnn_batch_norm",
    "aten._batch_norm_with_update",
    "aten._batch_norm_no_update",
)
def batch_norm(call: Call) -> Spec:
    """Statistics over batch and positions in training; elementwise in evaluation."""
    x = call.ref("input")
    places = [f"x{k}" for k in range(x.rank - 2)]
    per_channel: Labels = ["c"]
    training = bool(call.args.get("training", "no_" not in call.target))
    labels = ["n", "c", *places]
    outputs: list[Labels] = [labels]
    for shape in call.outputs[1:]:
        outputs.append(per_channel if shape == (x.shape[1],) else [None] * len(shape))
    return space(
        call,
        OpKind.NORM,
        {
            "input": labels,
            "weight": per_channel,
            "bias": per_channel,
            "running_mean": per_channel,
            "running_var": per_channel,
        },
        outputs,
        coupled=["n", *places] if training else (),
    )


@rule("aten.group_norm", "aten.native_group_norm")
def group_norm(call: Call) -> Spec:
    x = call.ref("input")
    groups = call.int("num_groups", 0) or call.int("group", 1)
    places = [f"x{k}" for k in range(x.rank - 2)]
    channels: Label = ("g", "c")
    stats: list[Labels] = [["n", "g"]] * (len(call.outputs) - 1)
    return space(
        call,
        OpKind.NORM,
        {
            "input": ["n", channels, *places],
            "weight": [channels],
            "bias": [channels],
        },
        [["n", channels, *places], *stats],
        coupled=["c", *places],
        sizes={"g": groups, "c": x.shape[1] // groups},
    )


@rule("aten.instance_norm")
def instance_norm(call: Call) -> Spec:
    x = call.ref("input")
    places = [f"x{k}" for k in range(x.rank - 2)]
    labels = ["n", "c", *places]
    per_channel: Labels = ["c"]
    return space(
        call,
        OpKind.NORM,
        {
            "input": labels,
            "weight": per_channel,
            "bias": per_channel,
            "running_mean": per_channel,
            "running_var": per_channel,
        },
        [labels],
        coupled=places,
    )


@rule("aten.local_response_norm")
def local_response_norm(call: Call) -> Spec:
    labels = positional(len(call.out))
    return space(call, OpKind.NORM, {"input": labels}, [labels], coupled=labels[1:2])


@rule("aten.weight_norm", "aten._weight_norm", "aten._weight_norm_interface")
def weight_norm(call: Call) -> Spec:
    """One norm per slice along ``dim``; its other axes are coupled."""
    v = call.ref("v")
    axis = call.axis("dim", v.rank)
    labels = positional(v.rank)
    scale: list[Label] = [x if k == axis else None for k, x in enumerate(labels)]
    outputs: list[Labels] = [labels]
    outputs += [scale] * (len(call.outputs) - 1)
    return space(
        call,
        OpKind.NORM,
        {"v": labels, "g": scale},
        outputs,
        coupled=[x for k, x in enumerate(labels) if k != axis],
    )


@rule("aten.normalize", "aten.cosine_similarity", "aten.pairwise_distance")
def pairwise(call: Call) -> Spec:
    rank = call.tensors[0].rank
    axis = call.axis("dim", rank, 1 if "cosine" in call.target else -1)
    labels = positional(rank)
    names = list(call.args)
    out: list[Label] = [v for k, v in enumerate(labels) if k != axis]
    if len(call.out) == rank:
        out = [None if k == axis else v for k, v in enumerate(labels)]
    return space(
        call,
        OpKind.REDUCE,
        {names[0]: list(labels), names[1]: list(labels)},
        [out],
        coupled=[labels[axis]],
    )
