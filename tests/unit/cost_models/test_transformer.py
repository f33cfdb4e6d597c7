"""Transformers from dimensions: the paper's memory numbers, and counts of models."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.errors import SpecError
from cost_models.memory import training_memory
from cost_models.transformer import (
    KORTHIKANTI,
    Split,
    TransformerDims,
    activation_bytes,
    cost_balanced_layers,
    layer_bytes,
    load_activation_profile,
    rank_memory,
    rank_parameters,
)
from cost_models.units import GIB

DATA = Path(__file__).parents[3] / "benchmarks" / "data"


def paper_rows(column):
    """Rows of the paper's Figures 1 and 7 that state ``column``."""
    text = gzip.decompress((DATA / "memory_paper_analytic.csv.gz").read_bytes())
    rows = csv.DictReader(text.decode().splitlines())
    return [pytest.param(r, id=r["id"]) for r in rows if r[column]]


def paper_case(row):
    hidden = int(row["hidden"])
    dims = TransformerDims(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=int(row["heads"]),
        kv_heads=int(row["heads"]),
        ffn=4 * hidden,
        vocab=int(row["vocab"]),
        seq_len=int(row["seq_len"]),
    )
    split = Split(
        tp=int(row["tp"]),
        sequence_parallel=row["seq_parallel"] == "1",
        pp=int(row["pp"]),
        virtual=int(row["vpp"]),
        micro_batch=int(row["microbatch"]),
        micro_batches=4 * int(row["pp"]),
        recompute=row["recompute"],
    )
    return dims, split


@pytest.mark.parametrize("row", paper_rows("activation_gib"))
def test_activations_of_the_first_stage_as_in_the_paper(row):
    dims, split = paper_case(row)
    inputs = rank_memory(dims, split, KORTHIKANTI, 0, 80 * GIB)
    live = inputs.activation_bytes * inputs.in_flight / GIB
    assert live == pytest.approx(float(row["activation_gib"]), rel=1e-6)


@pytest.mark.parametrize("row", paper_rows("param_opt_gib"))
def test_parameters_and_optimizer_of_the_layers_as_in_the_paper(row):
    """18 bytes a parameter of the layers' matrices; the paper leaves out the rest."""
    dims, split = paper_case(row)
    layers = dims.layers / split.pp
    bytes_ = 18 * layers * dims.dense_elements / split.tp
    assert bytes_ / GIB == pytest.approx(float(row["param_opt_gib"]), rel=1e-6)


@pytest.mark.parametrize("row", paper_rows("activation_pct_of_no_recompute"))
def test_share_of_activations_as_in_the_paper(row):
    """Of tensor parallelism alone, without recompute; to 1.2 % of the figure."""
    dims, split = paper_case(row)
    whole = replace(split, sequence_parallel=False, recompute="none")
    kept, _ = activation_bytes(dims, split, KORTHIKANTI, 0)
    base, _ = activation_bytes(dims, whole, KORTHIKANTI, 0)
    share = float(row["activation_pct_of_no_recompute"])
    assert 100 * kept / base == pytest.approx(share, rel=0.012)


GPT3 = TransformerDims(
    layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200, seq_len=2048
)


def test_elements_of_gpt3():
    groups = rank_parameters(GPT3, Split(), 0)
    assert sum(g.elements for g in groups) == pytest.approx(174.6e9, rel=2e-3)
    per_rank = [
        sum(g.elements for g in rank_parameters(GPT3, Split(tp=8, pp=12), k))
        for k in range(12)
    ]
    assert per_rank[0] == per_rank[11] > per_rank[5]


def test_experts_are_apart_and_divided_by_ep_and_etp():
    """Mixtral 8x7B: 45.1 B of 46.7 B parameters are experts'."""
    dims = TransformerDims(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=32000,
        seq_len=4096,
        gated=True,
        tied=False,
        experts=8,
        top_k=2,
    )
    shared, experts = rank_parameters(dims, Split(), 0)
    assert experts.elements == 45_097_156_608
    assert shared.elements + experts.elements == pytest.approx(46_702_792_704, rel=1e-4)
    split = Split(tp=2, dp=8, ep=4, etp=1, zero=1)
    _, local = rank_parameters(dims, split, 0)
    assert local.elements == 45_097_156_608 / 4
    assert local.shard == 4  # 16 ranks hold 4 different sets


def test_unfused_attention_adds_its_scores():
    """32 heads, 4,096 tokens, dropout: 5 a s^2 b = 2.5 GiB a layer."""
    dims = TransformerDims(32, 3072, 32, 32, 8192, 32064, 4096)
    fused = layer_bytes(dims, Split(), replace(KORTHIKANTI, score=0.0))
    whole = layer_bytes(dims, Split(), KORTHIKANTI)
    assert whole - fused == 5 * 32 * 4096**2 == 2_684_354_560


def test_full_recompute_keeps_inputs_and_brings_one_layer_back():
    split = Split(tp=8, sequence_parallel=True, recompute="full")
    saved, working = activation_bytes(GPT3, split, KORTHIKANTI, 0)
    assert saved == 96 * 2 * 2048 * 12288 / 8
    assert working == layer_bytes(GPT3, split, KORTHIKANTI)


def test_grouped_heads_and_context_parallelism_save_less():
    many = TransformerDims(1, 4096, 32, 32, 16384, 32000, 4096)
    few = replace(many, kv_heads=8)
    profile = load_activation_profile("megatron")
    assert layer_bytes(few, Split(), profile) < layer_bytes(many, Split(), profile)
    halved = layer_bytes(many, Split(cp=2), profile)
    assert halved == pytest.approx(layer_bytes(many, Split(), profile) / 2)


def test_loss_is_on_the_last_stage_only():
    profile = load_activation_profile("megatron")
    split = Split(tp=8, pp=12, micro_batches=24)
    first = rank_memory(GPT3, split, profile, 0, 80 * GIB)
    last = rank_memory(GPT3, split, profile, 11, 80 * GIB)
    assert first.logits_bytes == 0
    assert last.logits_bytes == 2048 * 51200 / 8 * 6
    assert first.in_flight == 12
    assert last.in_flight == 1
    assert training_memory(first).total_bytes > training_memory(last).total_bytes


@pytest.mark.parametrize(
    ("stages", "strict", "layers"),
    [(2, False, (10, 6)), (4, False, (5, 5, 5, 1)), (4, True, (6, 5, 5, 0))],
)
def test_stages_balanced_by_cost_count_the_head(stages, strict, layers):
    """16 layers and a head that costs 4 of them."""
    assert cost_balanced_layers(16, 1.0, 4.0, stages, strict) == layers


def test_unknown_names_are_refused():
    with pytest.raises(SpecError, match="megatron"):
        load_activation_profile("megatorn")
    with pytest.raises(SpecError, match="stage"):
        rank_parameters(GPT3, Split(pp=2), 2)
