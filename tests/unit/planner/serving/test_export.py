"""Launch arguments say what the plan says."""

import itertools
import json
import shlex
from typing import Any

import pytest

import planner
from planner.errors import PlannerError
from planner.export import export
from planner.plan import Plan

#: Options that the servers document (vLLM 0.10-0.19 `vllm serve --help=all`, SGLang 0.5
#: server arguments, TensorRT-LLM 1.x `trtllm-serve --help`).
KNOWN = {
    "vllm": {
        "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
        "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "--dtype",
        "--quantization", "--kv-cache-dtype", "--enable-expert-parallel", "--port",
    },
    "sglang": {
        "--model-path", "--tp-size", "--pp-size", "--ep-size", "--dp-size",
        "--context-length", "--max-running-requests", "--mem-fraction-static",
        "--dtype", "--cuda-graph-max-bs", "--quantization", "--kv-cache-dtype",
        "--enable-dp-attention", "--port",
    },
    "tensorrt-llm": {
        "--backend", "--tp_size", "--pp_size", "--ep_size", "--max_batch_size",
        "--max_seq_len", "--max_num_tokens", "--kv_cache_free_gpu_memory_fraction",
        "--extra_llm_api_options", "--port",
    },
}  # fmt: skip


def plan_of(**fields: Any) -> Plan:
    workload = planner.Inference(prompt_len=1000, output_len=24, **fields)
    return planner.optimize(
        "llama3-8b", cluster="4xH100", workload=workload, pins={"tp": 2}
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(weights="fp8", kv="fp8", objective="throughput", tpot_limit_s=0.02)


@pytest.mark.parametrize("target", sorted(KNOWN))
def test_arguments(plan: Plan, target: str) -> None:
    r = plan.serving
    assert r is not None
    made = export(plan, target)
    starts = [x for x in made.text("serve.sh").splitlines() if x.startswith("CUDA")]
    assert len(starts) == r.instances
    used: list[str] = []
    for line in starts:
        words = shlex.split(line.removesuffix("&"))
        options = [w for w in words if w.startswith("--")]
        assert set(options) <= KNOWN[target]
        assert len(options) == len(set(options))
        given = dict(itertools.pairwise(words))
        tp = next(given[n] for n in given if n.startswith("--t") and "p" in n)
        assert int(tp) == r.tp
        assert str(r.batch_limit) in words
        assert "1024" in words
        used += words[0].partition("=")[2].split(",")
    assert len(used) == len(set(used)) == r.tp * r.pp * r.instances
    assert "fp8" in "".join(text for _, text in made.files)


def test_memory_fractions_leave_the_reserve(plan: Plan) -> None:
    assert plan.serving is not None
    made = json.loads(export(plan, "vllm").text("engine_args.json"))
    kept = plan.serving.memory[0].reserve_bytes / plan.serving.memory[0].limit_bytes
    assert made["gpu-memory-utilization"] == pytest.approx(1 - kept, abs=1e-3)


def test_what_a_server_can_not_say_is_a_gap() -> None:
    plan = plan_of(weights="int4", kv="int8", objective="throughput")
    for target in KNOWN:
        whats = " ".join(g.what for g in export(plan, target).gaps)
        assert "int4 weights in groups of 128" in whats
        assert "int8 cache" in whats


def test_training_plans_are_refused() -> None:
    plan = plan_of()
    training = plan.model_copy(update={"serving": None})
    with pytest.raises(PlannerError, match="serve-plan"):
        export(training, "vllm")
