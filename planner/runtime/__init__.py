"""A plan on ``torch.distributed``: :func:`apply`, audit, validate. Needs no solver."""

from planner.runtime.apply import Parallel, apply

__all__ = ["Parallel", "apply"]
