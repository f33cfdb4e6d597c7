"""T5-11B: encoder and decoder with relative position biases (Raffel et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import RMSNorm, token_loss


@dataclass(frozen=True, slots=True)
class T5Config:
    layers: int = 24  # of the encoder, and of the decoder
    width: int = 1024
    inner: int = 65536
    heads: int = 128
    head_dim: int = 128
    vocab: int = 32128
    buckets: int = 32
    max_distance: int = 128
    positions: int = 512
    dropout: float = 0.1


T5_SIZES = {"t5-11b": T5Config()}


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distance: [1, heads, q, k]."""

    def __init__(self, c: T5Config, causal: bool) -> None:
        super().__init__()
        self.c, self.causal = c, causal
        self.table = nn.Embedding(c.buckets, c.heads)

    def _bucket(self, distance: Tensor) -> Tensor:
        c, result = self.c, torch.zeros_like(distance)
        buckets = c.buckets
        if self.causal:
            distance = -torch.clamp(distance, max=0)
        else:
            buckets //= 2
            result = (distance > 0).long() * buckets
            distance = distance.abs()
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact)
        far = exact + (ratio / math.log(c.max_distance / exact) * (buckets - exact))
        far = far.long().clamp(max=buckets - 1)
        return result + torch.where(distance < exact, distance, far)

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[None, :] - position[:, None]
        bias = self.table(self._bucket(distance)).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            bias = bias.masked_fill(distance > 0, float("-inf"))
        return bias


class T5Attention(nn.Module):
    """Attention without scaling; ``memory`` gives keys and values if not ``x``."""

    def __init__(self, c: T5Config) -> None:
        super().__init__()
        inner = c.heads * c.head_dim
        self.heads, self.dropout = c.heads, c.dropout
        self.q = nn.Linear(c.width, inner, bias=False)
        self.k = nn.Linear(c.width, inner, bias=False)
        self.v = nn.Linear(c.width, inner, bias=False)
        self.o = nn.Linear(inner, c.width, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self._split(self.q(x)), self._split(self.k(memory)), self.v(memory)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, self._split(v), attn_mask=bias, dropout_p=p, scale=1.0
        )
        return self.o(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, c: T5Config, decoder: bool) -> None:
        super().__init__()
        self.self_norm = RMSNorm(c.width, 1e-6)
        self.self_attn = T5Attention(c)
        self.cross_norm = RMSNorm(c.width, 1e-6) if decoder else None
        self.cross_attn = T5Attention(c) if decoder else None
        self.ff_norm = RMSNorm(c.width, 1e-6)
        self.wi = nn.Linear(c.width, c.inner, bias=False)
        self.wo = nn.Linear(c.inner, c.width, bias=False)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        y = self.self_norm(x)
        x = x + self.drop(self.self_attn(y, y, bias))
        if self.cross_attn is not None and self.cross_norm is not None:
            assert memory is not None
            x = x + self.drop(self.cross_attn(self.cross_norm(x), memory, None))
        y = self.drop(F.relu(self.wi(self.ff_norm(x))))
        return x + self.drop(self.wo(y))


class T5Stack(nn.Module):
    def __init__(self, c: T5Config, decoder: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(c, causal=decoder)
        self.layers = nn.ModuleList(T5Block(c, decoder) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, 1e-6)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.drop(x), self.bias(x)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.drop(self.norm(x))


class T5(nn.Module):
    """input_ids [b, s], decoder_input_ids [b, t] -> logits [b, t, V].

    With labels [b, t] (then the decoder reads them shifted right) the mean loss.
    """

    def __init__(self, c: T5Config) -> None:
        super().__init__()
        self.scale = c.width**-0.5
        self.shared = nn.Embedding(c.vocab, c.width)
        self.encoder = T5Stack(c, decoder=False)
        self.decoder = T5Stack(c, decoder=True)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        self.head.weight = self.shared.weight

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if labels is not None:
            decoder_input_ids = F.pad(labels, (1, 0), value=0)[:, :-1].clamp(min=0)
        assert decoder_input_ids is not None, "decoder_input_ids or labels"
        memory = self.encoder(self.shared(input_ids))
        y = self.decoder(self.shared(decoder_input_ids), memory)
        logits = self.head(y * self.scale)
        return logits if labels is None else token_loss(logits, labels)
