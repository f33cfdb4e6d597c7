"""Audits: a rank on paper issues the plan's collectives; a falsified plan is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import cli
from planner.errors import PlannerError
from planner.plan.documents import Document
from planner.runtime.audit import audit
from tests.distributed.parity import MODELS, make_plan, slow_cluster

FACTORY = "tests.distributed.parity:planned_gpt"


def predicted(gpus: int, batch: int, **shape: Any) -> Document:
    return planner.predict(
        FACTORY,
        slow_cluster(gpus),
        planner.Training(global_batch=batch, precision="bf16"),
        planner.Parallelism(**shape),
    )


@pytest.mark.parametrize(
    ("gpus", "ranks", "shape"),
    [
        (64, (0, 63), {"tp": 4, "pp": 2, "dp_shard": 8, "zero": 1}),
        (16, (5,), {"tp": 2, "dp_shard": 4, "dp_replicate": 2, "zero": 3}),
        pytest.param(
            16, (0, 9), {"tp": 2, "pp": 4, "dp_replicate": 2, "recompute": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            8, (3, 7), {"tp": 2, "pp": 2, "dp_replicate": 2, "vpp": 2},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_collectives_are_the_plans(
    gpus: int, ranks: tuple[int, ...], shape: dict[str, Any]
) -> None:
    plan = predicted(gpus, gpus, **shape)
    for rank in ranks:
        found = audit(plan, rank)
        assert found.ok, found.text()
        assert sum(r.issued for r in found.rows) > 10


@pytest.mark.slow
def test_modules_and_convolutions() -> None:
    for name in ("resnet", "vit"):
        plan = make_plan(name, 4, 8, tp=2, dp_shard=2, zero=1, sequence_parallel=False)
        model, batch = MODELS[name]()
        found = audit(plan, 3, model, batch(1, 0))
        assert found.ok, found.text()


def test_a_falsified_plan_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    plan = predicted(4, 8, tp=2, pp=2)
    plan.save(file)
    assert cli.run(["audit", str(file), "--rank", "2"]) == 0
    data = json.loads(file.read_text())
    row = next(c for c in data["collectives"] if c["axis"] == "tp" and c.get("stage"))
    row["count_per_step"] += 1
    file.write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.run(["audit", str(file), "--rank", "2"]) == 4
    shown = capsys.readouterr().out
    assert row["kind"] in shown
    assert str(row["bytes"]) in shown


def test_refusals() -> None:
    plan = predicted(4, 8, tp=2, pp=2)
    with pytest.raises(PlannerError, match="no such rank"):
        audit(plan, 4)
    other = make_plan("tiny_gpt", 2, 4, tp=2)
    model, batch = MODELS["odd_mlp"]()
    with pytest.raises(PlannerError, match="another model"):
        audit(other, 0, model, batch(1, 0))
