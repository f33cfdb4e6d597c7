"""The serving table: rows become cases, figures meet their bars on a sample."""

import pytest

from benchmarks.accuracy_inference import DATA, evaluate, spearman
from benchmarks.rows import SkipRowError, read_rows
from benchmarks.serving_rows import case_of


def test_rank_correlation() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert spearman([(3, 10), (2, 20), (1, 30)]) == pytest.approx(-1)
    assert spearman([(1, 10), (1, 20), (1, 30)]) == 0


def test_a_row_is_read_as_its_source_means_it() -> None:
    rows = {r["id"]: r for r in read_rows(DATA)}
    case = case_of(rows["gptfast-0003"])
    assert (case.weights, case.group, case.eight_bit_math) == ("int4", 32, False)
    assert (case.engine, case.batch, case.tp) == ("gptfast", 1, 1)
    spread = next(
        case_of(r)
        for r in rows.values()
        if (r["dp_attn"], r["ep"], r["tp"]) == ("8.0", "8.0", "1.0")
    )
    assert (spread.tp, spread.ep, spread.attention_dp) == (8, 8, 8)
    with pytest.raises(SkipRowError, match="encoder"):
        case_of(next(r for r in rows.values() if r["mode"] == "encode"))


def test_bars_on_every_sixth_row() -> None:
    """Median errors: time per token and throughput 15 %, first token 20 %."""
    found = evaluate(read_rows(DATA)[::6])
    assert found["tpot"]["median_ape"] < 0.15
    assert found["throughput"]["median_ape"] < 0.15
    assert found["ttft"]["median_ape"] < 0.20
    assert found["tpot"]["rank_correlation"] > 0.9
    assert found["throughput"]["rank_correlation"] > 0.9
