"""A serving plan as launch arguments of vLLM, TensorRT-LLM and SGLang.

Only options that those servers document are written: vLLM's engine arguments, the
``trtllm-serve`` options with its extra LLM API options file, and SGLang's server
arguments. One server is one instance; several are started side by side, each on its own
GPUs, behind a router that the plan does not choose.
"""

from __future__ import annotations

import json

from planner.errors import PlannerError
from planner.export.base import Export, Figures, Gap
from planner.plan import Plan
from planner.plan.serving import ServingRecord
from planner.workload import Inference

#: Weight format to what each server calls the quantisation of a checkpoint.
VLLM_QUANTISATION = {"fp8": "fp8", "int4": "awq", "int8": "", "fp4": "modelopt_fp4"}
SGLANG_QUANTISATION = {
    "fp8": "fp8", "int4": "awq", "int8": "w8a8_int8", "fp4": "modelopt_fp4",
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Part of a GPU that servers claim for weights, cache and graphs.
LOWEST_FRACTION, HIGHEST_FRACTION = 0.05, 0.98
SERVED = "MODEL"  # the user's checkpoint


def _facts(plan: Plan) -> tuple[ServingRecord, Inference]:
    if plan.serving is None or not isinstance(plan.workload, Inference):
        raise PlannerError(
            "the plan is of training",
            plan.model.name,
            "make one with `planner serve-plan`",
        )
    return plan.serving, plan.workload


def _figures(r: ServingRecord) -> Figures:
    world = r.tp * r.pp * r.instances
    whole = r.instances * r.batch_limit
    return Figures(world, r.instances, r.batch_limit, 1, whole)


def _fraction(r: ServingRecord) -> float:
    """Memory that the server may take: all but what the plan keeps in reserve."""
    worst = max(r.memory, key=lambda m: m.reserve_bytes / m.limit_bytes)
    share = 1 - worst.reserve_bytes / worst.limit_bytes
    return round(min(HIGHEST_FRACTION, max(LOWEST_FRACTION, share)), 3)


def _length(w: Inference) -> int:
    return w.prompt_len + w.output_len


def _gpus(r: ServingRecord, instance: int) -> str:
    """The GPUs of one instance on a node, as CUDA_VISIBLE_DEVICES wants them."""
    each = r.tp * r.pp
    return ",".join(str(instance * each + i) for i in range(each))


def _script(r: ServingRecord, words: list[str], port_flag: str) -> str:
    """A shell script that starts every instance."""
    lines = ["#!/bin/sh", "# Set MODEL to the checkpoint to serve.", "set -eu"]
    for k in range(r.instances):
        command = " ".join([*words, port_flag, str(8000 + k)])
        lines.append(f"CUDA_VISIBLE_DEVICES={_gpus(r, k)} {command} &")
    return "\n".join([*lines, "wait"]) + "\n"


def _common_gaps(plan: Plan, r: ServingRecord) -> list[Gap]:
    gaps: list[Gap] = []
    if r.prefill_instances:
        gaps.append(
            Gap(
                f"{r.prefill_instances} of {r.instances} instances only prefill",
                "all are started alike; add the server's own transfer of caches",
            )
        )
    if r.weights in ("int4", "int8", "fp4"):
        gaps.append(
            Gap(
                f"{r.weights} weights" + (f" in groups of {r.group}"
                if r.weights == "int4" else ""),
                "the checkpoint decides: give one that is quantised so",
            )
        )  # fmt: skip
    if any(g.nodes > 1 for g in plan.cluster.groups):
        gaps.append(
            Gap("several nodes", "the script numbers the GPUs as if on one node")
        )
    return gaps


def vllm(plan: Plan) -> Export:
    """``vllm serve`` with its engine arguments."""
    r, w = _facts(plan)
    gaps = _common_gaps(plan, r)
    args: dict[str, object] = {
        "tensor-parallel-size": r.tp,
        "pipeline-parallel-size": r.pp,
        "max-model-len": _length(w),
        "max-num-seqs": r.batch_limit,
        "gpu-memory-utilization": _fraction(r),
        "dtype": DTYPES.get(r.weights, "auto"),
    }
    if r.attention_dp > 1:
        args["tensor-parallel-size"] = max(1, r.tp // r.attention_dp)
        args["data-parallel-size"] = r.attention_dp
    if VLLM_QUANTISATION.get(r.weights):
        args["quantization"] = VLLM_QUANTISATION[r.weights]
    if r.kv == "fp8":
        args["kv-cache-dtype"] = "fp8"
    elif r.kv == "int8":
        gaps.append(Gap("an int8 cache", "the cache stays in the model's dtype"))
    words = ["vllm", "serve", f"${SERVED}"]
    for name, value in args.items():
        words += [f"--{name}", str(value)]
    if r.ep > 1:
        words.append("--enable-expert-parallel")
    files = (
        ("serve.sh", _script(r, words, "--port")),
        ("engine_args.json", json.dumps(args, indent=1, sort_keys=True) + "\n"),
    )
    notes = _notes(r)
    return Export(
        "vllm", files, _figures(r), tuple(gaps), notes, "MODEL=... sh serve.sh"
    )


def sglang(plan: Plan) -> Export:
    """``python -m sglang.launch_server`` with its arguments."""
    r, w = _facts(plan)
    gaps = _common_gaps(plan, r)
    args: dict[str, object] = {
        "tp-size": r.tp,
        "pp-size": r.pp,
        "context-length": _length(w),
        "max-running-requests": r.batch_limit,
        "mem-fraction-static": round(
            max(LOWEST_FRACTION, _fraction(r) - _dynamic(r)), 3
        ),
        "dtype": DTYPES.get(r.weights, "auto"),
        "cuda-graph-max-bs": r.batch_limit,
    }
    if r.ep > 1:
        args["ep-size"] = r.ep
    if r.attention_dp > 1:
        args["dp-size"] = r.attention_dp
    if SGLANG_QUANTISATION.get(r.weights):
        args["quantization"] = SGLANG_QUANTISATION[r.weights]
    if r.kv == "fp8":
        args["kv-cache-dtype"] = "fp8_e4m3"
    elif r.kv == "int8":
        gaps.append(Gap("an int8 cache", "the cache stays in the model's dtype"))
    words = ["python", "-m", "sglang.launch_server", "--model-path", f"${SERVED}"]
    for name, value in args.items():
        words += [f"--{name}", str(value)]
    if r.attention_dp > 1:
        words.append("--enable-dp-attention")
    files = (
        ("serve.sh", _script(r, words, "--port")),
        ("server_args.json", json.dumps(args, indent=1, sort_keys=True) + "\n"),
    )
    return Export(
        "sglang", files, _figures(r), tuple(gaps), _notes(r), "MODEL=... sh serve.sh"
    )


def _dynamic(r: ServingRecord) -> float:
    """Memory beside SGLang's static pool: workspace and graphs."""
    return max((m.workspace_bytes + m.graphs_bytes) / m.limit_bytes for m in r.memory)


def tensorrt_llm(plan: Plan) -> Export:
    """``trtllm-serve`` and its extra LLM API options."""
    r, w = _facts(plan)
    gaps = _common_gaps(plan, r)
    words = [
        "trtllm-serve", f"${SERVED}", "--backend", "pytorch",
        "--tp_size", str(r.tp), "--pp_size", str(r.pp),
        "--max_batch_size", str(r.batch_limit),
        "--max_seq_len", str(_length(w)),
        "--max_num_tokens", str(max(8192, w.prompt_len)),
        "--kv_cache_free_gpu_memory_fraction", str(_cache_fraction(r)),
        "--extra_llm_api_options", "extra_llm_api_options.yaml",
    ]  # fmt: skip
    if r.ep > 1:
        words += ["--ep_size", str(r.ep)]
    lines = [
        f"enable_attention_dp: {'true' if r.attention_dp > 1 else 'false'}",
        "enable_chunked_prefill: true",
        "kv_cache_config:",
        f"  free_gpu_memory_fraction: {_cache_fraction(r)}",
        f"  dtype: {'fp8' if r.kv == 'fp8' else 'auto'}",
        "cuda_graph_config:",
        f"  max_batch_size: {r.batch_limit}",
        "  enable_padding: true",
    ]
    if 1 < r.attention_dp < r.tp:
        gaps.append(
            Gap(
                f"attention on {r.attention_dp} groups of {r.tp // r.attention_dp}",
                "attention data parallelism over all ranks",
            )
        )
    if r.kv == "int8":
        gaps.append(Gap("an int8 cache", "the cache stays in the model's dtype"))
    files = (
        ("serve.sh", _script(r, words, "--port")),
        ("extra_llm_api_options.yaml", "\n".join(lines) + "\n"),
    )
    return Export(
        "tensorrt-llm", files, _figures(r), tuple(gaps), _notes(r),
        "MODEL=... sh serve.sh",
    )  # fmt: skip


def _cache_fraction(r: ServingRecord) -> float:
    """Of the memory that is free once weights are loaded: what is not kept back."""
    least = 1.0
    for m in r.memory:
        free = max(1, m.limit_bytes - m.weights_bytes)
        kept = m.reserve_bytes + m.workspace_bytes + m.graphs_bytes
        least = min(least, 1 - kept / free)
    return round(min(HIGHEST_FRACTION, max(LOWEST_FRACTION, least)), 3)


def _notes(r: ServingRecord) -> tuple[str, ...]:
    return (
        f"expected: first token {r.ttft_s * 1e3:.4g} ms, {r.tpot_s * 1e3:.4g} ms a "
        f"token, {r.tokens_per_s:,.0f} tokens/s with {r.batch_limit} requests in "
        f"flight on each of {r.instances} instances",
    )
