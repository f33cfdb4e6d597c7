"""Sliding windows that a model's configuration states.

A traced mask hides its window, so where the module carries a Hugging Face
configuration its own words are read: ``layer_types`` with ``sliding_window`` (Gemma,
gpt-oss), ``sliding_window`` alone (Mistral), ``max_window_layers`` (Qwen2).
"""

from __future__ import annotations

from typing import Any

from torch import nn


def windows_of(module: nn.Module) -> dict[int, int]:
    """Window by layer; 0 where a layer sees everything. Empty: nothing stated."""
    config: Any = getattr(module, "config", None)
    if config is None:
        return {}
    text = getattr(config, "text_config", None) or config
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "num_hidden_layers", 0)
    if not window or not layers:
        return {}
    kinds = getattr(text, "layer_types", None)
    if kinds:
        attend = [k for k in kinds if "attention" in k and "linear" not in k]
        return {i: window if "sliding" in k else 0 for i, k in enumerate(attend)}
    if getattr(text, "use_sliding_window", True) is False:
        return {}
    first = getattr(text, "max_window_layers", None)
    whole = int(first) if getattr(text, "use_sliding_window", False) and first else 0
    return {i: int(window) if i >= whole else 0 for i in range(layers)}
