"""A whole serving plan: document, checks, command line, exports."""

import json
from pathlib import Path

import pytest

import planner
from planner.cli import run
from planner.errors import PlannerError
from planner.plan import Plan
from planner.serving.summary import summary


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.optimize(
        "llama3-8b",
        cluster="2xH100",
        workload=planner.Inference(
            prompt_len=1024, output_len=128, tpot_limit_s=0.03, objective="throughput",
            arrival_per_s=2.0,
        ),
    )  # fmt: skip


def test_the_plan_holds_and_survives_the_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    again = planner.load_plan(path)
    assert again == plan
    assert again.check() == []
    assert again.check(recompute=True) == []
    assert again.to_json() == plan.to_json()


def test_the_plan_says_what_serving_needs(plan: Plan) -> None:
    r = plan.serving
    assert r is not None
    assert r.kv_bytes_per_token == 131_072
    assert r.weight_bytes == 8_030_261_248 * 2
    assert r.tpot_s <= 0.03
    assert plan.certificate.status == "optimal"
    assert {p.name for p in r.phases} == {"prefill", "decode"}
    assert r.phases[0].bound == "compute"
    text = summary(plan)
    for word in ("binds", "KV cache", "reserve", "graphs", "batch", "TPOT", "queue"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_small_batch_products_are_memory_bound_and_far_from_peak() -> None:
    alone = planner.optimize(
        "llama3-8b", cluster="1xA100", workload=planner.Inference(batch=1)
    )
    assert alone.serving is not None
    assert alone.serving.kernels
    for kernel in alone.serving.kernels:
        assert kernel.peak_fraction < 0.10
        assert kernel.bound == "memory"
    assert alone.serving.phases[1].bound == "memory"


EDITS = [
    ("tpot_s", 0.0001, "tpot_s"),
    ("batch_limit", 100_000, "batch_limit"),
    ("idle_gpus", 5, "idle"),
    ("tokens_per_s_per_gpu", 1.0, "tokens_per_s_per_gpu"),
    ("kv_bytes_per_token_per_gpu", 1, "bytes a GPU and token"),
    ("weight_bytes", 10**12, "all GPUs hold"),
    ("ttft_s", 1e-6, "ttft"),
    ("weights", "int4", "formats"),
    ("prefill_instances", 9, "no instance to decode"),
]


@pytest.mark.parametrize(("field", "value", "said"), EDITS)
def test_edits_are_found(plan: Plan, field: str, value: object, said: str) -> None:
    assert plan.serving is not None
    changed = plan.serving.model_copy(update={field: value})
    found = plan.model_copy(update={"serving": changed}).check()
    assert any(said in str(v) for v in found), found


def test_a_plan_without_a_serving_part_is_refused(plan: Plan) -> None:
    found = plan.model_copy(update={"serving": None}).check()
    assert [v.rule for v in found] == ["serving"]


def test_memory_edits_are_found(plan: Plan) -> None:
    assert plan.serving is not None
    first = plan.serving.memory[0]
    for update in ({"cache_bytes": 0}, {"limit_bytes": 10**12}):
        memory = (first.model_copy(update=update), *plan.serving.memory[1:])
        changed = plan.serving.model_copy(update={"memory": memory})
        assert plan.model_copy(update={"serving": changed}).check()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = [
        "serve-plan", "llama3-8b", "--cluster", "1xH100", "--weights", "int4-g64",
        "--tpot-limit", "0.02", "-q",
    ]  # fmt: skip
    assert run([*words, "-o", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["serving"]["group"] == 64
    assert document["workload"]["objective"] == "throughput"
    assert run(["check", str(path), "--no-reprice", "-q"]) == 0
    assert run(["explain", str(path)]) == 0
    assert "What binds" in capsys.readouterr().out
    assert run([*words[:-3], "--tpot-limit", "0.00001", "-q"]) == 3
    assert "per output token" in capsys.readouterr().err
    assert (
        run(["serve-plan", "llama3-8b", "--cluster", "1xH100", "--weights", "x"]) == 2
    )


def test_serving_refuses_what_it_does_not_know() -> None:
    with pytest.raises(PlannerError, match="does not take this pin"):
        planner.optimize(
            "llama3-8b", cluster="1xH100", workload=planner.Inference(), pins={"cp": 2}
        )
    with pytest.raises(PlannerError, match="takes no tokens"):
        planner.optimize("resnet50", cluster="1xH100", workload=planner.Inference())
