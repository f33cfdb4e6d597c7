"""How much communication shows: exposed = max(0, communication - what hides it).

Where both share the GPU, both slow down: NCCL kernels take SMs and HBM from compute, so
hiding ``c`` seconds of communication costs ``slowdown x c`` seconds of compute. All
functions take and return seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.errors import SpecError


@dataclass(frozen=True, slots=True)
class Exposed:
    """``exposed_s`` adds to the step; ``hidden_s`` runs under compute."""

    exposed_s: float
    hidden_s: float


def exposed(
    communication_s: float,
    overlappable_s: float,
    fraction: float = 1.0,
    slowdown: float = 0.0,
) -> Exposed:
    """``fraction`` of the communication may hide under ``overlappable_s`` of compute.

    ``slowdown``: compute seconds lost per hidden second. exposed = (1 - fraction) C +
    max(0, fraction C - overlappable) + slowdown x hidden.
    """
    if communication_s < 0 or overlappable_s < 0:
        raise SpecError("negative time", f"{communication_s}, {overlappable_s}")
    if not 0 <= fraction <= 1 or slowdown < 0:
        raise SpecError("fraction is in 0..1, slowdown >= 0", f"{fraction}, {slowdown}")
    hidden = min(fraction * communication_s, overlappable_s)
    return Exposed(communication_s - hidden + slowdown * hidden, hidden)


def data_parallel(
    gradients_s: float,
    parameters_s: float,
    backward_s: float,
    forward_s: float,
    fraction: float = 1.0,
    slowdown: float = 0.0,
    tail_s: float = 0.0,
) -> Exposed:
    """Once per step: gradients reduced under backward, parameters gathered.

    ``gradients_s``: reduce-scatter or all-reduce of the rank's gradients;
    ``parameters_s``: ZeRO-1's all-gather (0 without), hidden under the next forward.
    ``backward_s``, ``forward_s``: of the rank's **last** (first) micro-batch alone,
    because gradients are only complete then. ``tail_s``: the part that can not hide,
    namely the last bucket, which is full when backward ends. ``fraction`` = 0: the
    stack does not overlap.
    """
    tail = min(tail_s, gradients_s)
    back = exposed(gradients_s - tail, backward_s, fraction, slowdown)
    ahead = exposed(parameters_s, forward_s, fraction, slowdown)
    return Exposed(
        back.exposed_s + ahead.exposed_s + tail, back.hidden_s + ahead.hidden_s
    )


def prefetched(
    compute_s: Sequence[float],
    gather_s: Sequence[float],
    fraction: float = 1.0,
    slowdown: float = 0.0,
) -> Exposed:
    """ZeRO-3: layer i + 1 is gathered while layer i computes.

    The first gather shows whole; then each layer takes max(compute, next gather).
    ``gather_s`` may hold the layer's reduce-scatter as well, for backward.
    """
    if len(compute_s) != len(gather_s):
        raise SpecError(
            "one gather per layer", f"{len(gather_s)} for {len(compute_s)} layers"
        )
    if not compute_s:
        return Exposed(0.0, 0.0)
    shown, hidden = gather_s[0], 0.0
    for work, ahead in zip(compute_s, gather_s[1:], strict=False):
        layer = exposed(ahead, work, fraction, slowdown)
        shown += layer.exposed_s
        hidden += layer.hidden_s
    return Exposed(shown, hidden)


def tensor_parallel(
    communication_s: float, gemm_s: float, fraction: float = 0.0, slowdown: float = 0.0
) -> Exposed:
    """TP collectives sit on the critical path; ``fraction`` > 0 only where the stack
    splits them into chunks that run beside the GEMM (userbuffers, async TP)."""
    return exposed(communication_s, gemm_s, fraction, slowdown)
