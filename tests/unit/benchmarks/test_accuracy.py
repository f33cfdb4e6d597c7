"""The accuracy benchmark on a fast subset, and a guard against growing errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy_train import (
    Result,
    RowPricer,
    figures,
    price_rows,
    regrets,
    with_regret,
)
from benchmarks.row_models import Graphs, ModelSpec, build
from benchmarks.rows import DATA, SkipRowError, case_of, read_rows
from benchmarks.scatter import scatter

#: Mean absolute error of small groups when the constants were last fitted. A change
#: that makes one grow by more than a tenth has to refit, or to say why.
RECORDED = {"megatron-2020": 0.017, "vtrain-single": 0.064}
SLACK = 0.005  # figures near zero may move by this much


@pytest.fixture(scope="module")
def rows():
    return read_rows(DATA / "train_llm.csv.gz")


@pytest.fixture(scope="module")
def report(rows, tmp_path_factory):
    """A few models only: each costs a trace."""
    kept = {"megatron-2020": ("1920.0", "1920"), "vtrain-single": ("1024.0", "1024")}
    chosen = []
    for group, widths in kept.items():
        here = [
            r
            for r in rows
            if r["config_group"] == group
            and r["hidden"] in widths
            and r["layers"] in ("24.0", "24")
        ]
        chosen += here[:: max(1, len(here) // 40)][:40]
    graphs = Graphs(tmp_path_factory.mktemp("graphs"))
    return price_rows(chosen, RowPricer(graphs))


def test_no_row_of_the_subset_is_skipped(report):
    assert report.skipped == []


@pytest.mark.parametrize("group", sorted(RECORDED))
def test_errors_do_not_grow(report, group):
    part = [r for r in report.results if r.case.group == group]
    assert figures(part)["mape"] <= RECORDED[group] * 1.1 + SLACK


def test_every_result_has_terms_that_add_up(report):
    for r in report.results:
        total = sum(r.terms.values())
        assert total == pytest.approx(r.predicted_s, rel=1e-6), r.case.id


def test_rows_without_dimensions_say_so(rows):
    unknown = next(r for r in rows if r["model"] == "Nemotron_3_Ultra")
    with pytest.raises(SkipRowError, match="Mamba"):
        case_of(unknown)


def test_fields_of_a_row(rows):
    case = case_of(next(r for r in rows if r["id"] == "mlm-sc21-006"))
    shape = case.parallelism
    assert (shape.tp, shape.pp, shape.vpp, shape.data_parallel) == (8, 4, 3, 32)
    assert shape.recompute == "full"
    assert not shape.sequence_parallel
    assert case.attention == "math"
    assert case.stack == "megatron-2021"
    assert case.spec.width == 10240
    assert case.spec.vocab == 51200
    assert case.measured_s == pytest.approx(16.0578)


def test_regret_is_of_the_plan_that_the_price_picks(report):
    base = next(r for r in report.results if r.case.group == "vtrain-single")

    def result(predicted, measured):
        return Result(replace(base.case, measured_s=measured), predicted, base.terms)

    good = [result(1.0, 1.0), result(2.0, 1.5), result(3.0, 2.0)]
    assert regrets(good) == [0.0]
    bad = [result(1.0, 1.5), result(2.0, 1.0), result(3.0, 2.0)]
    assert regrets(bad) == [pytest.approx(0.5)]
    assert with_regret(bad)["regret_max"] == pytest.approx(0.5)


def test_adapters_leave_the_base_frozen():
    spec = ModelSpec(
        "llama", 2, 64, 4, 2, 128, 256, seq_len=16, head_dim=16, tied=False, lora=4
    )
    model, inputs = build(spec)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    assert 0 < trained < total / 3
    assert inputs["input_ids"].shape == (1, 16)


def test_document_is_the_last_line_of_output(capsys, tmp_path, rows):
    path = tmp_path / "rows.csv"
    one = [r for r in rows if r["config_group"] == "bigscience-v100"][:1]
    names = list(one[0])
    lines = [",".join(names), ",".join(f'"{one[0][n]}"' for n in names)]
    path.write_text("\n".join(lines), encoding="utf-8")
    accuracy.main(["--table", "train_llm", "--data", str(path)])
    out = capsys.readouterr().out.splitlines()
    document = json.loads(out[-1])
    assert document["n"] == 0
    assert len(document["skipped"]) == 1
    assert "memory" in document
    assert "by_group" in document


def test_plot_has_a_point_per_row():
    points = [("a", 1.0, 1.1), ("b", 0.2, 0.3), ("b", 5.0, 4.0)]
    text = scatter(points, "title & more")
    assert text.count("<circle") == 3
    assert "title &amp; more" in text
    assert np.char.count(text, "</svg>") == 1
