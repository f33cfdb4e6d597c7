"""Ops that make tensors from nothing, and recurrences."""

from __future__ import annotations

from passes.ir import Axis, OpKind
from passes.spaces.registry import (
    Call,
    Label,
    Labels,
    Spec,
    positional,
    rule,
    space,
    whole,
)


@rule(
    "aten.arange",
    "aten.zeros",
    "aten.ones",
    "aten.full",
    "aten.empty",
    "aten.eye",
    "aten.linspace",
    "aten.logspace",
    "aten.scalar_tensor",
    "aten.tensor",
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
    "aten.empty_like",
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_full",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.hann_window",
    "aten.hamming_window",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.range",
    "aten.empty_memory_format",
)
def create(call: Call) -> Spec:
    """Any part of the output can be made anywhere."""
    labels = positional(len(call.out))
    return space(call, OpKind.CREATE, {}, [labels], only_named=True)


@rule("aten.rand_like", "aten.randn_like", "aten.randint_like")
def random_like(call: Call) -> Spec:
    labels = positional(len(call.out))
    return space(call, OpKind.RANDOM, {}, [labels], only_named=True)


@rule(
    "aten.rand",
    "aten.randn",
    "aten.randint",
    "aten.randperm",
    "aten.normal",
    "aten.multinomial",
)
def random_create(call: Call) -> Spec:
    if call.tensors:
        return whole(call, OpKind.RANDOM)
    return space(call, OpKind.RANDOM, {}, [positional(len(call.out))])


def _states(count: int) -> list[Labels]:
    return [[None, "b", None] for _ in range(count)]


@rule("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def recurrent(call: Call) -> Spec:
    """A scan over the sequence: only the batch is parallel.

    ``macs_per_row``: multiply-adds of one position of one sample over all layers and
    directions, as its linear layers are counted.
    """
    x = call.tensors[0]
    weights = [t for t in call.tensors[1:] if t.rank == 2]
    macs = sum(w.shape[0] * w.shape[1] for w in weights)
    first = bool(call.args.get("batch_first", False))
    labels: list[Label] = ["b", "s", "k"] if first else ["s", "b", "k"]
    if x.rank == 2:
        labels = ["s", "k"]
    output: list[Label] = [*labels[:-1], Axis()]
    states: list[Labels] = []
    for shape in call.outputs[1:]:
        states.append([None, "b", None] if len(shape) == 3 else [None] * len(shape))
    hidden = call.args.get("hx")
    inputs: dict[str, Labels | list[Labels]] = {"input": labels}
    if isinstance(hidden, (list, tuple)):
        inputs["hx"] = _states(len(call.refs("hx")))
    elif call.has("hx"):
        inputs["hx"] = [None, "b", None]
    return space(
        call,
        OpKind.SCAN,
        inputs,
        [output, *states],
        coupled=["s", "k"],
        attrs={"macs_per_row": macs},
    )


@rule("aten.stft", "aten.istft")
def stft(call: Call) -> Spec:
    x = call.tensors[0]
    head: list[Label] = ["b"] if x.rank == 2 else []
    rest = len(call.out) - len(head)
    return space(
        call,
        OpKind.SCAN,
        {"self": [*head, *([None] * (x.rank - len(head)))]},
        [[*head, *([None] * rest)]],
        attrs={"macs_per_row": 0},
    )


@rule(
    "aten._fft_r2c",
    "aten._fft_c2c",
    "aten._fft_c2r",
    "aten.fft_fft",
    "aten.fft_ifft",
    "aten.fft_rfft",
    "aten.fft_irfft",
    "aten.fft_rfft2",
    "aten.fft_irfft2",
    "aten.fft_rfftn",
    "aten.fft_irfftn",
    "aten.fft_fft2",
    "aten.fft_ifft2",
    "aten.fft_fftn",
    "aten.fft_ifftn",
    "aten.fft_fftshift",
    "aten.fft_ifftshift",
)
def fft(call: Call) -> Spec:
    """The transformed axes are whole."""
    x = call.tensors[0]
    rank = x.rank
    axes = {d % rank for d in call.ints("dim", 1)} or {rank - 1}
    if call.args.get("dim") is None and ("2" in call.target or "n." in call.target):
        axes = set(range(rank))
    labels: list[Label] = [
        None if k in axes else v for k, v in enumerate(positional(rank))
    ]
    return space(
        call,
        OpKind.SCAN,
        {next(iter(call.args)): labels},
        [labels],
        attrs={"macs_per_row": 0},
    )
