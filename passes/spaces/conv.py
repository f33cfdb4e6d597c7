"""Convolutions: an implicit product over input channels and kernel positions."""

from __future__ import annotations

from passes.ir import Axis, OpKind
from passes.spaces.registry import (
    Call,
    Label,
    RuleMismatch,
    Spec,
    positional,
    rule,
    space,
)

SPATIAL = "xyz"
KERNEL = "ijl"


def convolution(
    call: Call,
    rank: int,
    transposed: bool,
    groups: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Spec:
    """Dims n, g (groups), o and c (channels a group), positions and kernel.

    x is [n, (g c), in...]; the weight [(g o), c, k...], or [(g c), o, k...] when
    transposed. The positions are the output's, or the input's when transposed; the
    other side's axes are windows over position and kernel.
    """
    x, w = call.ref("input"), call.ref("weight")
    batched = x.rank == rank + 2
    xs, ws, ys = x.shape[x.rank - rank :], w.shape[2:], call.out[-rank:]
    positions = xs if transposed else ys
    windows = ys if transposed else xs
    ci, co = x.shape[-rank - 1], call.out[-rank - 1]
    sizes = {"g": groups, "o": co // groups, "c": ci // groups}
    places: list[Label] = list(SPATIAL[:rank])
    kernel: list[Label] = list(KERNEL[:rank])
    sizes |= dict(zip(SPATIAL, positions, strict=False))
    sizes |= dict(zip(KERNEL, ws, strict=False))
    seen: list[Label] = []
    for k in range(rank):
        plain = (
            ws[k] == 1
            and stride[k] == 1
            and padding[k] == 0
            and windows[k] == positions[k]
        )
        names = tuple(d for d in (SPATIAL[k], KERNEL[k]) if sizes[d] > 1)
        seen.append(SPATIAL[k] if plain else Axis(names, window=True))
    inside, outside = (places, seen) if transposed else (seen, places)
    head: list[Label] = ["n"] if batched else []
    weight: list[Label] = [("g", "c"), "o"] if transposed else [("g", "o"), "c"]
    return space(
        call,
        OpKind.CONV,
        {
            "input": [*head, ("g", "c"), *inside],
            "weight": [*weight, *kernel],
            "bias": [("g", "o")],
        },
        [[*head, ("g", "o"), *outside]],
        reduction=["c", *KERNEL],
        sizes=sizes,
        attrs={
            "groups": groups,
            "transposed": transposed,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
        },
    )


def _plain(call: Call, rank: int, transposed: bool) -> Spec:
    kernel = call.ref("weight").shape[2:]
    dilation = call.ints("dilation", rank)
    value = call.args.get("padding")
    if isinstance(value, str):
        padding = (
            tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
            if value == "same"
            else (0,) * rank
        )
    else:
        padding = call.ints("padding", rank)
    return convolution(
        call,
        rank,
        transposed,
        call.int("groups", 1),
        call.ints("stride", rank),
        padding,
        dilation,
    )


@rule("aten.conv1d")
def conv1d(call: Call) -> Spec:
    return _plain(call, 1, False)


@rule("aten.conv2d")
def conv2d(call: Call) -> Spec:
    return _plain(call, 2, False)


@rule("aten.conv3d")
def conv3d(call: Call) -> Spec:
    return _plain(call, 3, False)


@rule("aten.conv_transpose1d")
def conv_transpose1d(call: Call) -> Spec:
    return _plain(call, 1, True)


@rule("aten.conv_transpose2d")
def conv_transpose2d(call: Call) -> Spec:
    return _plain(call, 2, True)


@rule("aten.conv_transpose3d")
def conv_transpose3d(call: Call) -> Spec:
    return _plain(call, 3, True)


@rule("aten.convolution", "aten._convolution", "aten.cudnn_convolution")
def general(call: Call) -> Spec:
    rank = call.ref("weight").rank - 2
    return _plain(call, rank, bool(call.args.get("transposed", False)))


@rule("aten.im2col")
def im2col(call: Call) -> Spec:
    """[n, c, in...] -> [n, c x kernel, positions]: patches, written out."""
    return _patches(call, OpKind.IM2COL, call.ints("kernel_size", 2))


def _patches(call: Call, kind: OpKind, kernel: tuple[int, ...]) -> Spec:
    x = call.tensors[0]
    channels = x.shape[-3]
    head: list[Label] = ["n"] if x.rank == 4 else []
    window = kernel[0] * kernel[1]
    return space(
        call,
        kind,
        {"self": [*head, "c", None, None]},
        [[*head, ("c", "k"), "p"]],
        sizes={"c": channels, "k": window},
    )


@rule("aten.col2im")
def col2im(call: Call) -> Spec:
    """Sums overlapping patches back: the inverse map of im2col."""
    x = call.tensors[0]
    kernel = call.ints("kernel_size", 2)
    window = kernel[0] * kernel[1]
    head: list[Label] = ["n"] if x.rank == 3 else []
    return space(
        call,
        OpKind.IM2COL,
        {"self": [*head, ("c", "k"), None]},
        [[*head, "c", None, None]],
        sizes={"c": x.shape[-2] // window, "k": window},
        coupled=["k"],
    )


def _windowed(call: Call, rank: int, kind: OpKind) -> Spec:
    """Channel-wise ops over spatial windows: positions are whole on the input."""
    x = call.tensors[0]
    head = positional(x.rank)[: x.rank - rank]
    labels: list[Label] = [*head, *([None] * rank)]
    for k in range(rank):
        axis = x.rank - rank + k
        if x.shape[axis] == 1 or call.out[axis] == 1:
            continue
    return space(
        call,
        kind,
        {next(iter(call.args)): labels},
        [labels] * len(call.outputs),
    )


@rule(
    "aten.max_pool1d",
    "aten.avg_pool1d",
    "aten.adaptive_avg_pool1d",
    "aten.adaptive_max_pool1d",
    "aten.max_pool1d_with_indices",
)
def pool1d(call: Call) -> Spec:
    return _windowed(call, 1, OpKind.POOL)


@rule(
    "aten.max_pool2d",
    "aten.avg_pool2d",
    "aten.adaptive_avg_pool2d",
    "aten._adaptive_avg_pool2d",
    "aten.adaptive_max_pool2d",
    "aten.max_pool2d_with_indices",
    "aten.fractional_max_pool2d",
    "aten.lp_pool2d",
)
def pool2d(call: Call) -> Spec:
    return _windowed(call, 2, OpKind.POOL)


@rule(
    "aten.max_pool3d",
    "aten.avg_pool3d",
    "aten.adaptive_avg_pool3d",
    "aten._adaptive_avg_pool3d",
    "aten.adaptive_max_pool3d",
    "aten.max_pool3d_with_indices",
)
def pool3d(call: Call) -> Spec:
    return _windowed(call, 3, OpKind.POOL)


@rule(
    "aten.upsample_nearest1d",
    "aten.upsample_linear1d",
    "aten._upsample_nearest_exact1d",
)
def upsample1d(call: Call) -> Spec:
    return _windowed(call, 1, OpKind.POOL)


@rule(
    "aten.upsample_nearest2d",
    "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d",
    "aten._upsample_nearest_exact2d",
    "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa",
)
def upsample2d(call: Call) -> Spec:
    return _windowed(call, 2, OpKind.POOL)


@rule(
    "aten.upsample_nearest3d",
    "aten.upsample_trilinear3d",
    "aten._upsample_nearest_exact3d",
)
def upsample3d(call: Call) -> Spec:
    return _windowed(call, 3, OpKind.POOL)


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(call: Call) -> Spec:
    """[n, c, in...] at [n, out..., 2 or 3] -> [n, c, out...]."""
    rank = call.tensors[0].rank - 2
    places: list[Label] = list(SPATIAL[:rank])
    return space(
        call,
        OpKind.GATHER,
        {"input": ["n", "c", *([None] * rank)], "grid": ["n", *places, None]},
        [["n", "c", *places]],
    )


@rule("aten.affine_grid_generator")
def affine_grid(call: Call) -> Spec:
    places: list[Label] = list(SPATIAL[: len(call.out) - 2])
    return space(
        call,
        OpKind.POINTWISE,
        {"theta": ["n", None, None]},
        [["n", *places, None]],
    )


@rule("torchvision.roi_align", "torchvision.deform_conv2d")
def roi_align(call: Call) -> Spec:
    if "roi_align" not in call.target:
        raise RuleMismatch("deformable convolution has no map")
    return space(
        call,
        OpKind.GATHER,
        {"input": [None, "c", None, None], "rois": ["r", None]},
        [["r", "c", None, None]],
    )
