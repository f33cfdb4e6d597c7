"""Typed reading of module trees and nodes, which torch leaves partly untyped."""

# pyright: reportPrivateUsage=false
# a module's tables have no public names that tell None and duplicates

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg


def named_modules(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """(dotted path, module) of the tree, the root first."""
    walk: Any = model.named_modules
    yield from walk(remove_duplicate=remove_duplicate)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Names of the buffers that the state dict leaves out."""
    return module._non_persistent_buffers_set


def map_nodes(arguments: Any, change: Callable[[fx.Node], Any]) -> Any:
    """``arguments`` with every node replaced."""
    return map_arg(arguments, change)
