"""DeepSeek-V3: latent attention, a shared expert beside 8 of 256 routed ones.

Sizes from the published configuration (DeepSeek-AI 2024, section 4.2); without the
multi-token prediction module.
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
class DeepSeekConfig:
    layers: int = 61
    dense_layers: int = 3
    width: int = 7168
    dense_inner: int = 18432
    expert_inner: int = 2048
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    experts: int = 256
    top_k: int = 8
    groups: int = 8
    top_groups: int = 4
    scale: float = 2.5
    vocab: int = 129280
    positions: int = 4096
    theta: float = 10000.0
    eps: float = 1e-6


DEEPSEEK_SIZES = {"deepseek-v3": DeepSeekConfig()}


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values from low-rank latents."""

    def __init__(self, c: DeepSeekConfig) -> None:
        super().__init__()
        self.c = c
        qk_dim = c.nope_dim + c.rope_dim
        self.q_down = nn.Linear(c.width, c.q_rank, bias=False)
        self.q_norm = RMSNorm(c.q_rank, c.eps)
        self.q_up = nn.Linear(c.q_rank, c.heads * qk_dim, bias=False)
        self.kv_down = nn.Linear(c.width, c.kv_rank + c.rope_dim, bias=False)
        self.kv_norm = RMSNorm(c.kv_rank, c.eps)
        self.kv_up = nn.Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_dim, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (b, s, _) = self.c, x.shape
        q = self.q_up(self.q_norm(self.q_down(x)))
        q = q.view(b, s, c.heads, c.nope_dim + c.rope_dim).transpose(1, 2)
        q_nope, q_rope = q.split((c.nope_dim, c.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x).split((c.kv_rank, c.rope_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent))
        kv = kv.view(b, s, c.heads, c.nope_dim + c.v_dim).transpose(1, 2)
        k_nope, v = kv.split((c.nope_dim, c.v_dim), dim=-1)
        k_rope = rotate(k_rope.view(b, 1, s, c.rope_dim), cos, sin)
        k = torch.cat((k_nope, k_rope.expand(b, c.heads, s, c.rope_dim)), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, c.heads * c.v_dim))


class SharedAndRouted(nn.Module):
    """One shared expert, and ``top_k`` routed ones out of the best groups.

    The router's bias steers the choice only; it is adjusted, not learned.
    """

    router_bias: Tensor
    keep_fp32 = ("router_bias",)

    def __init__(self, c: DeepSeekConfig) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.width, c.experts, bias=False)
        self.register_buffer("router_bias", torch.zeros(c.experts))
        self.experts = Experts(c.experts, c.width, c.expert_inner)
        self.shared = GatedMLP(c.width, c.expert_inner)

    def _choose(self, scores: Tensor) -> Tensor:
        c = self.c
        biased = scores + self.router_bias
        grouped = biased.view(-1, c.groups, c.experts // c.groups)
        rank = grouped.topk(2, dim=-1)[0].sum(-1)
        best = rank.topk(c.top_groups, dim=-1)[1]
        mask = torch.zeros_like(rank).scatter(1, best, 1.0).unsqueeze(-1)
        allowed = grouped.masked_fill(mask == 0, float("-inf")).flatten(1)
        return allowed.topk(c.top_k, dim=-1)[1]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).float().sigmoid()
        chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        weights = self.c.scale * weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return self.experts(rows, chosen, weights).view_as(x) + self.shared(x)


class DeepSeekBlock(nn.Module):
    def __init__(self, c: DeepSeekConfig, dense: bool) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.width, c.eps)
        self.attn = LatentAttention(c)
        self.post_norm = RMSNorm(c.width, c.eps)
        self.mlp = GatedMLP(c.width, c.dense_inner) if dense else SharedAndRouted(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class DeepSeek(nn.Module):
    """input_ids [b, s] -> logits [b, s, V]; with labels [b, s] the mean loss."""

    def __init__(self, c: DeepSeekConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.rotary = Rotary(c.rope_dim, c.theta)
        self.layers = nn.ModuleList(
            DeepSeekBlock(c, dense=i < c.dense_layers) for i in range(c.layers)
        )
        self.norm = RMSNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.rotary(x, input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)
