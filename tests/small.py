"""Small models, graphs and jobs that several tests share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.hardware import parse_cluster
from cost_models.stacks import load_stack
from passes.ir import OpGraph
from passes.pipeline import run_passes
from passes.trace import trace

if TYPE_CHECKING:  # the solver is not needed where only the models are
    from planner.search.job import Job


class Layer(nn.Module):
    """A pre-norm transformer layer with a fused QKV projection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.up, self.down = (
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, 2)
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Embedding, ``layers`` layers, norm and a head; optionally tied."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocab: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MLP(nn.Module):
    """Six ops: two linears, a GELU, a residual, a norm and a loss."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, wide), nn.Linear(wide, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y + self.down(F.gelu(self.up(y)))).float().pow(2).mean()


def graph_of(model: nn.Module, *inputs: Tensor) -> OpGraph:
    """Trace in bf16, one sample, and run every pass."""
    return run_passes(trace(model, inputs, {}, batch=1, dtype=torch.bfloat16))


@lru_cache(maxsize=8)
def gpt_graph(
    layers: int = 2,
    hidden: int = 1024,
    heads: int = 8,
    vocab: int = 8192,
    seq: int = 512,
    tied: bool = False,
) -> OpGraph:
    with torch.device("meta"):
        model = TinyGPT(layers, hidden, heads, vocab, tied)
        ids = torch.zeros(2, seq, dtype=torch.long)
    return graph_of(model, ids, ids)


def job_of(
    graph: OpGraph, cluster: str, stack: str = "compiled", **options: object
) -> Job:
    from planner.search.job import Job

    return Job(
        graph,
        parse_cluster(cluster),
        load_stack(stack),
        precision="bf16",
        **options,  # type: ignore[arg-type]
    )
