"""Serving engines: a few named physical constants each, fitted on published runs.

A profile says what the software adds to the kernels' own time. The constants are in
``engines.json``, written by ``benchmarks/fit/fit_serving.py`` with the rows and the
error they were fitted on; an engine without an entry has the defaults below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from planner.errors import PlannerError


@dataclass(frozen=True, slots=True)
class Engine:
    """Constants of one serving engine; seconds and ratios.

    step_s: host time of one step (scheduler, sampling) that the GPU waits for.
    sequence_s: host time per sequence in a step. launch_s: device gap per kernel, after
    CUDA graphs where the engine has them. matrix, experts: what (grouped) products take
    over their roofline, relative to the kernel models; attention, stream: time of
    attention and pointwise kernels over the models'. comm: time of collectives over the
    link's. request_s: from a request's arrival to its prefill, beside queueing.
    prefill: time of a prefill step over its kernels'. burst: share of the other
    requests' prefills that a request of a closed loop waits for. overlap: share of
    prefill time that decode steps do not see (chunks that ride along). token_s: host
    time per prompt token. wait: decode
    steps that pass before a prefill starts. kernels: per layer.
    """

    name: str
    description: str
    graphs: bool = True
    step_s: float = 1e-3
    sequence_s: float = 5e-6
    launch_s: float = 1e-6
    matrix: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    stream: float = 1.0
    comm: float = 1.0
    request_s: float = 1e-2
    prefill: float = 1.0
    burst: float = 0.5
    overlap: float = 0.0
    token_s: float = 1e-6
    wait: float = 0.5
    kernels: float = 10.0
    reserve_bytes: float = 1.5 * 2**30
    graph_bytes: float = 0.5 * 2**30


#: Fields that a fit may set.
FITTED = (
    "step_s",
    "sequence_s",
    "launch_s",
    "matrix",
    "experts",
    "attention",
    "comm",
    "request_s",
    "prefill",
    "burst",
    "overlap",
    "token_s",
    "wait",
)

_ENGINES = (
    Engine("vllm", "vLLM: continuous batching, chunked prefill, CUDA graphs"),
    Engine("sglang", "SGLang: continuous batching, overlapped scheduler, CUDA graphs"),
    Engine("trtllm", "TensorRT-LLM 1.x PyTorch backend: in-flight batching"),
    Engine(
        "trtllm-static",
        "TensorRT-LLM 0.5 to 0.9 engines in static batches",
        step_s=2e-4,
        request_s=1e-3,
    ),
    Engine(
        "fastertransformer",
        "FasterTransformer: C++ kernels in static batches, no graphs",
        graphs=False,
        step_s=2e-4,
        launch_s=3e-6,
        request_s=1e-3,
    ),
    Engine("lmdeploy", "LMDeploy TurboMind: C++ engine", graphs=False, launch_s=3e-6),
    Engine("gptfast", "gpt-fast: compiled decode in CUDA graphs", step_s=1e-4),
    Engine(
        "eager",
        "plain PyTorch, one kernel per op launched by the host",
        graphs=False,
        launch_s=2e-5,
        kernels=24.0,
    ),
)

#: Names of software profiles that stand for an engine.
ALIASES = {"tensorrt-llm": "trtllm", "compiled": "vllm", "litgpt": "eager"}


def engine_names() -> tuple[str, ...]:
    return tuple(e.name for e in _ENGINES)


@lru_cache(maxsize=1)
def fitted() -> dict[str, dict[str, Any]]:
    """The fit file: engine to {values, rows, error, source}."""
    path = files("planner.serving").joinpath("engines.json")
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def load_engine(name: str) -> Engine:
    """An engine by name or alias, ``NAME@VERSION`` for one release of it (the engine's
    own constants where that release was not measured); PlannerError lists the known."""
    family, _, version = name.partition("@")
    engine = unfitted(family)
    known = fitted()
    entry = known.get(f"{engine.name}@{version}") or known.get(engine.name, {})
    return replace(engine, **entry.get("values", {}))


def unfitted(name: str) -> Engine:
    """An engine with its defaults alone; PlannerError lists the known ones."""
    wanted = ALIASES.get(name, name)
    for engine in _ENGINES:
        if engine.name == wanted:
            return engine
    raise PlannerError(
        "unknown serving engine", name, f"use {', '.join(engine_names())}"
    )
