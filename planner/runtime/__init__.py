"""A plan on ``torch.distributed``: :func:`apply`, audit, validate. Needs no solver."""

from planner.runtime.apply import Parallel, apply
from planner.runtime.audit import Audit, audit

__all__ = ["Audit", "Parallel", "apply", "audit"]
