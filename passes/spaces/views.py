"""Views and the copies that rearrange whole axes.

A reshape keeps the factors of merged and split axes as loop dims, so that a shard on
the outer factor stays a shard; an axis that can not be factored is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from passes.ir import Axis, OpKind
from passes.spaces.registry import (
    LETTERS,
    WHOLE,
    Call,
    Label,
    RuleMismatch,
    Shape,
    Spec,
    positional,
    rule,
    space,
)


def factor(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[tuple[int, ...] | None], list[tuple[int, ...] | None], list[int]]:
    """Common factors of two shapes of equal volume, outer to inner.

    Returns, per axis of each, the indices of its factors (None: whole), and the
    factors' sizes. Axes of size 1 have no factors.
    """
    left: list[list[int] | None] = [[] for _ in source]
    right: list[list[int] | None] = [[] for _ in target]
    sizes: list[int] = []
    i = j = 0
    a = b = 1  # what is left of the current axes
    while True:
        while a == 1 and i < len(source):
            a, i = source[i], i + 1
        while b == 1 and j < len(target):
            b, j = target[j], j + 1
        if a == 1 or b == 1:
            break
        size = a if b % a == 0 else b if a % b == 0 else 0
        if size:
            for axes, at in ((left, i - 1), (right, j - 1)):
                found = axes[at]
                if found is not None:
                    found.append(len(sizes))
            sizes.append(size)
            a, b = a // size, b // size
            continue
        # no common factor: both axes whole, up to the next common boundary
        left[i - 1] = right[j - 1] = None
        done_a, done_b = a, b
        while done_a != done_b:
            if done_a < done_b and i < len(source):
                left[i], done_a, i = None, done_a * source[i], i + 1
            elif done_b < done_a and j < len(target):
                right[j], done_b, j = None, done_b * target[j], j + 1
            else:
                break
        a = b = 1
    return (
        [None if x is None else tuple(x) for x in left],
        [None if x is None else tuple(x) for x in right],
        sizes,
    )


def reshape_spec(call: Call, source: Shape, target: Shape) -> Spec:
    """The space of a reshape, given the factors that the source's axes already have."""
    known = call.factors[0] if call.factors else tuple((n,) for n in source)
    expanded = [f for axis in known for f in axis]
    left, right, sizes = factor(expanded, target)
    names = [LETTERS[k] if k < 26 else f"d{k}" for k in range(len(sizes))]
    labels_in: list[Label] = []
    at = 0
    for axis in known:
        pieces = left[at : at + len(axis)]
        at += len(axis)
        if any(p is None for p in pieces):
            labels_in.append(None)
        else:
            labels_in.append(tuple(names[k] for p in pieces if p for k in p))
    labels_out: list[Label] = [
        None if p is None else tuple(names[k] for k in p) for p in right
    ]
    for labels, shape in ((labels_in, source), (labels_out, target)):
        for k, size in enumerate(shape):
            if labels[k] == () and size != 1:
                labels[k] = None
    # a factor that only one side keeps is of no use
    ins = {n for x in labels_in if isinstance(x, tuple) for n in x}
    outs = {n for x in labels_out if isinstance(x, tuple) for n in x}
    both = ins & outs

    def keep(label: Label) -> Label:
        return label if isinstance(label, tuple) and set(label) <= both else None

    while True:
        new_in = [keep(x) for x in labels_in]
        new_out = [keep(x) for x in labels_out]
        ins = {n for x in new_in if isinstance(x, tuple) for n in x}
        outs = {n for x in new_out if isinstance(x, tuple) for n in x}
        if ins & outs == both:
            break
        both = ins & outs
    return space(
        call,
        OpKind.VIEW,
        {next(iter(call.args)): new_in},
        [new_out],
        sizes=dict(zip(names, sizes, strict=True)),
        only_named=True,
    )


@rule(
    "aten.view",
    "aten.reshape",
    "aten._unsafe_view",
    "aten.flatten",
    "aten.unflatten",
    "aten.squeeze",
    "aten.squeeze_",
    "aten.unsqueeze",
    "aten.unsqueeze_",
    "aten.ravel",
    "aten.view_as",
    "aten.reshape_as",
    "aten.atleast_1d",
    "aten.atleast_2d",
    "aten.view_copy",
    "aten._reshape_copy",
)
def reshape(call: Call) -> Spec:
    source = call.tensors[0].shape
    if prod(source) != prod(call.out):
        raise RuleMismatch("a view that changes the dtype's size")
    spec = reshape_spec(call, source, call.out)
    if "reshape" in call.target and "copy" in call.target:
        spec.kind = OpKind.COPY
    return spec


def permuted(call: Call, order: Sequence[int], kind: OpKind = OpKind.VIEW) -> Spec:
    labels = positional(len(order))
    return space(
        call,
        kind,
        {next(iter(call.args)): list(labels)},
        [[labels[i] for i in order]],
    )


@rule("aten.transpose", "aten.transpose_", "aten.swapaxes", "aten.swapdims")
def transpose(call: Call) -> Spec:
    rank = len(call.out)
    names = list(call.args)
    a, b = call.axis(names[1], rank), call.axis(names[2], rank)
    order = list(range(rank))
    if rank:
        order[a], order[b] = b, a
    return permuted(call, order)


@rule("aten.t", "aten.t_", "aten.numpy_T", "aten.mT", "aten.adjoint", "aten.mH")
def matrix_transpose(call: Call) -> Spec:
    rank = len(call.out)
    order = list(range(rank))
    if rank > 1:
        order[-2:] = [rank - 1, rank - 2]
    return permuted(call, order)


@rule("aten.permute", "aten.movedim", "aten.moveaxis", "aten.permute_copy")
def permute(call: Call) -> Spec:
    rank = len(call.out)
    if "permute" in call.target:
        return permuted(call, [d % rank for d in call.ints("dims")])
    origin = [d % rank for d in call.ints("source")]
    places = [d % rank for d in call.ints("destination")]
    order = [-1] * rank
    for a, b in zip(origin, places, strict=True):
        order[b] = a
    rest = iter(i for i in range(rank) if i not in origin)
    return permuted(call, [next(rest) if o < 0 else o for o in order])


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.expand_copy")
def expand(call: Call) -> Spec:
    labels = positional(len(call.out))
    rank = call.tensors[0].rank
    source = labels[len(labels) - rank :]
    return space(
        call,
        OpKind.VIEW,
        {next(iter(call.args)): source},
        [labels],
        only_named=True,
    )


@rule("aten.broadcast_tensors")
def broadcast_tensors(call: Call) -> Spec:
    labels = positional(len(call.out))
    inputs = [labels[len(labels) - r.rank :] for r in call.refs("tensors")]
    return space(call, OpKind.VIEW, {"tensors": inputs}, [labels] * len(call.outputs))


@rule("aten.repeat", "aten.tile")
def repeat(call: Call) -> Spec:
    source, out = call.tensors[0].shape, call.out
    labels = positional(len(out))
    offset = len(out) - len(source)
    extra = [x for x in LETTERS if x not in labels]
    output: list[Label] = []
    sizes: dict[str, int] = {}
    for k, size in enumerate(out):
        inner = source[k - offset] if k >= offset else 1
        if inner in (1, size):
            output.append(labels[k])
            continue
        sizes[extra[k]], sizes[labels[k]] = size // inner, inner
        output.append((extra[k], labels[k]))
    return space(
        call,
        OpKind.COPY,
        {next(iter(call.args)): labels[offset:]},
        [output],
        sizes=sizes,
    )


@rule("aten.repeat_interleave")
def repeat_interleave(call: Call) -> Spec:
    x = call.tensors[0]
    dim = call.args.get("dim")
    if not isinstance(dim, int) or call.has("repeats"):
        raise RuleMismatch("repeat_interleave without dim or with tensor repeats")
    axis = dim % x.rank
    labels = positional(x.rank)
    times = call.out[axis] // max(1, x.shape[axis])
    free = next(c for c in LETTERS if c not in labels)
    output: list[Label] = list(labels)
    output[axis] = (labels[axis], free)
    return space(
        call,
        OpKind.COPY,
        {"self": list(labels)},
        [output],
        sizes={free: times, labels[axis]: x.shape[axis]},
    )


def split_axes(label: str, parts: Shape) -> tuple[Axis, list[Axis], dict[str, int]]:
    """An axis in ``parts``: the joined axis, one axis per part, and the dim sizes.

    The dim ``label`` has the parts' greatest common divisor, so that a shard takes its
    share of each; ``label + "r"`` runs inside. Without a common divisor all are whole.
    """
    unit = gcd(*parts)
    if unit == 1 or len(parts) == 1:
        return WHOLE, [WHOLE] * len(parts), {}
    sizes = {label: unit}
    inner = f"{label}r"
    sizes[inner] = sum(parts) // unit
    each: list[Axis] = []
    for k, part in enumerate(parts):
        if part == unit:
            each.append(Axis((label,)))
        else:
            sizes[f"{label}{k}"] = part // unit
            each.append(Axis((label, f"{label}{k}")))
    return Axis((label, inner), parts=parts), each, sizes


@rule(
    "aten.split",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.tensor_split",
    "aten.unsafe_chunk",
    "aten.unsafe_split",
    "aten.unsafe_split_with_sizes",
    "aten.split_copy",
)
def split(call: Call) -> Spec:
    x = call.tensors[0]
    axis = call.axis("dim", x.rank)
    labels = positional(x.rank)
    parts = tuple(shape[axis] for shape in call.outputs)
    if sum(parts) != x.shape[axis]:
        raise RuleMismatch(f"parts {parts} of an axis of {x.shape[axis]}")
    if len(parts) == 1:
        return space(call, OpKind.VIEW, {"self": list(labels)}, [list(labels)])
    joined, each, sizes = split_axes(labels[axis], parts)

    def put(item: Label) -> list[Label]:
        return [item if k == axis else x for k, x in enumerate(labels)]

    return space(
        call,
        OpKind.VIEW,
        {next(iter(call.args)): put(joined)},
        [put(a) for a in each],
        sizes=sizes,
    )


@rule("aten.slice", "aten.narrow", "aten.slice_copy")
def slice_op(call: Call) -> Spec:
    """Part of an axis. With siblings that tile the axis it is a split."""
    x = call.tensors[0]
    axis = call.axis("dim", x.rank)
    labels: list[Label] = list(positional(x.rank))
    if call.out[axis] == x.shape[axis]:
        return space(call, OpKind.VIEW, {"self": labels}, [labels])
    name = str(labels[axis])
    if call.slices:
        joined, each, sizes = split_axes(name, call.slices)
        mine = each[call.slices.index(call.out[axis])]
        source, output = list(labels), list(labels)
        source[axis], output[axis] = joined, mine
        live = {*joined.dims, *mine.dims}
        sizes = {d: n for d, n in sizes.items() if d in live}
        return space(call, OpKind.VIEW, {"self": source}, [output], sizes=sizes)
    source = list(labels)
    source[axis] = None
    return space(call, OpKind.VIEW, {"self": source}, [labels])


@rule("aten.select", "aten.select_copy")
def select(call: Call) -> Spec:
    x = call.tensors[0]
    axis = call.axis("dim", x.rank)
    labels = positional(x.rank)
    source: list[Label] = [None if k == axis else v for k, v in enumerate(labels)]
    output = [v for k, v in enumerate(labels) if k != axis]
    return space(call, OpKind.VIEW, {"self": source}, [output])


@rule("aten.unbind", "aten.unsafe_unbind")
def unbind(call: Call) -> Spec:
    x = call.tensors[0]
    axis = call.axis("dim", x.rank)
    labels = positional(x.rank)
    source: list[Label] = [None if k == axis else v for k, v in enumerate(labels)]
    output = [v for k, v in enumerate(labels) if k != axis]
    return space(call, OpKind.VIEW, {"self": source}, [output] * len(call.outputs))


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(call: Call) -> Spec:
    refs = call.refs("tensors")
    rank = len(call.out)
    axis = call.axis("dim", rank)
    labels = positional(rank)
    real = [r for r in refs if r.rank == rank]  # legacy: empty 1-d tensors
    parts = tuple(r.shape[axis] for r in real)
    joined, each, sizes = split_axes(labels[axis], parts)
    if joined == WHOLE and len(parts) == 1:
        joined, each = Axis((labels[axis],)), [Axis((labels[axis],))]
        sizes = {labels[axis]: parts[0]}

    def put(item: Label) -> list[Label]:
        return [item if k == axis else x for k, x in enumerate(labels)]

    pieces = iter(each)
    inputs = [put(next(pieces)) if r in real else [None] * r.rank for r in refs]
    output = put(labels[axis] if joined == WHOLE else joined)
    return space(call, OpKind.COPY, {"tensors": inputs}, [output], sizes=sizes)


@rule("aten.stack", "aten.hstack", "aten.vstack")
def stack(call: Call) -> Spec:
    refs = call.refs("tensors")
    rank = len(call.out)
    if not call.target.startswith("aten.stack"):
        raise RuleMismatch("hstack and vstack have no map")
    axis = call.axis("dim", rank)
    labels = positional(rank)
    source = [v for k, v in enumerate(labels) if k != axis]
    output: list[Label] = [None if k == axis else v for k, v in enumerate(labels)]
    return space(call, OpKind.COPY, {"tensors": [source] * len(refs)}, [output])


@rule("aten.meshgrid")
def meshgrid(call: Call) -> Spec:
    refs = call.refs("tensors")
    labels = positional(len(refs))
    order = list(labels)
    if call.args.get("indexing") == "xy" and len(order) > 1:
        order[0], order[1] = order[1], order[0]
    inputs = [[labels[k]] if r.rank else [] for k, r in enumerate(refs)]
    return space(call, OpKind.VIEW, {"tensors": inputs}, [order] * len(call.outputs))


@rule("aten.flip", "aten.roll", "aten.rot90", "aten.flipud", "aten.fliplr")
def roll(call: Call) -> Spec:
    """The moved axes are whole on input and output alike."""
    rank = len(call.out)
    if "rot90" in call.target:
        raise RuleMismatch("rot90 has no map")
    axes = {d % rank for d in call.ints("dims")}
    if not axes:
        axes = set(range(rank))
    labels: list[Label] = [
        None if k in axes else v for k, v in enumerate(positional(rank))
    ]
    return space(call, OpKind.COPY, {"self": labels}, [labels])


@rule(
    "aten.pad",
    "aten.constant_pad_nd",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.reflection_pad3d",
    "aten.replication_pad1d",
    "aten.replication_pad2d",
    "aten.replication_pad3d",
    "aten._pad_circular",
)
def pad(call: Call) -> Spec:
    source = call.tensors[0].shape
    labels: list[Label] = list(positional(len(source)))
    for k, (a, b) in enumerate(zip(source, call.out, strict=True)):
        if a != b:
            labels[k] = None
    return space(call, OpKind.COPY, {next(iter(call.args)): labels}, [labels])


@rule("aten.diagonal", "aten.diag_embed", "aten.as_strided")
def strided(call: Call) -> Spec:
    """Views of the leading axes that keep their size; the rest is whole."""
    x = call.tensors[0]
    if "as_strided" in call.target:
        raise RuleMismatch("as_strided has no map")
    labels = positional(max(x.rank, len(call.out)))
    small = min(x.rank, len(call.out)) - 1
    axes = {call.int("dim1", 0) % x.rank, call.int("dim2", 1) % x.rank}
    if "diagonal" in call.target:
        if axes != {x.rank - 2, x.rank - 1}:
            raise RuleMismatch("diagonal of inner axes")
        small = x.rank - 2
    source: list[Label] = [v if k < small else None for k, v in enumerate(labels)]
    return space(
        call,
        OpKind.VIEW,
        {"self": source[: x.rank]},
        [source[: len(call.out)]],
    )


@rule("aten.unfold", "aten.unfold_copy")
def unfold(call: Call) -> Spec:
    """Windows along one axis, which becomes whole."""
    x = call.tensors[0]
    axis = call.axis("dimension", x.rank)
    labels = positional(x.rank)
    source: list[Label] = [None if k == axis else v for k, v in enumerate(labels)]
    return space(call, OpKind.VIEW, {"self": source}, [[*source, None]])


@rule("aten.unfold_backward")
def unfold_backward(call: Call) -> Spec:
    """Sums windows back into one axis (col2im along it), which stays whole."""
    rank = len(call.out)
    axis = call.axis("dim", rank)
    labels: list[Label] = list(positional(rank))
    labels[axis] = None
    return space(call, OpKind.IM2COL, {"grad_in": [*labels, None]}, [labels])


@rule("aten.pixel_shuffle")
def pixel_shuffle(call: Call) -> Spec:
    return _pixels(call, call.tensors[0].shape, call.out, False)


@rule("aten.pixel_unshuffle")
def pixel_unshuffle(call: Call) -> Spec:
    return _pixels(call, call.out, call.tensors[0].shape, True)


def _pixels(call: Call, deep: Shape, wide: Shape, swap: bool) -> Spec:
    lead_names = [f"b{k}" for k in range(len(deep) - 3)]
    r = wide[-1] // deep[-1]
    sizes = {"c": wide[-3], "i": r, "j": r, "y": deep[-2], "x": deep[-1]}
    a: list[Label] = [*lead_names, ("c", "i", "j"), "y", "x"]
    b: list[Label] = [*lead_names, "c", ("y", "i"), ("x", "j")]
    source, output = (b, a) if swap else (a, b)
    return space(call, OpKind.COPY, {"self": source}, [output], sizes=sizes)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(call: Call) -> Spec:
    shape = call.tensors[0].shape
    groups = call.int("groups", 1)
    rest: list[Label] = [f"x{k}" for k in range(len(shape) - 2)]
    sizes = {"g": groups, "c": shape[1] // groups}
    return space(
        call,
        OpKind.COPY,
        {"self": ["n", ("g", "c"), *rest]},
        [["n", ("c", "g"), *rest]],
        sizes=sizes,
    )
