"""ViT-L/16, ResNet-50 and the wide ResNets of the Alpa paper.

Sizes: Dosovitskiy et al. 2021; He et al. 2016 (stride in the 3x3 convolution);
Zheng et al. 2022, table 4 (bottlenecks whose 3x3 convolution is ``widen`` times wide,
1024 classes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.presets.layers import token_loss


@dataclass(frozen=True, slots=True)
class ViTConfig:
    layers: int = 24
    width: int = 1024
    inner: int = 4096
    heads: int = 16
    patch: int = 16
    classes: int = 1000


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    base: int = 64  # channels of the stem
    widen: int = 1  # width of the 3x3 convolutions over the bottleneck's
    depths: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000


VIT_SIZES = {"vit-l16": ViTConfig()}
RESNET_SIZES = {
    "resnet50": ResNetConfig(),
    "wide-resnet": ResNetConfig(320, 32, classes=1024),
    "wide-resnet-250m": ResNetConfig(160, 2, classes=1024),
    "wide-resnet-1b": ResNetConfig(320, 2, classes=1024),
    "wide-resnet-2b": ResNetConfig(448, 2, classes=1024),
    "wide-resnet-4b": ResNetConfig(640, 2, classes=1024),
    "wide-resnet-6.8b": ResNetConfig(320, 16, classes=1024),
    "wide-resnet-13b": ResNetConfig(320, 32, classes=1024),
}


class ViTBlock(nn.Module):
    """Pre-norm encoder layer with fused QKV."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm_1 = nn.LayerNorm(c.width, eps=1e-6)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.norm_2 = nn.LayerNorm(c.width, eps=1e-6)
        self.fc_in = nn.Linear(c.width, c.inner)
        self.act = nn.GELU()
        self.fc_out = nn.Linear(c.inner, c.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.qkv(self.norm_1(x)).split(h, dim=-1)
        q, k, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.fc_out(self.act(self.fc_in(self.norm_2(x))))


class ViT(nn.Module):
    """pixels [b, 3, h, w] -> logits [b, classes]; with labels [b] the mean loss."""

    def __init__(self, c: ViTConfig, image_size: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, c.width, c.patch, c.patch)
        tokens = (image_size // c.patch) ** 2 + 1
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.position = nn.Parameter(torch.zeros(1, tokens, c.width))
        self.layers = nn.ModuleList(ViTBlock(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = nn.Linear(c.width, c.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        first = self.class_token.expand(x.shape[0], -1, -1)
        x = torch.cat((first, x), dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return logits if labels is None else token_loss(logits, labels)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, widen: int, stride: int) -> None:
        super().__init__()
        wide, out = inner * widen, 4 * inner
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, wide, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.conv3 = nn.Conv2d(wide, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """pixels [b, 3, h, w] -> logits [b, classes]; with labels [b] the mean loss."""

    def __init__(self, c: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c.base, 7, 2, padding=3, bias=False)
        self.stem_bn = nn.BatchNorm2d(c.base)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.stages = nn.ModuleList()
        channels = c.base
        for i, depth in enumerate(c.depths):
            inner = c.base * 2**i
            blocks: list[nn.Module] = []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(Bottleneck(channels, inner, c.widen, stride))
                channels = 4 * inner
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(channels, c.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.pool(self.relu(self.stem_bn(self.stem(pixels))))
        for stage in self.stages:
            x = stage(x)
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else token_loss(logits, labels)
