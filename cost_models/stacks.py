"""Software stacks: a few physical constants of how a framework runs a graph.

Chosen by the user (``--stack``) or by a measured row, named in every plan.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from cost_models.errors import SpecError


@dataclass(frozen=True, slots=True)
class StackProfile:
    """One software stack.

    ``launch_s``: host seconds per kernel launch. ``fused_pointwise``: chains of
    pointwise ops and norms run as one kernel. ``attention_kernel``: flash, efficient
    or math for fused attention calls. ``tp_overlap``, ``dp_overlap``, ``cp_overlap``:
    share of that communication which may run under compute. ``fragmentation``: share
    of the allocator's memory that no tensor can use.
    """

    name: str
    description: str
    launch_s: float
    fused_pointwise: bool
    attention_kernel: str = "flash"
    tp_overlap: float = 0.0
    dp_overlap: float = 0.8
    cp_overlap: float = 0.8
    fragmentation: float = 0.03


_PROFILES = {
    p.name: p
    for p in (
        StackProfile("eager", "PyTorch eager", 7e-6, False, fragmentation=0.05),
        StackProfile("compiled", "torch.compile, FSDP2 and DTensor", 2.5e-6, True),
        StackProfile("megatron", "Megatron-LM, fused kernels", 5e-6, True),
        StackProfile("fsdp", "FSDP, Composer or torchtitan", 5e-6, True),
        StackProfile("nanotron", "nanotron", 7e-6, False),
    )
}


def stack_names() -> tuple[str, ...]:
    """All profile names."""
    return tuple(sorted(_PROFILES))


def load_stack(name: str) -> StackProfile:
    """The profile called ``name``; SpecError with the nearest names otherwise."""
    if name not in _PROFILES:
        near = difflib.get_close_matches(name, _PROFILES, 3) or stack_names()
        raise SpecError("unknown software stack", name, f"use {', '.join(near)}")
    return _PROFILES[name]
