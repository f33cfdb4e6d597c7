"""BERT-large with its masked-token head (Devlin et al. 2019), head tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import token_loss


@dataclass(frozen=True, slots=True)
class BertConfig:
    layers: int = 24
    width: int = 1024
    inner: int = 4096
    heads: int = 16
    vocab: int = 30522
    positions: int = 512
    types: int = 2
    dropout: float = 0.1


BERT_SIZES = {"bert-large": BertConfig()}


class BertBlock(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.query = nn.Linear(c.width, c.width)
        self.key = nn.Linear(c.width, c.width)
        self.value = nn.Linear(c.width, c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.norm_1 = nn.LayerNorm(c.width, eps=1e-12)
        self.fc_in = nn.Linear(c.width, c.inner)
        self.act = nn.GELU()
        self.fc_out = nn.Linear(c.inner, c.width)
        self.norm_2 = nn.LayerNorm(c.width, eps=1e-12)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in parts)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        y = self.proj(y.transpose(1, 2).reshape(b, s, h))
        x = self.norm_1(x + self.drop(y))
        return self.norm_2(x + self.drop(self.fc_out(self.act(self.fc_in(x)))))


class Bert(nn.Module):
    """input_ids [b, s] -> logits [b, s, V]; with labels [b, s] the mean loss.

    Labels are -100 where a token is not masked.
    """

    def __init__(self, c: BertConfig, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(c.vocab, c.width)
        self.positions = nn.Embedding(max(positions, c.positions), c.width)
        self.types = nn.Embedding(c.types, c.width)
        self.norm = nn.LayerNorm(c.width, eps=1e-12)
        self.drop = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(BertBlock(c) for _ in range(c.layers))
        self.transform = nn.Linear(c.width, c.width)
        self.transform_norm = nn.LayerNorm(c.width, eps=1e-12)
        self.head = nn.Linear(c.width, c.vocab)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        kinds = self.types(torch.zeros_like(input_ids))
        x = self.words(input_ids) + kinds + self.positions(position)
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return logits if labels is None else token_loss(logits, labels)
