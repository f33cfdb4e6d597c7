"""The command line: what is printed where, exit codes, one line per error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.cli import run
from planner.cli_io import BROKEN_PIPE, INTERRUPTED
from planner.errors import InfeasibleError, PlannerError
from planner.plan import Plan, Prediction, VerdictRecord, load_plan, plain
from planner.workload import Parallelism, Training
from tests.unit.planner.plan_samples import edited, sample

ROOT = Path(__file__).parents[3]


class Api:
    """Stands in for :mod:`planner.api`: records the call, gives a set result."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.called: dict[str, Any] = {}

    def __call__(self, model: str, cluster: str, *args: Any, **more: Any) -> Any:
        self.called = {"model": model, "cluster": cluster, "args": args, **more}
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


Install = Callable[[object], Api]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the API by one that gives (or raises) what the test says."""

    def install(result: object) -> Api:
        fake = Api(result)
        module = SimpleNamespace(optimize=fake, predict=fake, reprice=fake)
        monkeypatch.setitem(sys.modules, "planner.api", module)
        return fake

    return install


def prediction(fits: bool) -> Prediction:
    data = plain(sample())
    for key in ("certificate", "alternatives", "document"):
        data.pop(key)
    message = "fits" if fits else "misses by 3.0 GiB on stage 1"
    verdict = VerdictRecord(fits=fits, stage=1, message=message)
    return Prediction.model_validate({**data, "verdict": plain(verdict)})


def test_optimize_prints_the_summary(
    api: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = api(sample())
    file = tmp_path / "plan.json"
    command = [
        *("optimize", "gpt3-175b", "--cluster", "64xA100", "--global-batch", "512"),
        *("--seq-len", "2048", "--precision", "fp16", "--optimizer", "adam"),
        *("--micro-batch", "2", "--memory-limit", "70", "--time-limit", "30"),
        *("--pin", "tp=8", "--pin", "pp=4", "-o", str(file)),
    ]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert out.startswith(sample().summary())
    assert f"wrote {file}" in " ".join(out.split())
    assert err == ""
    assert load_plan(file) == sample()
    (workload,) = fake.called["args"]
    assert workload == Training(
        global_batch=512,
        seq_len=2048,
        precision="fp16",
        optimizer="adam",
        memory_limit_bytes=70 * 2**30,
    )
    assert fake.called["pins"] == {"tp": 8, "pp": 4, "micro_batch_size": 2}
    assert fake.called["objective"] == "step_time"
    assert fake.called["time_limit_s"] == 30.0


def test_json_is_one_document_and_nothing_else(
    api: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    api(sample())
    assert run(["optimize", "gpt2", "-c", "8xA100", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == sample().to_json()
    assert err == ""


def test_predict_fills_the_cluster_with_data_parallelism(
    api: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = api(prediction(fits=True))
    base = ["predict", "gpt2", "--cluster", "64xA100", "--tp", "8", "--pp", "4"]
    assert run(base) == 0
    assert fake.called["args"][1] == Parallelism(tp=8, pp=4, dp_replicate=2)
    assert run([*base, "--zero", "3", "--layers-per-stage", "4,4,4,3"]) == 0
    assert fake.called["args"][1] == Parallelism(
        tp=8, pp=4, dp_shard=2, zero=3, layers_per_stage=(4, 4, 4, 3)
    )
    assert run([*base, "--dp-shard", "2", "--recompute", "1,0,0,0"]) == 0
    assert fake.called["args"][1].recompute == (1, 0, 0, 0)
    assert "verdict     fits" in capsys.readouterr().out


def test_a_prediction_that_does_not_fit_is_exit_3(
    api: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    api(prediction(fits=False))
    assert run(["predict", "gpt2", "--cluster", "8xA100", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]["fits"] is False
    assert err == "error: misses by 3.0 GiB on stage 1\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlannerError("unknown model", "gpt5", "use gpt2"), 2),
        (InfeasibleError("no plan fits", "3.2 GiB too much", "use 16 GPUs"), 3),
        (ValueError("broken\ninvariant"), 1),
        (AssertionError("broken"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_no_exception_reaches_the_user(
    api: Install,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    api(error)
    assert run(["optimize", "gpt2", "--cluster", "8xA100"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    if code in (2, 3):
        assert str(error) in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["optimize"], "Missing argument 'MODEL'"),
        (["optimize", "gpt2"], "Missing option '--cluster'"),
        (["optimize", "gpt2", "-c", "8xA100", "--pin", "tpp=8"], "did you mean"),
        (["optimize", "gpt2", "-c", "8xA100", "--precision", "bf8"], "precision"),
        (["optimize", "gpt2", "-c", "8xA100", "--global-batch", "x"], "'x'"),
        (["optimize", "gpt2", "-c", "8xA100", "-o", "/none/p.json"], "/none/p.json"),
        (["optimize", "gpt2", "-c", "8xA100", "--memory-limit", "much"], "much"),
        (["optimize", "gpt2", "-c", "8xA100", "--bogus"], "No such option"),
        (["predict", "gpt2", "-c", "8xA100", "--tp", "0"], "tp must be"),
        (["predict", "gpt2", "-c", "8xB100000"], "B100000"),
        (["check", "/none/plan.json"], "can not read"),
        (["explain", "/none/plan.json"], "can not read"),
        (["clusters", "8xA1000"], "A1000"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    api: Install,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    api(sample())
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_check_says_ok_and_what_is_wrong(
    api: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = api(sample())
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    sample().save(good)
    edited(sample(), "stages/0/memory/activations_bytes", 1).save(bad)

    assert run(["check", str(good)]) == 0
    assert "not priced again" in capsys.readouterr().out
    assert fake.called == {}  # an object can not be built again from its name
    assert run(["check", str(bad)]) == 4
    out, err = capsys.readouterr()
    assert "memory: stage 0: the lines add up to" in out
    assert err.startswith("error: ")

    assert run(["check", str(bad), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["violations"][0]["rule"] == "memory"


class Reprice(Api):
    def __call__(self, plan: Plan) -> Any:  # pyright: ignore
        self.called = {"plan": plan}
        return self.result


def test_check_prices_again_what_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    named = edited(sample(), "model/source", "preset:sample")
    fake = Reprice(edited(named, "placements/layers.*.add/target", "aten.mul.Tensor"))
    module = SimpleNamespace(reprice=fake)
    monkeypatch.setitem(sys.modules, "planner.api", module)
    file = tmp_path / "plan.json"
    named.save(file)
    assert run(["check", str(file), "--no-reprice"]) == 0
    assert fake.called == {}
    assert run(["check", str(file)]) == 4
    assert "placements.layers.*.add.target" in capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    sample().save(file)
    assert run(["explain", str(file)]) == 0
    assert "What lost, and why" in capsys.readouterr().out
    assert run(["explain", str(file), "--json"]) == 0
    assert "Utilisation" in json.loads(capsys.readouterr().out)
    file.write_text(prediction(fits=False).to_json())
    assert run(["explain", str(file)]) == 0
    assert "misses by 3.0 GiB" in capsys.readouterr().out
    assert run(["check", str(file)]) == 2
    assert "holds a prediction, not a plan" in capsys.readouterr().err


def test_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clusters"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "312" in out  # A100's dense bf16
    assert run(["clusters", "--json"]) == 0
    names = {d["name"]: d for d in json.loads(capsys.readouterr().out)}
    assert all(d["source"] for d in names.values())
    assert run(["clusters", "64xA100"]) == 0
    assert "8 nodes of 8" in capsys.readouterr().out
    assert run(["clusters", "64xA100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_gpus"] == 64


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Plan"


def _process(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["clusters"], ["schema"]])
def test_light_commands_are_quick_and_load_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from planner.cli import run; code = run(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'ortools' not in sys.modules;"
        "sys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5  # about 0.3 s on an idle machine


def test_no_arguments_is_help_and_exit_2() -> None:
    done = _process()
    assert done.returncode == 2
    assert "optimize" in done.stdout + done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "planner", "schema"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == BROKEN_PIPE
    assert done.stderr == ""
