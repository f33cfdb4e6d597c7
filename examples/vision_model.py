"""A model of one's own for the command line: ``examples.vision_model:build``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A small residual network with a loss, which training plans need."""

    def __init__(self, width: int = 64, blocks: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels)


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and example inputs (sizes count, values do not)."""
    return Net(), (torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long))
