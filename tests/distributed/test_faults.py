"""Dead and hung ranks, another world: one clear message, nothing left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import cli
from tests.distributed.harness import run_ranks
from tests.distributed.moves import dies, load_and_show
from tests.distributed.parity import make_plan


def _plan(folder: Path, ranks: int) -> str:
    file = folder / "plan.json"
    make_plan("tiny_gpt", ranks, 4, tp=ranks).save(file)
    return str(file)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "another rank has stopped"),
        pytest.param("hangs", "another rank does not answer", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank(tmp_path: Path, how: str, said: str) -> None:
    plan = _plan(tmp_path, 2)
    found = run_ranks(
        dies, 2, "tiny_gpt", plan, how, timeout_s=15, wait_for=(0,), limit_s=80
    )
    assert said in found[0], found


def test_another_world_and_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(tmp_path, 2)
    with pytest.raises(AssertionError, match="another model"):
        run_ranks(load_and_show, 2, "odd_mlp", plan, str(tmp_path), timeout_s=60)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.run(["validate", plan]) == 2
    assert "3 ranks run, the plan has 2" in capsys.readouterr().err
