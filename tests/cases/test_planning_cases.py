"""Situations from the field with their right answers (letters: kinds of situation).

A tracing, B tensor-parallel limits, C pipeline limits, D memory, E throughput, H use.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import planner
from cost_models.hardware import parse_cluster
from cost_models.units import parse_bandwidth, parse_bytes
from passes.ir import TensorKind
from planner.errors import InfeasibleError, PlannerError
from planner.plan import Plan
from tests.cases import models


def plan_of(
    model: torch.nn.Module,
    cluster: str,
    batch: int,
    *inputs: torch.Tensor,
    pins: dict[str, object] | None = None,
    memory_limit: int | None = None,
    **workload: object,
) -> Plan:
    training = planner.Training(
        global_batch=batch,
        memory_limit_bytes=memory_limit,
        **workload,  # type: ignore[arg-type]
    )
    plan = planner.optimize(
        model,
        cluster=cluster,
        workload=training,
        example_inputs=inputs or None,
        pins=pins or {},  # type: ignore[arg-type]
    )
    assert plan.check() == []
    return plan


@pytest.mark.slow
def test_a1_mixture_of_experts_is_accepted_as_it_is() -> None:
    model = models.mixtral_8x7b()
    plan = plan_of(model, "16xA100-80GB", 64, seq_len=4096)
    assert plan.model.parameters == 46_702_792_704
    # 747 GB of state on 16 x 80 GB: only if every rank holds a sixteenth
    state = plan.stages[0].memory
    total = state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes
    assert total >= 46_702_792_704 * 16 / 16
    assert plan.parallelism.zero > 0 or plan.parallelism.num_gpus == 16


def test_a8_a_tied_matrix_is_one_tensor_with_two_names() -> None:
    plan = plan_of(models.distilbert(), "4xT4", 128, precision="fp16", seq_len=128)
    assert plan.model.parameters == 66_985_530
    names = plan.model.tied["distilbert.embeddings.word_embeddings.weight"]
    assert names == ("vocab_projector.weight",)
    assert "vocab_projector.weight" not in plan.placements


def test_a13_a_default_causal_lm_just_works() -> None:
    with torch.device("meta"):
        config = models.transformers.LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
        model = models.transformers.LlamaForCausalLM(config)
    assert model.config.use_cache
    plan = plan_of(model, "2xA10G", 4, seq_len=128)
    assert plan.model.parameters == 37_227_008
    assert model.config.use_cache, "the user's module is not changed"


def _qwen_7b() -> torch.nn.Module:
    return models.qwen2(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def test_b1_28_heads_refuse_eight_way_tensor_parallelism() -> None:
    model = _qwen_7b()
    with pytest.raises(InfeasibleError, match="28 heads not divisible by 8"):
        plan_of(model, "8xH100", 32, seq_len=4096, pins={"tp": 8})
    plan = plan_of(model, "8xH100", 32, seq_len=4096)
    assert plan.model.parameters == 7_615_616_512
    assert plan.parallelism.tp in (1, 2, 4)
    assert plan.parallelism.data_parallel >= 2 or plan.parallelism.pp >= 2


@pytest.mark.parametrize(("tp", "legal"), [(2, True), (4, True), (7, False)])
def test_b1_the_legal_degrees(tp: int, legal: bool) -> None:
    from planner.models import resolve_model
    from planner.search.job import tensor_limit
    from planner.traces import GraphSource

    source = resolve_model(_qwen_7b(), seq_len=128)
    graph = GraphSource(source, lambda _: source, None).graph()
    assert (tensor_limit(graph, tp) is None) == legal


def test_b4_an_odd_vocabulary_is_padded_not_refused() -> None:
    """32,001 rows over 2 ranks: 32,002 with padding, and the plan says so."""
    model = models.llama(
        vocab_size=32001,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    )
    plan = plan_of(
        model, "8xA100", 8, seq_len=2048, pins={"tp": 2, "sequence_parallel": False}
    )
    assert plan.model.parameters == 13_015_874_560
    assert plan.parallelism.tp == 2
    head = plan.placements["lm_head.weight"].outputs[0]
    assert head.placement["tp"] == "S(0)"
    assert head.padded


def test_c1_no_layer_vanishes_when_30_do_not_divide_by_4() -> None:
    model = models.gpt2(
        vocab_size=50257, n_positions=1024, n_embd=1536, n_layer=30, n_head=16
    )
    plan = plan_of(model, "4xA100-40GB", 32, seq_len=1024, pins={"pp": 4})
    layers = [
        sum(name.startswith("transformer.h.") for name in s.blocks) for s in plan.stages
    ]
    assert sum(layers) == 30
    held = {b.name: b.parameters for b in plan.model.blocks}
    per_stage = [sum(held[name] for name in s.blocks) for s in plan.stages]
    assert sum(per_stage) == 928_716_288
    # the head costs as much as several layers: its stage has fewer
    assert layers[-1] < max(layers)


def test_c4_a_tied_embedding_lies_on_both_ends_and_its_gradient_is_summed() -> None:
    model = models.qwen2(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    plan = plan_of(model, "4xA10G", 16, seq_len=2048, pins={"pp": 4})
    assert plan.model.parameters == 1_543_714_304
    record = plan.placements["model.embed_tokens.weight"]
    stages = {s.index for s in plan.stages for b in record.blocks if b in s.blocks}
    assert stages == {0, 3}
    tied = [c for c in plan.collectives if c.where == "tied gradients"]
    assert {c.stage for c in tied} == {0, 3}
    assert tied[0].bytes == 233_373_696 * 2  # the matrix in bf16
    layers = [sum(n.startswith("model.layers.") for n in s.blocks) for s in plan.stages]
    assert sum(layers) == 28
    assert layers != [7, 7, 7, 7]


def test_d2_weights_alone_fill_a_16_gb_card_under_zero_2() -> None:
    model = models.mpt_7b()
    with pytest.raises(InfeasibleError, match="missing on stage 0") as found:
        plan_of(
            model, "2xV100-PCIE-16GB", 2, precision="fp16", seq_len=512,
            pins={"zero": 2, "micro_batch_size": 1},
        )  # fmt: skip
    assert "GPUs are enough" in found.value.fix
    shape = planner.Parallelism(dp_shard=2, zero=2, recompute="full")
    training = planner.Training(global_batch=2, seq_len=512, precision="fp16")
    priced = planner.predict(model, "2xV100-PCIE-16GB", training, shape)
    memory = priced.stages[0].memory
    assert memory.parameters_bytes == 6_649_286_656 * 2  # 12.385 GiB, not 12.39 "GB"
    assert memory.parameters_bytes / 2**30 == pytest.approx(12.385, abs=1e-3)
    assert not priced.verdict.fits
    with pytest.raises(PlannerError, match="no bf16"):
        plan_of(model, "2xV100-PCIE-16GB", 2, seq_len=512)


def test_e8_the_peak_is_named_dense_and_of_the_device() -> None:
    """104 % of an A100's peak is 32.8 % of an H100's."""
    h100 = parse_cluster("8xH100-SXM").device
    assert h100.peak("bf16") == pytest.approx(989.4e12, rel=1e-3)
    assert 1.04 * parse_cluster("8xA100").device.peak("bf16") / h100.peak("bf16") == (
        pytest.approx(0.328, abs=1e-3)
    )
    plan = plan_of(models.llama_1b(), "8xH100-SXM", 480, seq_len=1024)
    e = plan.estimate
    assert (e.peak_dtype, e.peak_flops_per_s) == ("bf16", h100.peak("bf16"))
    assert 0 < e.mfu <= 1
    assert "dense bf16" in plan.summary()


def test_e9_seven_gpus_work() -> None:
    model = models.llama_7b()
    with pytest.raises(InfeasibleError, match="32 heads not divisible by 7"):
        plan_of(model, "7xRTX4090", 56, seq_len=2048, pins={"tp": 7})
    data = plan_of(model, "7xRTX4090", 56, seq_len=2048, pins={"zero": 3, "pp": 1})
    assert data.parallelism.data_parallel == 7
    state = data.stages[0].memory
    held = state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes
    assert held == pytest.approx(107.8e9 / 7, rel=0.01)
    pipeline = plan_of(model, "7xRTX4090", 56, seq_len=2048, pins={"pp": 7})
    layers = [
        sum(n.startswith("model.layers.") for n in s.blocks) for s in pipeline.stages
    ]
    assert sum(layers) == 32
    assert set(layers) <= {3, 4, 5}
    with pytest.raises(PlannerError, match="batch of 8 can not be divided over 7"):
        plan_of(model, "7xRTX4090", 8, seq_len=2048)


def test_h3_units() -> None:
    assert parse_bytes("80GB") == 80e9
    assert parse_bytes("80GiB") == 85_899_345_920
    assert parse_bytes("1Gib") == 134_217_728
    assert parse_bandwidth("400Gb/s") == 50e9
    assert parse_bandwidth("400GB/s") == 400e9
    for memory in ("80GB", "80GiB"):
        for link, rate in (("400Gb/s", 50e9), ("400GB/s", 400e9)):
            cluster = parse_cluster(
                {"gpu": "A100", "num_gpus": 16, "mem": memory, "inter": link}
            )
            assert cluster.device.memory_bytes == parse_bytes(memory)
            assert cluster.network.bytes_per_s == rate


SCRIPT = """
import planner
plan = planner.optimize("gpt2", cluster="16xA100-80GB",
    workload=planner.Training(global_batch=64, seq_len=1024), pins={"tp": 2})
print(plan.to_json(), end="")
"""


def test_h5_two_processes_write_the_same_bytes() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def test_h8_a_pin_and_a_limit_that_conflict_are_named() -> None:
    model = models.llama_1b()
    pin = {"model.embed_tokens.weight": "R"}
    with pytest.raises(InfeasibleError) as found:
        plan_of(model, "4xL4", 16, seq_len=2048, memory_limit=4 * 10**9, pins=pin)
    assert "bytes" in str(found.value)
    assert "the pin model.embed_tokens.weight=R costs" in found.value.fix
    assert "a limit of" in found.value.fix
    roomy = plan_of(model, "4xL4", 16, seq_len=2048, pins={**pin, "zero": 3})
    record = roomy.placements["model.embed_tokens.weight"]
    assert record.outputs[0].placement == {}


def test_h10_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    from planner.api import layout_from
    from planner.search.job import Job
    from tests.small import gpt_graph, job_of

    plan = plan_of(models.llama_1b(), "2xL4", 4, seq_len=128)
    path = tmp_path / "plan.json"
    plan.save(path)
    again = planner.load_plan(path)
    assert again == plan
    assert again.to_json() == plan.to_json()
    other: Job = job_of(gpt_graph(), "2xL4")
    with pytest.raises(PlannerError, match="another model"):
        layout_from(other, again)
    # the document alone gives every layer's stage and every tensor's placement
    chunks = {
        c * len(again.stages) + s.index: s.blocks[sum(s.chunks[:c]) :][: s.chunks[c]]
        for s in again.stages
        for c in range(len(s.chunks))
    }
    placed = [b for number in sorted(chunks) for b in chunks[number]]
    assert placed == [b.name for b in again.model.blocks]
    kinds = {r.what for r in again.placements.values()}
    assert kinds >= {"parameter", "op"}
    assert TensorKind.PARAMETER.value in kinds
