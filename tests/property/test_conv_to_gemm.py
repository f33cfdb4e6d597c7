"""Any convolution equals its im2col + GEMM form, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from passes.conv_to_gemm import CONV_TARGETS, conv_to_gemm


@dataclass(frozen=True)
class Geometry:
    transposed: bool
    groups: int
    ci: int
    co: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    mode: str
    bias: bool


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    rank = draw(st.integers(1, 3))
    transposed = draw(st.booleans())

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per_in = draw(st.integers(1, 3))  # 1: depthwise when groups > 1
    kernel, dilation, stride = sizes(1, 4), sizes(1, 3), sizes(1, 4)
    padding: tuple[int, ...] | str = sizes(0, 3)
    if not transposed and draw(st.integers(0, 4)) == 0:
        padding = draw(st.sampled_from(["same", "valid"]))
        stride = stride if padding == "valid" else (1,) * rank
    if transposed:
        output = tuple(
            draw(st.integers(0, max(s, d) - 1))
            for s, d in zip(stride, dilation, strict=True)
        )
        base = sizes(1, 6)
        full = [
            (i - 1) * s + d * (k - 1) + 1 + o
            for i, s, d, k, o in zip(
                base, stride, dilation, kernel, output, strict=True
            )
        ]
        assert not isinstance(padding, str)
        padding = tuple(
            min(p, (f - 1) // 2) for p, f in zip(padding, full, strict=True)
        )
        size = base
    else:
        output = (0,) * rank
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        size = tuple(n + draw(st.integers(0, 5)) for n in spans)
    modes = ["zeros"] * 3 + ["reflect", "replicate", "circular"]
    mode = "zeros" if transposed else draw(st.sampled_from(modes))
    if mode != "zeros" and not isinstance(padding, str):
        padding = tuple(min(p, s - 1) for p, s in zip(padding, size, strict=True))
    if mode != "zeros" and padding == "same":
        size = tuple(s + 8 for s in size)  # reflect needs padding < size
    return Geometry(
        transposed=transposed,
        groups=groups,
        ci=groups * per_in,
        co=groups * draw(st.integers(1, 3)),
        size=size,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output,
        mode=mode,
        bias=draw(st.booleans()),
    )


def build(g: Geometry) -> nn.Module:
    name = f"Conv{'Transpose' if g.transposed else ''}{len(g.size)}d"
    extra = {"output_padding": g.output_padding} if g.transposed else {}
    return getattr(nn, name)(
        g.ci,
        g.co,
        g.kernel,
        g.stride,
        g.padding,
        dilation=g.dilation,
        groups=g.groups,
        bias=g.bias,
        padding_mode=g.mode,
        **extra,
    )


def run(module, conv, x, seed):
    """Output and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x)
    torch.manual_seed(seed)
    grads = torch.autograd.grad(y, [x, *conv.parameters()], torch.randn_like(y))
    return [t.detach() for t in (y, *grads)]


def layout(t: torch.Tensor) -> list[int]:
    """Strides of the dims where they mean something."""
    return [st for st, size in zip(t.stride(), t.shape, strict=True) if size > 1]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(g=geometries(), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_geometry(g: Geometry, batch: int, seed: int) -> None:
    torch.manual_seed(seed)
    conv = build(g)
    x = torch.randn(batch, g.ci, *g.size)
    exported = torch.export.export(conv, (x,)).module()
    rewritten = conv_to_gemm(exported)
    assert any(n.target in CONV_TARGETS for n in exported.graph.nodes)
    assert not any(n.target in CONV_TARGETS for n in rewritten.graph.nodes)
    want, got = run(conv, conv, x, seed), run(rewritten, rewritten, x, seed)
    assert len(want) == len(got)
    assert layout(want[0]) == layout(got[0])
    for a, b in zip(want, got, strict=True):
        bound = 1e-5 * max(1.0, float(a.abs().max()))
        assert float((a - b).abs().max()) <= bound
    info = next(n.meta["conv"] for n in rewritten.graph.nodes if "conv" in n.meta)
    assert info.out_size == tuple(want[0].shape[2:])
    assert conv_to_gemm(rewritten).code == rewritten.code
