"""Modules that are awkward to trace: frozen parts, complex tables, mutations.

Each function returns (module on the meta device, args, kwargs).
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def detection_transformer() -> Built:
    """A convolutional backbone, frozen with its statistics, under a transformer."""
    import transformers

    with torch.device("meta"):
        backbone = transformers.ResNetConfig(out_features=["stage4"])
        config = transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
        )
        model = transformers.DetrForObjectDetection(config).eval()
        image = torch.zeros(1, 3, 800, 1066)
        mask = torch.ones(1, 800, 1066, dtype=torch.long)
    return model, (image,), {"pixel_mask": mask}


class ComplexRotary(nn.Module):
    """Attention whose positions are complex numbers in a buffer outside the state."""

    turn: Tensor

    def __init__(self, width: int = 2048, heads: int = 16, length: int = 2048) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        rate = 1e4 ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = torch.outer(torch.arange(length).float(), rate)
        table = torch.polar(torch.ones_like(angle), angle)
        self.register_buffer("turn", table, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turn[: x.shape[1], None]).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        parts = (t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def complex_rotary() -> Built:
    with torch.device("meta"):
        blocks = nn.Sequential(*(ComplexRotary() for _ in range(4)))
        return blocks, (torch.zeros(2, 1024, 2048),), {}


class Averaged(nn.Module):
    """Clamps a parameter and moves an average in place before it computes."""

    mean: Tensor

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(min=0.0)
            self.mean.mul_(0.99).add_(x.mean((0, 1)), alpha=0.01)
        y = self.linear(x).clone()
        y[:, 0] = 0.0
        return y.add_(x) * self.scale


def averaged(width: int = 1024, device: str = "meta") -> Built:
    with torch.device(device):
        blocks = nn.Sequential(Averaged(width), Averaged(width))
        return blocks, (torch.zeros(4, 8, width),), {}
