"""Llama 3, Mixtral and Qwen3-MoE: GQA, RMSNorm, rotary positions, SwiGLU or experts.

Sizes from the models' published configurations (Dubey et al. 2024; Jiang et al. 2024;
Qwen team 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import (
    Experts,
    GatedMLP,
    RMSNorm,
    Rotary,
    next_token_loss,
    rotate,
)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    layers: int
    width: int
    inner: int  # feed-forward width, of one expert where there are experts
    heads: int
    kv_heads: int
    vocab: int
    positions: int = 8192  # default sequence length
    head_dim: int = 128
    theta: float = 500000.0
    experts: int = 0
    top_k: int = 0
    qk_norm: bool = False
    eps: float = 1e-5


LLAMA_SIZES = {
    "llama3-8b": LlamaConfig(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": LlamaConfig(80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": LlamaConfig(126, 16384, 53248, 128, 8, 128256),
    "mixtral-8x7b": LlamaConfig(
        32, 4096, 14336, 32, 8, 32000, positions=4096, theta=1e6, experts=8, top_k=2
    ),
    "qwen3-30b-a3b": LlamaConfig(
        48, 2048, 768, 32, 4, 151936, positions=4096, theta=1e6, experts=128, top_k=8,
        qk_norm=True, eps=1e-6,
    ),
}  # fmt: skip


class GroupedAttention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, s, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, s, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class TopKExperts(nn.Module):
    """Softmax router over experts; the weights of the chosen ``k`` sum to one."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.top_k = c.top_k
        self.router = nn.Linear(c.width, c.experts, bias=False)
        self.experts = Experts(c.experts, c.width, c.inner)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = torch.softmax(self.router(rows), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(rows, chosen, weights).view_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.width, c.eps)
        self.attn = GroupedAttention(c)
        self.post_norm = RMSNorm(c.width, c.eps)
        self.mlp = TopKExperts(c) if c.experts else GatedMLP(c.width, c.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """input_ids [b, s] -> logits [b, s, V]; with labels [b, s] the mean loss."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.rotary = Rotary(c.head_dim, c.theta)
        self.layers = nn.ModuleList(LlamaBlock(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.rotary(x, input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)
