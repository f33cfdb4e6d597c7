"""Table lookups, gathers and scatters, and losses.

An axis that is addressed by an index is whole: any row may be read or written.
"""

from __future__ import annotations

from passes.ir import OpKind
from passes.spaces.registry import (
    LETTERS,
    Call,
    Label,
    Labels,
    Ref,
    RuleMismatch,
    Spec,
    items,
    lead,
    positional,
    rule,
    space,
    whole,
)


@rule("aten.embedding")
def embedding(call: Call) -> Spec:
    """weight [v, d] at indices [...]: rows split over v give partial sums."""
    rows = lead(call.ref("indices").rank)
    return space(
        call,
        OpKind.EMBEDDING,
        {"weight": "vd", "indices": rows},
        [[*rows, "d"]],
        reduction="v",
    )


@rule("aten.embedding_bag", "aten._embedding_bag")
def embedding_bag(call: Call) -> Spec:
    if call.ref("indices").rank != 2:
        return space(
            call,
            OpKind.EMBEDDING,
            {"weight": "vd"},
            [[None, "d"]],
            reduction="v",
        )
    return space(
        call,
        OpKind.EMBEDDING,
        {"weight": "vd", "indices": "mr"},
        ["md"],
        reduction="vr",
    )


def _index_labels(
    call: Call, name: str
) -> tuple[list[Label], list[list[Label]], list[Label]]:
    """Labels of an advanced-indexed tensor, its indices and the indexed view of it."""
    x = call.ref("self")
    given = items(call.args.get(name)) or []
    every = given + [None] * (x.rank - len(given))
    if any(isinstance(v, Ref) and v.dtype in ("bool", "uint8") for v in every):
        raise RuleMismatch("boolean indices: the output's size depends on the data")
    indexed = [k for k, v in enumerate(every) if isinstance(v, Ref)]
    if not indexed:
        raise RuleMismatch("no indices")
    names = positional(x.rank)
    source: list[Label] = [None if k in indexed else v for k, v in enumerate(names)]
    rank = max(v.rank for v in every if isinstance(v, Ref))
    rows = [c for c in LETTERS if c not in names][:rank]
    indices: list[list[Label]] = [
        list(rows[rank - v.rank :]) for v in every if isinstance(v, Ref)
    ]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    kept = [v for v in source if v is not None]
    at = indexed[0] if adjacent else 0
    view: list[Label] = [*kept[:at], *rows, *kept[at:]]
    return source, indices, view


@rule("aten.index", "aten._unsafe_index")
def index(call: Call) -> Spec:
    source, indices, view = _index_labels(call, "indices")
    return space(call, OpKind.GATHER, {"self": source, "indices": indices}, [view])


@rule("aten.index_put", "aten.index_put_", "aten._unsafe_index_put")
def index_put(call: Call) -> Spec:
    masks = call.refs("indices")
    if any(m.dtype in ("bool", "uint8") for m in masks):
        tail = positional(call.ref("self").rank)
        k = masks[0].rank
        labels: list[Label] = [None] * k
        labels += tail[k:]
        return space(call, OpKind.GATHER, {"self": labels}, [labels])
    source, indices, view = _index_labels(call, "indices")
    values = call.ref("values")
    view = view[len(view) - values.rank :] if values.rank else []
    return space(
        call,
        OpKind.GATHER,
        {"self": source, "indices": indices, "values": view},
        [source],
    )


@rule("aten.index_select")
def index_select(call: Call) -> Spec:
    x = call.ref("self")
    axis = call.axis("dim", x.rank)
    labels = positional(x.rank)
    free = next(c for c in LETTERS if c not in labels)
    source: list[Label] = [None if k == axis else v for k, v in enumerate(labels)]
    output = [free if k == axis else v for k, v in enumerate(labels)]
    rows: list[Label] = [free] if call.ref("index").rank else []
    return space(call, OpKind.GATHER, {"self": source, "index": rows}, [output])


@rule("aten.gather", "aten.take_along_dim")
def gather(call: Call) -> Spec:
    x = call.ref("self")
    indices = call.ref("index" if call.has("index") else "indices")
    name = "index" if call.has("index") else "indices"
    axis = call.axis("dim", x.rank)
    labels = positional(x.rank)
    source: list[Label] = [
        None if k == axis or x.shape[k] != call.out[k] else v
        for k, v in enumerate(labels)
    ]
    return space(
        call,
        OpKind.GATHER,
        {"self": source, name: labels[: indices.rank]},
        [labels],
    )


@rule(
    "aten.scatter",
    "aten.scatter_",
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
)
def scatter(call: Call) -> Spec:
    x, index_ref = call.ref("self"), call.ref("index")
    axis = call.axis("dim", x.rank)
    labels: list[Label] = [
        None if k == axis or x.shape[k] != index_ref.shape[k] else v
        for k, v in enumerate(positional(x.rank))
    ]
    inputs: dict[str, Labels] = {"self": labels, "index": labels}
    if call.has("src") and call.ref("src").shape == index_ref.shape:
        inputs["src"] = labels
    return space(call, OpKind.GATHER, inputs, [labels])


@rule(
    "aten.index_add",
    "aten.index_add_",
    "aten.index_copy",
    "aten.index_copy_",
    "aten.index_fill",
    "aten.index_fill_",
    "aten.index_reduce",
)
def index_add(call: Call) -> Spec:
    x = call.ref("self")
    axis = call.axis("dim", x.rank)
    labels: list[Label] = [
        None if k == axis else v for k, v in enumerate(positional(x.rank))
    ]
    inputs: dict[str, Labels] = {"self": labels}
    if call.has("source"):
        inputs["source"] = labels
    return space(call, OpKind.GATHER, inputs, [labels])


@rule("aten.slice_scatter", "aten.select_scatter", "aten.masked_scatter")
def slice_scatter(call: Call) -> Spec:
    x = call.ref("self")
    labels: list[Label] = list(positional(x.rank))
    if "masked" in call.target:
        return whole(call, OpKind.GATHER)
    axis = call.axis("dim", x.rank)
    labels[axis] = None
    source = [v for k, v in enumerate(labels) if "slice" in call.target or k != axis]
    return space(call, OpKind.GATHER, {"self": labels, "src": source}, [labels])


@rule("aten.one_hot")
def one_hot(call: Call) -> Spec:
    rows = lead(len(call.out) - 1)
    return space(call, OpKind.POINTWISE, {"self": rows}, [[*rows, "c"]])


@rule(
    "aten.nonzero",
    "aten.masked_select",
    "aten.take",
    "aten.put",
    "aten.unique_consecutive",
    "aten._unique2",
    "torchvision.nms",
)
def data_dependent(call: Call) -> Spec:
    """The output depends on all of the data: every operand whole."""
    return whole(call, OpKind.GATHER)


def _reduction(call: Call) -> bool:
    """Whether a loss sums or averages (0: none, 1: mean, 2: sum)."""
    return call.int("reduction", 1) != 0


@rule(
    "aten.cross_entropy_loss",
    "aten.nll_loss",
    "aten.nll_loss_nd",
    "aten.nll_loss2d",
    "aten.nll_loss_forward",
)
def cross_entropy(call: Call) -> Spec:
    """input [n, c, ...] against target [n, ...] or class probabilities [n, c, ...]."""
    x, target = call.ref("self"), call.ref("target")
    rows = ["n", *(f"x{k}" for k in range(x.rank - 2))] if x.rank > 1 else []
    logits = [*rows[:1], "c", *rows[1:]]
    goal: list[str] = (
        logits if target.shape == x.shape and x.rank == target.rank else rows
    )
    if target.rank != len(goal):
        goal = rows
    gone = rows if _reduction(call) else []
    return space(
        call,
        OpKind.LOSS,
        {"self": logits, "target": goal, "weight": "c"},
        [[] if gone or not rows else rows],
        reduction=["c", *gone],
    )


@rule(
    "aten.mse_loss",
    "aten.l1_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
    "aten.kl_div",
    "aten.soft_margin_loss",
    "aten.gaussian_nll_loss",
    "aten.poisson_nll_loss",
    "aten.hinge_embedding_loss",
)
def elementwise_loss(call: Call) -> Spec:
    x = call.tensors[0]
    labels = positional(x.rank)
    inputs: dict[str, Labels] = {}
    for name, value in call.args.items():
        if isinstance(value, Ref) and value.rank <= x.rank:
            inputs[name] = labels[x.rank - value.rank :]
    gone = labels if not call.out else []
    return space(call, OpKind.LOSS, inputs, [[] if gone else labels], reduction=gone)


@rule(
    "aten.cosine_embedding_loss",
    "aten.triplet_margin_loss",
    "aten.margin_ranking_loss",
    "aten.multi_margin_loss",
    "aten.multilabel_margin_loss",
    "aten.ctc_loss",
    "aten._ctc_loss",
)
def whole_loss(call: Call) -> Spec:
    return whole(call, OpKind.LOSS)
