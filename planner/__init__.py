"""Chooses tensor, pipeline and data sharding of a PyTorch model for a cluster.

>>> import planner
>>> plan = planner.optimize("gpt3-175b", cluster="64xA100")
>>> print(plan.summary())

Names are loaded on first use, so that ``import planner`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_models.hardware import ClusterSpec as Cluster
    from planner import runtime
    from planner.api import optimize, predict
    from planner.errors import InfeasibleError, PlannerError
    from planner.plan import Plan, Prediction, load_plan
    from planner.workload import Inference, Parallelism, Training, Workload

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "InfeasibleError",
    "Inference",
    "Parallelism",
    "Plan",
    "PlannerError",
    "Prediction",
    "Training",
    "Workload",
    "load_plan",
    "optimize",
    "predict",
    "runtime",
]

_HOME = {
    "Cluster": ("cost_models.hardware", "ClusterSpec"),
    "InfeasibleError": ("planner.errors", "InfeasibleError"),
    "Inference": ("planner.workload", "Inference"),
    "Parallelism": ("planner.workload", "Parallelism"),
    "Plan": ("planner.plan", "Plan"),
    "PlannerError": ("planner.errors", "PlannerError"),
    "Prediction": ("planner.plan", "Prediction"),
    "Training": ("planner.workload", "Training"),
    "Workload": ("planner.workload", "Workload"),
    "load_plan": ("planner.plan", "load_plan"),
    "optimize": ("planner.api", "optimize"),
    "predict": ("planner.api", "predict"),
    "runtime": ("planner.runtime", None),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    module, attribute = _HOME[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
