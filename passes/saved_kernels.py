"""What CUDA kernels keep for their backward, where a run on meta tensors would differ.

A traced graph runs on meta tensors to see what autograd keeps. Most ops build the same
autograd graph on every device. The exceptions are listed here, one function each; it
computes nothing, gives its output the shape and layout that the CUDA kernel gives, and
keeps what that kernel keeps:

========================  =========================================================
attention, flash          q, k, v, output, one FP32 log-sum-exp per row; no scores
attention, efficient      the same and the float mask
attention, math           as written out in matrix products (its own graph is run)
dropout                   a mask of bools (the CPU keeps the scaled mask)
rms_norm                  input, weight, one FP32 value per row
LSTM, GRU, RNN            input, states, output, cuDNN's reserve (its size is not
                          public: gates, cell and inner states are assumed)
view                      copies where the other layout does not allow a view
========================  =========================================================

The seeds of a kernel's random numbers (24 bytes) are left out. cuDNN's reserve for
channels-last half-precision batch norm with a fused ReLU is left out too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import fx

aten = torch.ops.aten

Kernel = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[str, Kernel] = {}
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # widest head of the flash kernel


def kernel(*targets: str) -> Callable[[Kernel], Kernel]:
    """Register a stand-in for the ops named ``targets``; duplicates are refused."""

    def register(function: Kernel) -> Kernel:
        for target in targets:
            assert target not in KERNELS, f"duplicate kernel for {target}"
            KERNELS[target] = function
        return function

    return register


class _Keep(torch.autograd.Function):
    """One node of the autograd graph that keeps the tensors it is told to."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, make: Callable[..., tuple[Any, Sequence[Any]]], *tensors: Any
    ) -> Any:
        outputs, kept = make(*tensors)
        ctx.save_for_backward(*kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("the recorded graph is never run backward")


def _keep(make: Callable[..., tuple[Any, Sequence[Any]]], *tensors: Any) -> Any:
    """Outputs of ``make(*tensors) -> (outputs, kept)`` with ``kept`` kept."""
    return cast(Any, _Keep).apply(make, *tensors)


# --- attention ------------------------------------------------------------------------


class _Attention(NamedTuple):
    """Arguments of scaled_dot_product_attention."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    gqa: bool = False


def _flash_runs(a: _Attention) -> bool:
    """Whether torch picks the flash kernel (its checks that depend on the model)."""
    widths = {t.shape[-1] for t in (a.q, a.k, a.v)}
    square = a.q.shape[-2] == a.k.shape[-2]
    return (
        a.q.dim() == 4
        and a.q.dtype in _HALF
        and a.mask is None
        and len(widths) == 1
        and max(widths) <= _FLASH_HEAD
        and (square or not a.causal)
    )


def _efficient_runs(a: _Attention) -> bool:
    """Whether torch picks the memory-efficient kernel where flash does not run."""
    align = 8 if a.q.dtype in _HALF else 4
    return (
        a.q.dim() == 4
        and a.q.dtype in (*_HALF, torch.float32)
        and not (a.gqa and a.q.shape[1] != a.k.shape[1])
        and not (a.mask is not None and a.causal)
        and all(t.shape[-1] % align == 0 for t in (a.q, a.k, a.v))
    )


@kernel("aten.scaled_dot_product_attention.default")
def _sdpa(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = {"dropout_p": "dropout", "is_causal": "causal", "enable_gqa": "gqa"}
    names |= {"attn_mask": "mask", "query": "q", "key": "k", "value": "v"}
    a = _Attention(*args, **{names.get(k, k): v for k, v in kwargs.items()})
    if _flash_runs(a):
        return _flash(a)
    if _efficient_runs(a):
        return _efficient(a)
    return aten._scaled_dot_product_attention_math.default(
        a.q, a.k, a.v, a.mask, a.dropout, a.causal, scale=a.scale, enable_gqa=a.gqa
    )[0]


def _flash(a: _Attention) -> torch.Tensor:
    width = a.q.shape[-1]
    short = -width % 8  # the kernel takes widths divisible by 8
    q, k, v = (F.pad(t, (0, short)) if short else t for t in (a.q, a.k, a.v))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        out = torch.empty_like(q)  # in the query's layout
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return out, (q, k, v, out, rows)

    return _keep(run, q, k, v)[..., :width] if short else _keep(run, q, k, v)


def _efficient(a: _Attention) -> torch.Tensor:
    batch, heads, rows = a.q.shape[:3]
    mask = a.mask
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=a.q.dtype)
        if mask.shape[-1] % 16:
            wide = F.pad(mask, (0, -mask.shape[-1] % 16))
            mask = wide[..., : mask.shape[-1]]
        mask = mask.expand(batch, heads, rows, a.k.shape[2])

    def run(*tensors: torch.Tensor):
        q, v = tensors[0], tensors[2]
        out = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
        padded = -(-rows // 32) * 32
        sums = q.new_empty((batch, heads, padded), dtype=torch.float32)
        return out, (*tensors, out, sums)

    given = (a.q, a.k, a.v) if mask is None else (a.q, a.k, a.v, mask)
    return _keep(run, *given)


@kernel("flex_attention")
def _flex(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = cast(Sequence[torch.Tensor], node.meta["val"])

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        out = tuple(_blank(t) for t in values)
        return out, (q, k, v, *out[:2])

    return _keep(run, *args[:3])


def _blank(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device="meta"
    )


# --- the rest -------------------------------------------------------------------------


@kernel("aten.dropout.default")
def _dropout(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train = args
    if train and 0 < p < 1:
        return aten.native_dropout.default(x, p, True)[0]
    return aten.dropout.default(x, p, train)


@kernel("aten.rms_norm.default")
def _rms_norm(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape = args[0], args[1]
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    if weight is not None and weight.dtype != x.dtype:
        return aten.rms_norm.default(*args, **kwargs)  # torch has no fused kernel
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))

    def run(x: torch.Tensor, *weight: torch.Tensor):
        # the kernel writes a dense output
        out = x.new_empty(x.shape)
        scale = torch.float64 if x.dtype is torch.float64 else torch.float32
        return out, (x, *weight, x.new_empty(rows, dtype=scale))

    return _keep(run, x, *(() if weight is None else (weight,)))


@kernel("aten.view.default")
def _view(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten.reshape.default(*args)


# per hidden unit and step: gates, cell, state handed to the next layer (assumed)
_RESERVE = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}


@kernel(*(f"aten.{name}.input" for name in _RESERVE))
def _recurrent(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = cast(Sequence[torch.Tensor], node.meta["val"])
    per_unit = _RESERVE[str(node.target).split(".")[1]]
    states: list[Any] = [args[1]] if isinstance(args[1], torch.Tensor) else args[1]
    weights, layers, training = args[2], int(args[4]), bool(args[6])

    def run(x: torch.Tensor, *rest: torch.Tensor):
        out = tuple(_blank(v) for v in values)
        reserve = x.new_empty((per_unit * layers, *out[0].shape))
        return out, (x, *rest, out[0], *((reserve,) if training else ()))

    return _keep(run, args[0], *states, *weights)
