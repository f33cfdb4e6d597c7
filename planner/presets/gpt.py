"""GPT: learned positions, pre-norm, fused QKV, GELU, head tied to the embedding.

Sizes: GPT-2 (Radford et al. 2019); GPT-3 175B (Brown et al. 2020) and 22B, 530B, 1T as
in Megatron-LM's tables (Narayanan et al. 2021; Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import next_token_loss


@dataclass(frozen=True, slots=True)
class GPTConfig:
    layers: int
    width: int
    heads: int
    vocab: int = 51200
    positions: int = 2048
    dropout: float = 0.1
    approximate: str = "tanh"


GPT_SIZES = {
    "gpt2": GPTConfig(12, 768, 12, vocab=50257, positions=1024),
    "gpt-22b": GPTConfig(48, 6144, 64),
    "gpt3-175b": GPTConfig(96, 12288, 96),
    "gpt-530b": GPTConfig(105, 20480, 128),
    "gpt-1t": GPTConfig(128, 25600, 160),
}


class GPTAttention(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.qkv(x).split(h, dim=-1)
        q, k, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in parts)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, h))


class GPTBlock(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.width)
        self.attn = GPTAttention(c)
        self.ln_2 = nn.LayerNorm(c.width)
        self.fc_in = nn.Linear(c.width, 4 * c.width)
        self.act = nn.GELU(approximate=c.approximate)
        self.fc_out = nn.Linear(4 * c.width, c.width)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.fc_out(self.act(self.fc_in(self.ln_2(x)))))


class GPT(nn.Module):
    """input_ids [b, s] -> logits [b, s, V]; with labels [b, s] the mean loss."""

    def __init__(self, c: GPTConfig, positions: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.width)
        self.wpe = nn.Embedding(max(positions, c.positions), c.width)
        self.drop = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(GPTBlock(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(position))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.ln_f(x))
        return logits if labels is None else next_token_loss(logits, labels)
