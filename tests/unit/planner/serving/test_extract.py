"""The traced graph gives what the published dimensions give."""

# pyright: reportArgumentType=false

from typing import Any

import pytest
import torch

from planner.models import resolve_model
from planner.serving.dims import serving_model
from planner.serving.extract import extract
from planner.serving.kv_cache import (
    Formats,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
)
from planner.serving.model import ServingModel
from planner.serving.windows import windows_of
from planner.traces import GraphSource
from tests.unit.planner.serving.zoo import DIMS


def traced(model: Any, text: str | None = None) -> ServingModel:
    def resolve(seq_len: int | None) -> Any:
        return resolve_model(model, seq_len=seq_len, mode="infer")

    source = resolve(256)
    graph = GraphSource(source, resolve, text).graph()
    return extract(graph, source.name, windows_of(source.build()[0]))


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"],
)
def test_presets_agree_with_their_dimensions(name: str) -> None:
    found, known = traced(name, name), serving_model(DIMS[name])
    assert found.parameters == known.parameters
    assert kv_bytes_per_token(found) == kv_bytes_per_token(known)
    assert weight_bytes(found, Formats("fp8")) == weight_bytes(known, Formats("fp8"))
    assert weight_bytes(found, Formats("int4")) == weight_bytes(known, Formats("int4"))
    shapes = [
        sorted((p.n, p.k, p.split, p.experts, p.chosen) for p in layer.products)
        for layer, count in found.layers
        for _ in range(count)
    ]
    expected = [
        sorted((p.n, p.k, p.split, p.experts, p.chosen) for p in layer.products)
        for layer, count in known.layers
        for _ in range(count)
    ]
    assert shapes == expected


def test_windows_of_a_gemma() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, sliding_window=64,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config).to(torch.bfloat16).eval()
    found = traced(model)
    assert [a.window for a, n in found.attentions for _ in range(n)] == [64] * 5 + [0]
    assert kv_bytes_per_token(found) == 6 * 2 * 256 * 2
    assert sequence_bytes(found, 200) == (5 * 64 + 200) * 2 * 256 * 2
    assert found.tied


def test_head_dim_is_not_hidden_over_heads() -> None:
    """hidden / heads would be 80; the projections make 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024, hidden_size=640, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    assert kv_bytes_per_token(traced(model)) == 2 * 2 * (128 + 128) * 2


def test_latent_attention_of_transformers_is_cached_once() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2,
        moe_intermediate_size=256, num_attention_heads=16, num_key_value_heads=16,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=384, kv_lora_rank=128, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
    found = traced(model)
    assert kv_bytes_per_token(found) == 2 * (128 + 64) * 2
    assert {a.latent for a, _ in found.attentions} == {192}
