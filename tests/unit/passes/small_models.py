"""Small models of the families that the passes must know, built on meta tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from passes.trace import trace
from passes.traced import TracedModel


class Block(nn.Module):
    """GPT-2's layer: fused QKV split in three, causal attention, GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, dim=-1)
        q, k, v = (
            p.view(b, s, self.heads, d // self.heads).transpose(1, 2) for p in parts
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """Tied embedding and head, loss inside."""

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


class Grouped(nn.Module):
    """Grouped-query attention with one uneven QKV product, rotary and SwiGLU."""

    def __init__(self, width: int = 32, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.sizes = (width, kv_heads * self.size, kv_heads * self.size)
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
        return x * angle.cos() + turned * angle.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm(x)).split(self.sizes, -1)
        q = q.view(b, s, self.heads, self.size).transpose(1, 2)
        k = k.view(b, s, self.kv_heads, self.size).transpose(1, 2)
        v = v.view(b, s, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class VisionAttention(nn.Module):
    """QKV as [3, heads, size], permuted and unbound; plain products and softmax."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        shape = (b, s, 3, self.heads, d // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, s, d))


class MoE(nn.Module):
    """Top-2 of 4 experts over merged tokens, dense one-hot dispatch."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        tokens = x.reshape(b * s, d)
        score, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        share = F.one_hot(chosen, self.up.shape[0]).to(x.dtype) * score[..., None]
        y = torch.bmm(tokens[None].expand(self.up.shape[0], -1, -1), self.up)
        y = torch.bmm(F.gelu(y), self.down)
        return (y * share.sum(1).t()[..., None]).sum(0).view(b, s, d)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width // 2, 1, bias=False)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width // 2, width, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width // 2), nn.BatchNorm2d(width // 2)
        self.bn3 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Bottleneck(8), Bottleneck(8))
        self.wide = nn.Conv2d(8, 16, 2, stride=2)
        self.layer2 = nn.Sequential(Bottleneck(16), Bottleneck(16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.wide(self.layer1(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down and up with a skip, transposed and depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(7, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(F.silu(self.norm(self.down(x))))
        return self.out(torch.cat([self.up(y), x], 1))


def tokens(batch: int) -> tuple[torch.Tensor, ...]:
    ids = torch.zeros(batch, 8, dtype=torch.long, device="meta")
    return ids, ids


def sequence(width: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(4, 8, width, device="meta"),)


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its example inputs of four samples."""
    image = (torch.zeros(4, 3, 16, 16, device="meta"),)
    with torch.device("meta"):
        made: dict[str, tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = {
            "gpt": (GPT, tokens(4)),
            "grouped": (Grouped, sequence(32)),
            "vision": (VisionAttention, sequence(16)),
            "moe": (MoE, sequence(16)),
            "resnet": (ResNet, image),
            "unet": (UNet, image),
        }
        model, args = made[name]
        return model(), args


NAMES = ("gpt", "grouped", "vision", "moe", "resnet", "unet")


def traced(name: str, batch: int = 4) -> TracedModel:
    model, args = build(name)
    return trace(model, args, batch=batch)
