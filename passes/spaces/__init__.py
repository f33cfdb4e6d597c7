"""Iteration-space rules by aten op: one entry per op, in one file per family."""

from __future__ import annotations

from passes.spaces import (
    attention,
    conv,
    create,
    gather,
    matmul,
    pointwise,
    reduce,
    views,
)
from passes.spaces.registry import RULES, Call, Ref, RuleMismatch, Spec, rule

__all__ = [
    "RULES",
    "Call",
    "Ref",
    "RuleMismatch",
    "Spec",
    "attention",
    "conv",
    "create",
    "gather",
    "matmul",
    "pointwise",
    "reduce",
    "rule",
    "views",
]
