"""Plans in the words of other frameworks: one file a target, one entry here.

An entry is ``target: (module, function, what it writes)``; the function takes a Plan
and returns an :class:`~planner.export.base.Export`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from planner.errors import PlannerError
from planner.export.base import Export, Figures, Gap
from planner.plan import Plan

__all__ = ["TARGETS", "Export", "Figures", "Gap", "export", "targets"]

TARGETS: dict[str, tuple[str, str, str]] = {
    "megatron": ("megatron", "megatron", "Megatron-LM / Megatron-Core arguments"),
    "nemo": ("nemo", "nemo", "a NeMo 2 strategy and trainer in Python"),
    "torchtitan": ("torchtitan", "torchtitan", "a torchtitan TOML job file"),
    "deepspeed": ("deepspeed", "deepspeed", "a DeepSpeed JSON config"),
    "accelerate": ("accelerate", "accelerate", "an Accelerate YAML (FSDP2 or DDP)"),
    "lightning": ("lightning", "lightning", "a Lightning trainer in Python"),
    "dtensor": ("dtensor", "dtensor", "plain DTensor code in Python"),
    "vllm": ("serving", "vllm", "vLLM engine arguments"),
    "tensorrt-llm": ("serving", "tensorrt_llm", "a TensorRT-LLM config"),
    "sglang": ("serving", "sglang", "SGLang server arguments"),
}


def targets() -> tuple[tuple[str, str], ...]:
    """Name and description of every target that this installation has."""
    return tuple(
        (name, what)
        for name, (module, _, what) in TARGETS.items()
        if find_spec(f"planner.export.{module}") is not None
    )


def export(plan: Plan, target: str) -> Export:
    """``plan`` for ``target``; PlannerError where the target can not run it."""
    known = dict(targets())
    name = target.lower().replace("_", "-")
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PlannerError(
            "unknown export target", target, f"{hint}use {', '.join(known)}"
        )
    module, function, _ = TARGETS[name]
    write: Callable[[Plan], Export] = getattr(
        import_module(f"planner.export.{module}"), function
    )
    return write(plan)
