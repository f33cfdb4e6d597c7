"""Small configurations of the preset classes for the parity matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[int, int], tuple[Tensor, ...]]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixtral() -> Made:
    from planner.presets.llama import Llama, LlamaConfig

    config = LlamaConfig(2, 32, 48, 4, 2, 1008, head_dim=8, experts=4, top_k=2)
    model = Llama(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 3:
                p.normal_(0, 0.2)

    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = _generator(seed)
        ids = torch.randint(1008, (size, 12), generator=g)
        return ids, torch.randint(1008, (size, 12), generator=g)

    return model, batch


def t5() -> Made:
    from planner.presets.t5 import T5, T5Config

    config = T5Config(2, 32, 64, 4, 8, vocab=1008, dropout=0.0)
    model = T5(config)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t5 = model

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.t5(ids, labels=labels)

    with torch.no_grad():
        model.shared.weight.mul_(0.1)

    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = _generator(seed)
        ids = torch.randint(1008, (size, 12), generator=g)
        return ids, torch.randint(1008, (size, 8), generator=g)

    return Wrapped(), batch


def vit() -> Made:
    from planner.presets.vision import ViT, ViTConfig

    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = _generator(seed)
        pixels = torch.randn(size, 3, 28, 28, generator=g)
        return pixels, torch.randint(1008, (size,), generator=g)

    return ViT(ViTConfig(2, 32, 64, 4, patch=4, classes=1008), 28), batch


def resnet() -> Made:
    from planner.presets.vision import ResNet, ResNetConfig

    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = _generator(seed)
        pixels = torch.randn(size, 3, 64, 64, generator=g)
        return pixels, torch.randint(1008, (size,), generator=g)

    return ResNet(ResNetConfig(8, depths=(1, 2, 1, 1), classes=1008)), batch


def unet() -> Made:
    from planner.presets.unet import UNet, UNetConfig

    config = UNetConfig((16, 32), (True, False), 1, 4, 24, 6, 4, 4)

    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = _generator(seed)
        latents = torch.randn(size, 4, 8, 8, generator=g)
        time = torch.randint(1000, (size,), generator=g)
        context = torch.randn(size, 6, 24, generator=g)
        return latents, time, context, torch.randn(size, 4, 8, 8, generator=g)

    return UNet(config), batch


ZOO: dict[str, Callable[[], Made]] = {
    f.__name__: f for f in (mixtral, t5, vit, resnet, unet)
}
