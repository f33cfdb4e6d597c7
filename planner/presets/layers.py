"""Parts that several presets share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32; label -100 is ignored. [..., V], [...] -> scalar."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def next_token_loss(logits: Tensor, input_labels: Tensor) -> Tensor:
    """Cross entropy of position t against label t+1. [b, s, V], [b, s] -> scalar."""
    shifted = F.pad(input_labels, (0, 1), value=-100)[:, 1:]
    return token_loss(logits, shifted)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, statistics in fp32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """cos and sin of rotary positions, [s, d] each, in fp32."""

    inv_freq: Tensor
    keep_fp32 = ("inv_freq",)

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inv_freq", theta**-exponent, persistent=False)

    def forward(self, x: Tensor, length: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(length, device=x.device, dtype=torch.float32)
        angle = torch.outer(position, self.inv_freq.float())
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [b, heads, s, d] with tables [s, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GatedMLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """SwiGLU experts as grouped matrix products: each token runs in its ``k`` only.

    ``gate_up``: [experts, width, 2 * inner], ``down``: [experts, inner, width].
    """

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up = nn.Parameter(torch.empty(experts, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, width], chosen and weights [tokens, k] -> [tokens, width]."""
        tokens, k = chosen.shape
        owner, order = torch.sort(chosen.flatten())
        rows = x[order // k]
        counts = torch.zeros(self.experts, dtype=torch.int32, device=x.device)
        counts = counts.scatter_add(0, owner, torch.ones_like(owner, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        out = out * weights.flatten()[order].unsqueeze(-1).to(out.dtype)
        back = torch.zeros_like(out).index_copy(0, order, out)
        return back.view(tokens, k, -1).sum(1)
