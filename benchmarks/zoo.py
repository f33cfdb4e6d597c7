"""Models that people bring: traced, lowered, counted, planned and checked.

    python -m benchmarks.zoo --family torchvision|timm|hf [--limit N] [--shard i/n]
        [--models a,b] [--gpus 8,64] [--record benchmarks/results/zoo.json]

For each model: its trace and operator graph, forward FLOPs against torch's
FlopCounterMode on the module itself, the parameter count, and a checked plan on every
cluster. Prints one JSON document; failures are grouped by cause. ``median_s`` is the
time of the trace and the first plan.

``--limit N`` takes N models at equal distances through the family's sorted list.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from passes.errors import PassError
from passes.ir import OpGraph, OpKind
from passes.pipeline import run_passes
from passes.trace import trace
from planner.errors import PlannerError
from planner.models import ModelSource, resolve_model

SEQ_LEN = 128
#: Hugging Face model types by what they stand for; layers are cut to two, widths stay.
HF_TYPES = {
    "causal": "gpt2 llama mistral qwen2 qwen3 gemma gemma2 phi phi3 gpt_neox gptj opt "
    "bloom falcon stablelm olmo2 cohere granite starcoder2 codegen mpt",
    "moe": "mixtral qwen2_moe qwen3_moe olmoe deepseek_v3 phimoe granitemoe",
    "encoder": "bert roberta albert electra deberta-v2 distilbert mpnet modernbert "
    "xlm-roberta camembert",
    "encoder_decoder": "t5 mt5 bart mbart pegasus marian umt5",
    "vision": "vit deit swin convnext beit dinov2 resnet regnet segformer mobilevit",
    "recurrent": "mamba mamba2 rwkv recurrent_gemma falcon_mamba",
    "other": "clip whisper wav2vec2 hubert xlnet longformer funnel",
}


@dataclass(slots=True)
class Record:
    """What became of one model; ``cause`` is empty where all went well."""

    model: str
    traced: bool = False
    flops_equal: bool = False
    parameters_equal: bool = False
    planned: bool = False
    checked: bool = False
    step: str = "resolve"
    cause: str = ""
    named: bool = True  # the error says what to do (PassError, PlannerError)
    trace_and_plan_s: float = 0.0
    flops: tuple[int, int] = (0, 0)  # the graph's, torch's
    unknown: list[str] = field(default_factory=list)


def torch_forward_flops(module: nn.Module, args: Any, kwargs: Any) -> int:
    """Attention as two products: the fused kernels have no formula off the GPU."""
    with (
        torch.no_grad(),
        FlopCounterMode(display=False) as mode,
        sdpa_kernel(SDPBackend.MATH),
    ):
        module(*args, **kwargs)
        return mode.get_total_flops()


def graph_forward_flops(graph: OpGraph) -> int:
    """Without what torch has no formula for: grouped products and recurrences."""
    skipped = (OpKind.GROUPED_GEMM, OpKind.SCAN)
    return sum(o.forward_flops for o in graph.ops if o.kind not in skipped)


def names_of(family: str) -> list[str]:
    """All models of a family, in a fixed order."""
    if family == "torchvision":
        import torchvision

        return sorted(f"torchvision:{n}" for n in torchvision.models.list_models())
    if family == "timm":
        import timm

        return [f"timm:{n}" for n in sorted(timm.list_models())]
    return [f"hf:{t}" for text in HF_TYPES.values() for t in text.split()]


def spread(names: Sequence[str], limit: int | None) -> list[str]:
    """``limit`` names at equal distances."""
    if limit is None or limit >= len(names):
        return list(names)
    return [names[i * len(names) // limit] for i in range(limit)]


def _hf_config(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[kind]()
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(getattr(config, name, None), int):
            try:
                setattr(config, name, 2)
            except (AttributeError, NotImplementedError):
                continue
    return config


def source_of(name: str) -> ModelSource:
    """The model in its training form with arguments for one sample."""
    if name.startswith("hf:"):
        return resolve_model(_hf_config(name[3:]), seq_len=SEQ_LEN, dtype="bf16")
    return resolve_model(name, dtype="bf16")


def examine(name: str, gpus: Sequence[int]) -> Record:
    """Every step for one model; never raises."""
    record = Record(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _steps(record, gpus)
    except Exception as error:
        record.named = isinstance(error, PassError | PlannerError)
        record.cause = f"{record.step}: {cause_of(error)}"
    return record


def _steps(record: Record, gpus: Sequence[int]) -> None:
    source = source_of(record.model)
    module, args, kwargs = source.build()
    record.step = "trace"
    start = time.perf_counter()
    traced = trace(module, args, kwargs, batch=1)
    record.traced = True
    record.step = "lower"
    graph = run_passes(traced)
    record.trace_and_plan_s = time.perf_counter() - start
    unknown = {o.target for o in graph.ops if o.kind is OpKind.UNKNOWN}
    record.unknown = sorted(unknown)
    parameters = sum(p.numel() for p in module.parameters())
    record.parameters_equal = graph.parameter_count == parameters
    _count(record, graph, lambda: torch_forward_flops(*source.build()))
    record.step = "plan"
    for number, count in enumerate(gpus):
        start = time.perf_counter()
        _plan(record, module, args, kwargs, count)
        if number == 0:
            record.trace_and_plan_s += time.perf_counter() - start
    record.planned = record.checked = True
    record.step = "done"


def _count(record: Record, graph: OpGraph, measure: Callable[[], int]) -> None:
    """torch's count of the module itself; 0 where it does not run on meta tensors."""
    try:
        counted = measure()
    except Exception:
        counted = 0
    record.flops = (graph_forward_flops(graph), counted)
    record.flops_equal = counted > 0 and record.flops[0] == counted


def _plan(record: Record, module: nn.Module, args: Any, kwargs: Any, gpus: int) -> None:
    from planner.api import optimize
    from planner.search.check import check
    from planner.workload import Training

    workload = Training(global_batch=8 * gpus)
    cluster = f"{gpus}xA100"
    if record.model.startswith("hf:"):
        inputs = (tuple(args), dict(kwargs))
        plan = optimize(
            module, cluster, workload, example_inputs=inputs, time_limit_s=1
        )
    else:  # by name: its graph is kept for the next cluster
        plan = optimize(record.model, cluster, workload, time_limit_s=1)
    record.step = "check"
    violations = check(plan)
    if violations:
        raise AssertionError(f"plan check: {violations[0]}")
    record.step = "plan"


def cause_of(error: Exception) -> str:
    """The kind of an error, without the names and numbers of one model."""
    text = str(error).strip().splitlines()
    line = text[0] if text else ""
    line = re.sub(r"(?<![\w.])\d[\d.,xe]*", "N", line)
    line = re.sub(r"'[^']{0,80}'", "'...'", line)
    return f"{type(error).__name__}: {line[:140]}"


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Fractions over a family; FLOPs over what was traced and torch could count."""
    n = len(records)
    failures: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record.cause:
            failures[record.cause].append(record.model)
    countable = [r for r in records if r.traced and r.flops[1]]
    timed = [r.trace_and_plan_s for r in records if r.planned]
    return {
        "n": n,
        "traced_fraction": round(sum(r.traced for r in records) / max(1, n), 4),
        "planned_fraction": round(sum(r.planned for r in records) / max(1, n), 4),
        "parameters_equal_fraction": round(
            sum(r.parameters_equal for r in records) / max(1, n), 4
        ),
        "flops_counted": len(countable),
        "flops_equal_fraction": round(
            sum(r.flops_equal for r in countable) / max(1, len(countable)), 4
        ),
        "flops_differ": {r.model: r.flops for r in countable if not r.flops_equal},
        "flops_not_counted": [r.model for r in records if r.traced and not r.flops[1]],
        "uncaught": [r.model for r in records if not r.named],
        "unknown_ops": sorted({u for r in records for u in r.unknown}),
        "failures": dict(sorted(failures.items(), key=lambda f: -len(f[1]))),
        "median_s": round(median(timed), 2) if timed else None,
    }


def record_results(
    path: Path, family: str, chosen: str, gpus: Sequence[int], records: list[Record]
) -> None:
    """Write a family's part of the results file; other families stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[family] = {
        "date": date.today().isoformat(),
        "sample": chosen,
        "gpus": list(gpus),
        **summary(records),
        "models": [asdict(r) for r in records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a family; exit code 1 if an error came without advice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", required=True, choices=("torchvision", "timm", "hf")
    )
    parser.add_argument("--limit", type=int)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th model from i")
    parser.add_argument("--models", help="only these, comma-separated, without prefix")
    parser.add_argument("--gpus", default="8,64")
    parser.add_argument("--budget-s", type=float, help="start no model after this")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(arguments)
    part, parts = (int(x) for x in given.shard.split("/"))
    names = spread(names_of(given.family), given.limit)[part::parts]
    if given.models:
        names = [f"{given.family}:{m}" for m in given.models.split(",")]
    gpus = [int(g) for g in given.gpus.split(",")]
    records: list[Record] = []
    start = time.perf_counter()
    for name in names:
        if given.budget_s and time.perf_counter() - start > given.budget_s:
            break
        record = examine(name, gpus)
        records.append(record)
        state = record.cause or f"ok {record.trace_and_plan_s:.1f} s"
        print(f"{name}: {state}", file=sys.stderr, flush=True)
        if given.record is not None:
            chosen = f"first {len(records)} of {len(names)} chosen in list order, "
            chosen += f"from {len(names_of(given.family))}"
            record_results(given.record, given.family, chosen, gpus, records)
    document = summary(records)
    print(json.dumps(document, indent=1))
    return 1 if document["uncaught"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
