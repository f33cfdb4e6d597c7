"""Iteration-space rules, checked against what the ops compute and as text."""

from __future__ import annotations

# pyright: reportArgumentType=false
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.format import format_space
from passes.ir import DimKind, OpKind
from passes.lower import lower
from passes.spaces import RULES, rule
from passes.spaces.registry import Call, Spec
from passes.spaces.views import factor
from tests.unit.passes.space_oracle import check_all, traced_call


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "linear": (nn.Linear(6, 8), (rand(2, 4, 6),)),
    "linear_2d": (nn.Linear(6, 8, bias=False), (rand(4, 6),)),
    "matmul": (torch.matmul, (rand(2, 4, 6, 8), rand(2, 4, 8, 10))),
    "matmul_broadcast": (torch.matmul, (rand(2, 4, 6, 8), rand(8, 10))),
    "matmul_batch_broadcast": (torch.matmul, (rand(2, 1, 6, 8), rand(4, 8, 10))),
    "matmul_vector": (torch.matmul, (rand(2, 6, 8), rand(8))),
    "mm": (torch.mm, (rand(4, 6), rand(6, 8))),
    "bmm": (torch.bmm, (rand(2, 4, 6), rand(2, 6, 8))),
    "addmm": (torch.addmm, (rand(4, 8), rand(4, 6), rand(6, 8))),
    "baddbmm": (torch.baddbmm, (rand(2, 4, 8), rand(2, 4, 6), rand(2, 6, 8))),
    "einsum": (
        lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b),
        (rand(2, 4, 6, 8), rand(2, 10, 6, 8)),
    ),
    "einsum_dots": (
        lambda a, b: torch.einsum("...i,ij->...j", a, b),
        (rand(2, 4, 6), rand(6, 8)),
    ),
    "einsum_outer": (
        lambda a, b: torch.einsum("bi,j->bij", a, b),
        (rand(2, 6), rand(4)),
    ),
    "conv1d": (nn.Conv1d(4, 6, 3), (rand(2, 4, 10),)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1), (rand(2, 4, 6, 6),)),
    "conv2d_pointwise": (nn.Conv2d(4, 6, 1), (rand(2, 4, 6, 6),)),
    "conv2d_groups": (nn.Conv2d(8, 16, 3, groups=2), (rand(2, 8, 6, 6),)),
    "conv2d_depthwise": (nn.Conv2d(8, 8, 3, groups=8), (rand(2, 8, 6, 6),)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 2, stride=2), (rand(2, 4, 6, 6),)),
    "conv_transpose2d_groups": (
        nn.ConvTranspose2d(8, 4, 3, groups=2),
        (rand(2, 8, 6, 6),),
    ),
    "conv3d": (nn.Conv3d(2, 4, 2), (rand(2, 2, 4, 4, 4),)),
    "add_broadcast": (lambda a, b: a + b, (rand(2, 4, 6), rand(4, 1))),
    "where": (lambda a, b: torch.where(a > 0, a, b), (rand(2, 4), rand(4))),
    "masked_fill": (lambda a, m: a.masked_fill(m > 0, 0.0), (rand(2, 4, 6), rand(6))),
    "gelu": (F.gelu, (rand(2, 4),)),
    "glu": (F.glu, (rand(2, 4, 8),)),
    "prelu": (nn.PReLU(4), (rand(2, 4, 6),)),
    "softmax": (lambda x: x.softmax(-1), (rand(2, 4, 6),)),
    "log_softmax": (lambda x: x.log_softmax(1), (rand(2, 4, 6),)),
    "layer_norm": (nn.LayerNorm(6), (rand(2, 4, 6),)),
    "layer_norm_2d": (nn.LayerNorm((4, 6)), (rand(2, 8, 4, 6),)),
    "rms_norm": (nn.RMSNorm(6), (rand(2, 4, 6),)),
    "batch_norm": (nn.BatchNorm2d(4), (rand(2, 4, 6, 6),)),
    "batch_norm_eval": (nn.BatchNorm2d(4).eval(), (rand(2, 4, 6, 6),)),
    "group_norm": (nn.GroupNorm(2, 8), (rand(2, 8, 4, 4),)),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), (rand(2, 4, 6, 6),)),
    "embedding": (nn.Embedding(8, 6), (ids(8, 2, 4),)),
    "cross_entropy_none": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        (rand(4, 6, 2), ids(6, 4, 2)),
    ),
    "mse_none": (
        lambda a, b: F.mse_loss(a, b, reduction="none"),
        (rand(4, 6), rand(4, 6)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (rand(2, 4, 6, 8), rand(2, 4, 6, 8), rand(2, 4, 6, 8)),
    ),
    "attention_gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (rand(2, 8, 6, 8), rand(2, 2, 6, 8), rand(2, 2, 6, 8)),
    ),
    "attention_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (rand(2, 4, 6, 8), rand(2, 4, 6, 8), rand(2, 4, 6, 8), rand(2, 1, 6, 6)),
    ),
    "max_pool2d": (nn.MaxPool2d(2), (rand(2, 4, 6, 6),)),
    "avg_pool2d": (nn.AvgPool2d(2), (rand(2, 4, 6, 6),)),
    "adaptive": (nn.AdaptiveAvgPool2d(1), (rand(2, 4, 6, 6),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0), (rand(2, 4, 6, 6),)),
    "bilinear": (
        lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
        (rand(2, 4, 6, 6),),
    ),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 0)), (rand(2, 4, 6, 6),)),
    "roll": (lambda x: torch.roll(x, (1, 2), (1, 2)), (rand(2, 4, 6, 8),)),
    "flip": (lambda x: x.flip(1), (rand(2, 4, 6),)),
    "unfold": (lambda x: F.unfold(x, 3), (rand(2, 4, 6, 6),)),
    "fold": (lambda x: F.fold(x, (6, 6), 3), (rand(2, 36, 16),)),
    "tensor_unfold": (lambda x: x.unfold(1, 2, 2), (rand(2, 6, 4),)),
    "view_merge": (lambda x: x.view(-1, 6), (rand(2, 4, 6),)),
    "view_split": (lambda x: x.view(-1, 4, 2, 4), (rand(2, 4, 8),)),
    "view_odd": (lambda x: x.reshape(-1, 10, 21), (rand(2, 6, 35),)),
    "view_patches": (
        lambda x: (
            x.reshape(-1, 4, 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 9, 16)
        ),
        (rand(2, 4, 6, 6),),
    ),
    "flatten": (lambda x: torch.flatten(x, 1), (rand(2, 4, 6),)),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), (rand(2, 4, 6),)),
    "transpose": (lambda x: x.transpose(1, 2), (rand(2, 4, 6),)),
    "permute": (lambda x: x.permute(2, 0, 1), (rand(2, 4, 6),)),
    "movedim": (lambda x: torch.movedim(x, 0, -1), (rand(2, 4, 6),)),
    "t": (lambda x: x.t(), (rand(4, 6),)),
    "expand": (lambda x: x[:, None].expand(-1, 4, 6), (rand(2, 6),)),
    "repeat": (lambda x: x.repeat(1, 2), (rand(2, 6),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (rand(2, 4),)),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), (rand(2, 4),)),
    "split": (lambda x: x.split(4, -1), (rand(2, 4, 12),)),
    "split_uneven": (lambda x: x.split((8, 4, 4), -1), (rand(2, 4, 16),)),
    "chunk": (lambda x: x.chunk(2, 1), (rand(2, 4, 6),)),
    "unbind": (lambda x: x.unbind(1), (rand(2, 4, 6),)),
    "select": (lambda x: x[:, 0], (rand(2, 4, 6),)),
    "slice": (lambda x: x[:, 1:3], (rand(2, 4, 6),)),
    "slices": (lambda x: (x[:, :4], x[:, 4:]), (rand(2, 8, 6),)),
    "cat": (lambda a, b: torch.cat([a, b], 1), (rand(2, 4, 6), rand(2, 8, 6))),
    "cat_odd": (lambda a, b: torch.cat([a, b], 1), (rand(2, 1, 6), rand(2, 4, 6))),
    "stack": (lambda a, b: torch.stack([a, b], 1), (rand(2, 6), rand(2, 6))),
    "sum": (lambda x: x.sum(1), (rand(2, 4, 6),)),
    "mean_keep": (lambda x: x.mean(-1, keepdim=True), (rand(2, 4, 6),)),
    "var": (lambda x: x.var(-1), (rand(2, 4, 6),)),
    "amax": (lambda x: x.amax(1), (rand(2, 4, 6),)),
    "argmax": (lambda x: x.argmax(-1), (rand(2, 4, 6),)),
    "max_dim": (lambda x: x.max(1), (rand(2, 4, 6),)),
    "cumsum": (lambda x: x.cumsum(1), (rand(2, 4, 6),)),
    "topk": (lambda x: x.topk(2, -1), (rand(2, 4, 6),)),
    "sort": (lambda x: x.sort(-1), (rand(2, 4, 6),)),
    "one_hot": (lambda x: F.one_hot(x, 6), (ids(2, 2, 4),)),
    "gather": (lambda x, i: x.gather(1, i), (rand(2, 6, 4), ids(2, 2, 2, 4))),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s),
        (rand(2, 6, 4), ids(2, 2, 2, 4), rand(2, 2, 4)),
    ),
    "index": (lambda x, i: x[i], (rand(8, 6), ids(2, 4))),
    "index_two": (lambda x, i, j: x[:, i, j], (rand(2, 4, 4, 6), ids(2, 4), ids(2, 4))),
    "index_put": (
        lambda x, i, v: x.index_put((i,), v),
        (rand(8, 6), ids(2, 4), rand(4, 6)),
    ),
    "index_select": (lambda x, i: x.index_select(1, i), (rand(2, 6, 4), ids(2, 4))),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s),
        (rand(8, 6), ids(2, 4), rand(4, 6)),
    ),
    "tril": (lambda x: x.tril(), (rand(2, 4, 4),)),
    "lstm": (nn.LSTM(4, 6, batch_first=True), (rand(2, 5, 4),)),
    "pixel_shuffle": (nn.PixelShuffle(2), (rand(2, 8, 3, 3),)),
    "complex": (
        lambda x, y: torch.view_as_real(
            torch.view_as_complex(x) * torch.view_as_complex(y)
        ),
        (rand(2, 4, 6, 2), rand(4, 6, 2)),
    ),
    "arange": (lambda x: x + torch.arange(6, device=x.device), (rand(2, 6),)),
    "diff": (lambda x: x.diff(dim=1), (rand(2, 5, 4),)),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="xy"), (rand(4), rand(6))),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (rand(2, 4, 6, 6), rand(2, 4, 4, 2)),
    ),
    "weight_norm": (
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
        (rand(2, 4),),
    ),
    "cosine": (F.cosine_similarity, (rand(2, 6), rand(2, 6))),
}


LOSSES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "cross_entropy": (F.cross_entropy, (rand(4, 6), ids(6, 4))),
    "mse": (F.mse_loss, (rand(4, 6), rand(4, 6))),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_space_is_what_the_op_computes(name: str) -> None:
    function, args = CASES[name]
    assert check_all(function, *args) > 0


TEXT = {
    "linear": "bsk,nk,n->bsn",
    "addmm": "mk,kn,mn->mn",
    "conv2d": "nc(x~i)(y~j),ocij,o->noxy",
    "conv2d_groups": "n(gc)(x~i)(y~j),(go)cij,(go)->n(go)xy",
    "conv2d_depthwise": "ng(x~i)(y~j),g.ij,g->ngxy",
    "attention": "bhqe,bh{kv}e,bh{kv}v->bhqv",
    "attention_gqa": "b(hg)qe,bh{kv}e,bh{kv}v->b(hg)qv",
    "split": "bs(d{dr}|4,4,4)->bsd,bsd,bsd",
    "split_uneven": "bs(d{dr}|8,4,4)->bs(d{d0}),bsd,bsd",
    "embedding": "vd,bs->bsd",
    "group_norm": "n(gc){x0}{x1},(gc),(gc)->n(gc){x0}{x1}",
    "view_merge": "abc->(ab)c",
    "view_odd": "a..->a..",
    "add_broadcast": "bsd,s.->bsd",
    "cross_entropy": "nc,n->1",
    "mse": "md,md->1",
}


@pytest.mark.parametrize("name", sorted(TEXT))
def test_space_text(name: str) -> None:
    function, args = (CASES | LOSSES)[name]
    graph = lower(traced_call(function, *args))
    assert format_space(graph.ops[-1].space) == TEXT[name]


def test_softmax_dims_of_attention_are_coupled() -> None:
    function, args = CASES["attention_gqa"]
    space = lower(traced_call(function, *args)).ops[-1].space
    kinds = {d.name: d.kind for d in space.dims}
    assert {n for n, k in kinds.items() if k is DimKind.COUPLED} == {"kv", "e", "v"}
    assert {n for n, k in kinds.items() if k is DimKind.PARALLEL} == {*"bhgq"}


def test_registry_refuses_a_second_rule() -> None:
    def again(call: Call) -> Spec:
        raise AssertionError("never called")

    assert "aten.linear" in RULES
    with pytest.raises(ValueError, match=r"duplicate.*aten\.linear"):
        rule("aten.linear")(again)


@pytest.mark.parametrize(
    ("source", "target", "left", "right", "sizes"),
    [
        ((2, 4, 6), (8, 6), [(0,), (1,), (2,)], [(0, 1), (2,)], [2, 4, 6]),
        ((8, 6), (2, 4, 6), [(0, 1), (2,)], [(0,), (1,), (2,)], [2, 4, 6]),
        ((6, 35), (10, 21), [None, None], [None, None], []),
        ((2, 1, 6), (2, 6), [(0,), (), (1,)], [(0,), (1,)], [2, 6]),
        ((12, 5), (4, 3, 5), [(0, 1), (2,)], [(0,), (1,), (2,)], [4, 3, 5]),
    ],
)
def test_factor(
    source: tuple[int, ...],
    target: tuple[int, ...],
    left: list[Any],
    right: list[Any],
    sizes: list[int],
) -> None:
    assert factor(source, target) == (left, right, sizes)


def test_unknown_op_is_replicated_and_named() -> None:
    graph = lower(traced_call(lambda x: torch.linalg.svdvals(x), torch.randn(4, 6)))
    (op,) = [o for o in graph.ops if o.kind is OpKind.UNKNOWN]
    assert op.space.dims == ()
    assert any(f"unknown op {op.target}" in w for w in graph.warnings)
