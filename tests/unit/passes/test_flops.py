"""FLOPs equal what torch counts on the real module, forward and backward.

Causal attention is not halved, as in torch. What differs, and by how much, is in
:mod:`tests.unit.passes.flop_oracle`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes.ir import OpKind
from passes.lower import lower
from passes.pipeline import run_passes
from passes.trace import trace
from planner.models import resolve_model
from planner.presets import PRESETS
from tests.unit.passes.flop_oracle import counted_flops, torch_flops

SMALL = {
    "gpt2": 32,
    "llama3-8b": 32,
    "mixtral-8x7b": 32,
    "deepseek-v3": 32,
    "bert-large": 32,
    "t5-11b": 32,
    "vit-l16": 64,
    "resnet50": 64,
    "unet-sd": 64,
}


@pytest.mark.parametrize("name", SMALL)
def test_presets_forward_and_backward(name: str) -> None:
    module, kwargs = PRESETS[name].build(dtype=torch.bfloat16, size=SMALL[name])
    graph = run_passes(trace(module, (), kwargs))
    assert counted_flops(graph) == torch_flops(module, (), kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_full_size_presets_forward(name: str) -> None:
    module, kwargs = PRESETS[name].build(dtype=torch.bfloat16)
    graph = run_passes(trace(module, (), kwargs))
    want = torch_flops(module, (), kwargs, backward=False)
    assert counted_flops(graph).forward == want.forward > 0


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16"])
def test_torchvision(name: str) -> None:
    pytest.importorskip("torchvision")
    source = resolve_model(f"torchvision:{name}")
    module, args, kwargs = source.build()
    graph = run_passes(trace(module, args, kwargs, batch=2))
    assert counted_flops(graph) == torch_flops(module, *_batch(args, kwargs, 2))


def _batch(args: Any, kwargs: Any, size: int) -> tuple[Any, Any]:
    def wider(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(size, *x.shape[1:], dtype=x.dtype, device=x.device)

    return tuple(map(wider, args)), {k: wider(v) for k, v in kwargs.items()}


def _hf(name: str) -> Any:
    hf = pytest.importorskip("transformers")
    if name == "gpt2":
        return hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=32)
    if name == "bert":
        return hf.BertConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
            intermediate_size=128,
        )  # fmt: skip
    if name == "t5":
        return hf.T5Config(num_layers=2, d_model=64, d_kv=16, num_heads=4, d_ff=128)
    return hf.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128,
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama"])
def test_hugging_face(name: str, attention: str) -> None:
    source = resolve_model(_hf(name), seq_len=16, attention=attention)
    module, args, kwargs = source.build()
    graph = run_passes(trace(module, args, kwargs, batch=2))
    real = module.to_empty(device="cpu")  # its masks read values
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.data.zero_()
    kwargs = {k: torch.zeros(2, *v.shape[1:], dtype=v.dtype) for k, v in kwargs.items()}
    assert not args
    assert counted_flops(graph) == torch_flops(real, (), kwargs)


def test_an_lstm_counts_where_torch_counts_nothing() -> None:
    """One CPU kernel, without a formula: 4 gates of two products each step."""
    model, x = nn.LSTM(6, 10, batch_first=True), torch.zeros(3, 7, 6)
    graph = lower(trace(model, (x,)))
    scan = next(o for o in graph.ops if o.kind is OpKind.SCAN)
    assert scan.forward_flops == 2 * 3 * 7 * 4 * 10 * (6 + 10)
    assert scan.backward_flops == 2 * scan.forward_flops
    assert counted_flops(graph).forward == 0
