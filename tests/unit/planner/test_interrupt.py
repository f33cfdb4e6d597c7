"""Ctrl-C returns the best plan so far, marked as such."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import run
from planner.plan import load_plan
from planner.search.driver import Search
from planner.search.interrupt import Stop, stopping


@pytest.fixture
def ctrl_c_after_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Search._report

    def press(self: Search, solved: int, best: Any, *rest: Any) -> None:
        if best is not None:
            os.kill(os.getpid(), signal.SIGINT)
        report(self, solved, best, *rest)

    monkeypatch.setattr(Search, "_report", press)


@pytest.mark.usefixtures("ctrl_c_after_first_plan")
def test_best_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    command = ["optimize", "gpt2", "--cluster", "8xA100", "--global-batch", "64"]
    command += ["--pin", "pp=2"]
    assert run([*command, "-o", str(file)]) == 130
    plan = load_plan(file)
    assert plan.certificate.status == "feasible"
    assert plan.certificate.cut_off > 0
    assert plan.certificate.lower_bound_s <= plan.certificate.objective_s
    assert any(w.startswith("interrupted:") for w in plan.warnings)
    assert plan.check() == []
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_before_the_first_plan_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(self: Search, *rest: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Search, "_report", press)
    with pytest.raises(KeyboardInterrupt):
        planner.optimize("gpt2", "8xA100", planner.Training(global_batch=64))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once() -> None:
    stop = Stop()
    stop.has_plan = True
    stop.handle(signal.SIGINT, None)
    assert stop.now
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)


def test_an_application_keeps_its_own_handler() -> None:
    def own(*_: object) -> None:
        return None

    before = signal.signal(signal.SIGINT, own)
    try:
        with stopping():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_progress_says_what_is_tried_and_how_far_it_is() -> None:
    lines: list[str] = []
    workload = planner.Training(global_batch=64)
    pins = {"pp": 2}
    planner.optimize("gpt2", "8xA100", workload, pins=pins, progress=lines.append)
    shown = [x for x in lines if x.startswith("best ")]
    assert shown
    assert all("gap" in x and "shapes left" in x and len(x) <= 77 for x in shown)
