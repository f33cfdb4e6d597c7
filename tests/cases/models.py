"""Models of situations from the field, by configuration, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")


def ids(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def llama(**sizes: Any) -> nn.Module:
    """A Llama of the given sizes, untied, cache off."""
    options = {"tie_word_embeddings": False, "use_cache": False, **sizes}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def llama_7b() -> nn.Module:
    return llama(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    )


def llama_1b() -> nn.Module:
    return llama(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )


def qwen2(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        config = transformers.Qwen2Config(use_cache=False, **sizes)
        return transformers.Qwen2ForCausalLM(config)


def gpt2(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        config = transformers.GPT2Config(use_cache=False, **sizes)
        return transformers.GPT2LMHeadModel(config)


def mpt_7b() -> nn.Module:
    with torch.device("meta"):
        config = transformers.MptConfig(
            d_model=4096,
            n_heads=32,
            n_layers=32,
            expansion_ratio=4,
            max_seq_len=2048,
            vocab_size=50432,
            use_cache=False,
        )
        return transformers.MptForCausalLM(config)


def distilbert() -> nn.Module:
    with torch.device("meta"):
        return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig())


def mixtral_8x7b() -> nn.Module:
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            use_cache=False,
        )
        return transformers.MixtralForCausalLM(config)
