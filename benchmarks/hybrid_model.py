"""Hybrid of state-space, attention and expert layers (Nemotron 3): rows name these
models without dimensions, so the published configurations stand in :data:`HYBRIDS`.

The scan of a state-space layer is written in its dual form: inside a chunk it is causal
attention without a softmax (same products, same traffic as a fused kernel), and chunks
hand on a state of ``state x head`` numbers per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import RMSNorm, next_token_loss


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """``pattern``: M state space, E experts, * attention, one letter a layer.

    ``latent`` > 0: experts work on projections of that width.
    """

    pattern: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mamba_heads: int
    mamba_dim: int
    groups: int
    state: int
    experts: int
    top_k: int
    inner: int
    shared: int
    latent: int
    vocab: int
    chunk: int = 128


def _pattern(experts: int, attention: int) -> str:
    """State-space and expert layers in turn, attention spread evenly among them."""
    letters = ["ME"] * experts
    for k in range(attention):
        place = (k + 1) * experts // (attention + 1)
        letters[place] = letters[place] + "*"
    return "".join(letters)


#: Sizes from the models' published configurations (recalled); they add up to the
#: published 31.6e9 and 120e9 parameters within 3 %.
HYBRIDS = {
    "nemotron_3_nano": HybridConfig(
        _pattern(23, 6), 2688, 32, 2, 128, 64, 64, 8, 128,
        experts=128, top_k=6, inner=1856, shared=3712, latent=0, vocab=131072,
    ),
    "nemotron_3_super": HybridConfig(
        _pattern(40, 8), 4096, 32, 2, 128, 128, 64, 8, 128,
        experts=512, top_k=22, inner=2688, shared=5376, latent=1024, vocab=131072,
    ),
}  # fmt: skip


class StateSpace(nn.Module):
    """Mamba-2: projection, short convolution, chunked scan, gated norm, projection."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__()
        self.c = c
        self.inner = c.mamba_heads * c.mamba_dim
        self.mixed = self.inner + 2 * c.groups * c.state
        out = self.inner + self.mixed + c.mamba_heads
        self.in_proj = nn.Linear(c.width, out, bias=False)
        self.conv = nn.Conv1d(self.mixed, self.mixed, 4, groups=self.mixed, padding=3)
        self.norm = RMSNorm(self.inner)
        self.out_proj = nn.Linear(self.inner, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, s, _) = self.c, x.shape
        gate, mixed, _ = self.in_proj(x).split(
            (self.inner, self.mixed, c.mamba_heads), dim=-1
        )
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :s]).transpose(1, 2)
        values, keys, queries = mixed.split(
            (self.inner, c.groups * c.state, c.groups * c.state), dim=-1
        )
        chunks = (b * s // c.chunk, c.chunk)
        v = values.reshape(*chunks, c.mamba_heads, c.mamba_dim).transpose(1, 2)
        k = keys.reshape(*chunks, c.groups, c.state).transpose(1, 2)
        q = queries.reshape(*chunks, c.groups, c.state).transpose(1, 2)
        each = c.mamba_heads // c.groups
        q = q.repeat_interleave(each, 1)
        k = k.repeat_interleave(each, 1)
        inside = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        carried = torch.matmul(q, torch.matmul(k.transpose(2, 3), v))
        y = (inside + carried).transpose(1, 2).reshape(b, s, self.inner)
        return self.out_proj(self.norm(y * F.silu(gate)))


class Attention(nn.Module):
    """Causal attention with few key-value heads, no positions."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__()
        self.dim = c.head_dim
        self.q = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, -1, self.dim).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class SquaredExperts(nn.Module):
    """Routed experts and a shared one, relu squared, without a gate."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__()
        self.c = c
        width = c.latent or c.width
        self.router = nn.Linear(c.width, c.experts, bias=False)
        self.enter = nn.Linear(c.width, width, bias=False) if c.latent else None
        self.leave = nn.Linear(width, c.width, bias=False) if c.latent else None
        self.up = nn.Parameter(torch.empty(c.experts, width, c.inner))
        self.down = nn.Parameter(torch.empty(c.experts, c.inner, width))
        self.shared_up = nn.Linear(c.width, c.shared, bias=False)
        self.shared_down = nn.Linear(c.shared, c.width, bias=False)

    def _routed(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, k = chosen.shape
        owner, order = torch.sort(chosen.flatten())
        mine = rows[order // k]
        counts = torch.zeros(self.c.experts, dtype=torch.int32, device=rows.device)
        counts = counts.scatter_add(0, owner, torch.ones_like(owner, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.relu(F.grouped_mm(mine, self.up, offs=ends)).square()
        out = F.grouped_mm(hidden, self.down, offs=ends)
        out = out * weights.flatten()[order].unsqueeze(-1).to(out.dtype)
        back = torch.zeros_like(out).index_copy(0, order, out)
        return back.view(tokens, k, -1).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).float().sigmoid()
        weights, chosen = torch.topk(scores, self.c.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        narrow = self.enter(rows) if self.enter is not None else rows
        routed = self._routed(narrow, chosen, weights)
        if self.leave is not None:
            routed = self.leave(routed)
        shared = self.shared_down(F.relu(self.shared_up(rows)).square())
        return (routed + shared).view_as(x)


_MIXERS = {"M": StateSpace, "E": SquaredExperts, "*": Attention}


class HybridBlock(nn.Module):
    def __init__(self, c: HybridConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(c.width)
        self.mixer = _MIXERS[kind](c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Hybrid(nn.Module):
    """input_ids [b, s] -> logits [b, s, V]; with labels [b, s] the mean loss."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(HybridBlock(c, kind) for kind in c.pattern)
        self.norm = RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)
