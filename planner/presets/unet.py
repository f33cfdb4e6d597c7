"""The latent-diffusion UNet of Stable Diffusion 1 (Rombach et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class UNetConfig:
    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    attention: tuple[bool, ...] = (True, True, True, False)
    depth: int = 2  # residual blocks a level, one more on the way up
    heads: int = 8
    context: int = 768  # width of the text states
    text_tokens: int = 77
    latent: int = 4
    groups: int = 32


UNET_SIZES = {"unet-sd": UNetConfig()}


class ResBlock(nn.Module):
    def __init__(self, c: UNetConfig, channels: int, out: int) -> None:
        super().__init__()
        time = 4 * c.channels[0]
        self.norm_1 = nn.GroupNorm(c.groups, channels, eps=1e-5)
        self.conv_1 = nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm_2 = nn.GroupNorm(c.groups, out, eps=1e-5)
        self.conv_2 = nn.Conv2d(out, out, 3, padding=1)
        same = channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv_2(F.silu(self.norm_2(y)))


class CrossAttention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(context, width, bias=False)
        self.v = nn.Linear(context, width, bias=False)
        self.proj = nn.Linear(width, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = (self.q(x), self.k(context), self.v(context))
        q, k, v = (self._split(p) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    """Self-attention, attention to the text and a GEGLU over all pixels."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(c.groups, width, eps=1e-6)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.norm_1 = nn.LayerNorm(width)
        self.self_attn = CrossAttention(width, width, c.heads)
        self.norm_2 = nn.LayerNorm(width)
        self.cross_attn = CrossAttention(width, c.context, c.heads)
        self.norm_3 = nn.LayerNorm(width)
        self.geglu = nn.Linear(width, 8 * width)
        self.fc_out = nn.Linear(4 * width, width)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.proj_in(self.norm(x))
        b, ch, h, w = y.shape
        y = y.flatten(2).transpose(1, 2)
        z = self.norm_1(y)
        y = y + self.self_attn(z, z)
        y = y + self.cross_attn(self.norm_2(y), context)
        value, gate = self.geglu(self.norm_3(y)).chunk(2, dim=-1)
        y = y + self.fc_out(value * F.gelu(gate))
        return x + self.proj_out(y.transpose(1, 2).reshape(b, ch, h, w))


class Level(nn.Module):
    """Residual blocks with a transformer after each where the level has attention."""

    def __init__(
        self, c: UNetConfig, widths: Iterable[tuple[int, int]], attention: bool
    ) -> None:
        super().__init__()
        pairs = tuple(widths)
        self.blocks = nn.ModuleList(ResBlock(c, a, b) for a, b in pairs)
        self.attention = nn.ModuleList(
            SpatialTransformer(c, b) for _, b in pairs if attention
        )

    def step(self, i: int, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.blocks[i](x, time)
        return self.attention[i](x, context) if len(self.attention) else x


class UNet(nn.Module):
    """latents [b, 4, h, w], timestep [b], context [b, text, width] -> noise like it.

    With labels (the noise that was added) the mean squared error.
    """

    def __init__(self, c: UNetConfig) -> None:
        super().__init__()
        first, self.first = c.channels[0], c.channels[0]
        self.time_in = nn.Linear(first, 4 * first)
        self.time_out = nn.Linear(4 * first, 4 * first)
        self.conv_in = nn.Conv2d(c.latent, first, 3, padding=1)
        self.down, self.downsample = nn.ModuleList(), nn.ModuleList()
        skips, width = [first], first
        for i, out in enumerate(c.channels):
            widths = [(width, out), *((out, out),) * (c.depth - 1)]
            self.down.append(Level(c, widths, c.attention[i]))
            skips += [out] * c.depth
            width = out
            if i + 1 < len(c.channels):
                self.downsample.append(nn.Conv2d(out, out, 3, 2, padding=1))
                skips.append(out)
        self.mid_1 = ResBlock(c, width, width)
        self.mid_attn = SpatialTransformer(c, width)
        self.mid_2 = ResBlock(c, width, width)
        self.up, self.upsample = nn.ModuleList(), nn.ModuleList()
        for i, out in reversed(list(enumerate(c.channels))):
            widths: list[tuple[int, int]] = []
            for _ in range(c.depth + 1):
                widths.append((width + skips.pop(), out))
                width = out
            self.up.append(Level(c, widths, c.attention[i]))
            if i > 0:
                self.upsample.append(nn.Conv2d(out, out, 3, padding=1))
        self.norm = nn.GroupNorm(c.groups, first, eps=1e-5)
        self.conv_out = nn.Conv2d(first, c.latent, 3, padding=1)

    def _time(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.first // 2
        index = torch.arange(half, device=timestep.device, dtype=torch.float32)
        angle = timestep.float()[:, None] * torch.exp(index * (-math.log(1e4) / half))
        wave = torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)
        return self.time_out(F.silu(self.time_in(wave)))

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        context: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        time = self._time(timestep, latents.dtype)
        x = self.conv_in(latents)
        skips = [x]
        for i, level in enumerate(self.down):
            assert isinstance(level, Level)
            for j in range(len(level.blocks)):
                x = level.step(j, x, time, context)
                skips.append(x)
            if i < len(self.downsample):
                x = self.downsample[i](x)
                skips.append(x)
        x = self.mid_2(self.mid_attn(self.mid_1(x, time), context), time)
        for i, level in enumerate(self.up):
            assert isinstance(level, Level)
            for j in range(len(level.blocks)):
                x = level.step(j, torch.cat((x, skips.pop()), 1), time, context)
            if i < len(self.upsample):
                x = self.upsample[i](F.interpolate(x, scale_factor=2.0))
        noise = self.conv_out(F.silu(self.norm(x)))
        return noise if labels is None else F.mse_loss(noise.float(), labels.float())
