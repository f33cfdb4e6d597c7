"""A convolution node read into plain numbers: geometry, GEMM and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import fx

from passes._compat import StrEnum

aten = torch.ops.aten


class ConvRole(StrEnum):
    """What a rewritten node does; stored in ``node.meta["conv_role"]``."""

    PAD = "pad"  # zero padding, or the crop of a transposed convolution
    PATCHES = "patches"  # overlapping views of the input (no bytes move)
    COLUMNS = "columns"  # reshape between patches and the GEMM operand
    WEIGHT = "weight"  # weight laid out as the other GEMM operand
    GEMM = "gemm"
    FOLD = "fold"  # col2im: overlapping patches are summed
    BIAS = "bias"
    LAYOUT = "layout"  # back to [N, C, spatial..]


@dataclass(frozen=True, slots=True)
class ConvInfo:
    """One convolution: its geometry (one entry per spatial dim) and its GEMM.

    ``padding`` and ``padding_end`` are zeros added before and after (equal unless
    ``padding="same"`` asks for an odd total). ``batch`` is the traced batch.
    """

    name: str  # the node that was rewritten
    target: str
    transposed: bool
    bias: bool
    batch: int
    ci: int
    co: int
    groups: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    padding_end: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]

    @property
    def m(self) -> int:
        """GEMM rows: positions of all samples (input ones when transposed)."""
        return self.batch * prod(self.in_size if self.transposed else self.out_size)

    @property
    def n(self) -> int:
        """GEMM columns of one group."""
        return self.co // self.groups * (prod(self.kernel) if self.transposed else 1)

    @property
    def k(self) -> int:
        """Contracted length of one group."""
        return self.ci // self.groups * (1 if self.transposed else prod(self.kernel))

    @property
    def flops(self) -> int:
        """Forward FLOPs, all groups: ``2 m n k groups``."""
        return 2 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class ConvCall:
    """Arguments of any convolution overload in one form."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    padding_end: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


_FORWARD = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}
_TRANSPOSED = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}
_GENERAL = {aten.convolution.default, aten._convolution.default}
CONV_TARGETS = frozenset([*_FORWARD, *_TRANSPOSED, *_GENERAL])


def _fit(value: object, rank: int) -> tuple[int, ...]:
    """An int, or a list of 1 or ``rank`` ints, as ``rank`` ints."""
    items = [value] if isinstance(value, int) else list(cast(Sequence[int], value))
    return tuple(items * rank if len(items) == 1 else items)


def call_of(node: fx.Node) -> ConvCall:
    """Read a convolution node of any overload."""
    target = cast(Any, node.target)
    names = [a.name for a in target._schema.arguments]
    given: dict[str, Any] = {
        a.name: a.default_value
        for a in target._schema.arguments
        if a.has_default_value()
    }
    given.update(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    weight: fx.Node = given["weight"]
    rank = weight.meta["val"].dim() - 2
    stride = _fit(given["stride"], rank)
    dilation = _fit(given["dilation"], rank)
    kernel = tuple(int(s) for s in weight.meta["val"].shape[2:])
    padding = given["padding"]
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        start = tuple(t // 2 for t in total)
        end = tuple(t - t // 2 for t in total)
    else:
        start = end = _fit(0 if padding == "valid" else padding, rank)
    return ConvCall(
        x=given["input"],
        weight=weight,
        bias=given.get("bias"),
        stride=stride,
        padding=start,
        padding_end=end,
        dilation=dilation,
        transposed=given.get("transposed", node.target in _TRANSPOSED),
        output_padding=_fit(given.get("output_padding", 0), rank),
        groups=given["groups"],
    )


def _hint(size: Any) -> int:
    """The traced value of a size that may be symbolic."""
    return size if isinstance(size, int) else int(size.node.hint)


def info_of(node: fx.Node, call: ConvCall) -> ConvInfo:
    x, w = call.x.meta["val"].shape, call.weight.meta["val"].shape
    rank = len(w) - 2
    out = node.meta["val"].shape
    return ConvInfo(
        name=node.name,
        target=str(node.target),
        transposed=call.transposed,
        bias=call.bias is not None,
        batch=_hint(x[0]) if len(x) == rank + 2 else 1,
        ci=_hint(x[-rank - 1]),
        co=_hint(out[-rank - 1]),
        groups=call.groups,
        in_size=tuple(_hint(s) for s in x[-rank:]),
        out_size=tuple(_hint(s) for s in out[-rank:]),
        kernel=tuple(_hint(s) for s in w[2:]),
        stride=call.stride,
        padding=call.padding,
        padding_end=call.padding_end,
        dilation=call.dilation,
        output_padding=call.output_padding,
    )
