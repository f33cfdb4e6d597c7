"""explain, diff, report, trace, export, --from, --compare-to on a real small plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import run
from planner.plan import load_plan
from planner.whatif import Base, gains, op_costs, op_story, resolve

JOB = ("gpt2", "--cluster", "16xA100", "--global-batch", "64", "--seq-len", "512")
PINS = ("--pin", "tp=4", "--pin", "pp=2", "--pin", "vpp=1", "--pin", "zero=1")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor-parallel plan of GPT-2 over two nodes."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    assert run(["optimize", *JOB, *PINS, "-q", "-o", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def base(plan_file: Path) -> Base:
    return Base.of(load_plan(plan_file))


def test_more_hardware_never_costs(plan_file: Path, base: Base) -> None:
    plan = load_plan(plan_file)
    assert base.priced.terms.total_s == pytest.approx(plan.estimate.step_time_s)
    found = gains(base)
    assert len(found) == 3
    for gain in found:
        assert gain.now_s == base.priced.terms.total_s
        assert gain.step_s <= gain.now_s * (1 + 1e-9)
    assert any(gain.saved > 1e-4 for gain in found)  # tp 4: the link is worth something


def test_the_chosen_placement_is_the_best_for_its_block(
    plan_file: Path, base: Base
) -> None:
    plan = load_plan(plan_file)
    key = resolve(plan, "layers.3/linear_2")
    assert key == "layers.*/linear_2"
    story = op_story(base, key)
    assert sum(c.chosen for c in story.choices) == 1
    chosen = next(c for c in story.choices if c.chosen)
    assert chosen.block_s is not None
    assert len(story.choices) >= 2
    for other in story.choices:
        if other.block_s is not None:
            assert chosen.block_s <= other.block_s * (1 + 1e-9)
    assert 0 < story.utilization < 1


def test_a_parameter_means_the_op_that_reads_it(plan_file: Path) -> None:
    plan = load_plan(plan_file)
    weight = next(
        k for k, r in plan.placements.items()
        if r.what == "parameter" and r.layers and len(r.outputs[0].shape) == 2
    )  # fmt: skip
    key = resolve(plan, weight.replace("*", "0"))
    assert plan.placements[key].what == "op"


def test_costs_are_on_or_under_the_roof(base: Base) -> None:
    device = base.job.device
    for cost in op_costs(base):
        assert cost.flops / cost.seconds <= device.peak("bf16")
        assert cost.bytes / cost.seconds <= device.hbm_bytes_per_s * (1 + 1e-9)


def test_explain(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(plan_file)]) == 0
    text = capsys.readouterr().out
    assert "1 GiB more memory per GPU" in text
    assert "10% more between nodes" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert run(["explain", str(plan_file), "--op", "layers.*/linear_2"]) == 0
    text = capsys.readouterr().out
    assert "(chosen): op" in text
    assert "of the dense peak" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert run(["explain", str(plan_file), "--op", "linear_99"]) == 2
    assert "no such op in the plan: linear_99. nearest: " in capsys.readouterr().err


def test_diff_report_trace(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, line = tmp_path / "report.html", tmp_path / "timeline.json"
    assert run(["report", str(plan_file), "-o", str(page)]) == 0
    assert run(["trace", str(plan_file), "-o", str(line)]) == 0
    assert page.stat().st_size < 6e6
    text = page.read_text()
    assert '"roofline":{' in text
    assert json.loads(line.read_text())["traceEvents"]
    capsys.readouterr()
    assert run(["diff", str(plan_file), str(plan_file)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert run(["report", str(plan_file), "-o", str(tmp_path)]) == 2
    assert "can not write there" in capsys.readouterr().err


def test_export_and_back(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Megatron is told, read again, is priced as the plan's own split."""
    assert run(["export", str(plan_file)]) == 0
    assert "torchtitan" in capsys.readouterr().out
    assert run(["export", str(plan_file), "--to", "megatron", "-o", str(tmp_path)]) == 0
    assert "wrote" in capsys.readouterr().out
    arguments = str(tmp_path / "arguments.txt")
    command = ["predict", "gpt2", "--cluster", "16xA100", "--from", arguments, "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    plan = load_plan(plan_file)
    for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch_size"):
        assert found["parallelism"][name] == getattr(plan.parallelism, name)
    assert found["workload"]["global_batch"] == 64
    assert found["workload"]["seq_len"] == 512


def test_compare_to(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 2},
                "bf16": {"enabled": True},
                "tensor_parallel": {"autotp_size": 4},
                "steps_per_print": 10,
            }
        )
    )
    command = ["optimize", *JOB, "-q", *PINS]
    assert run([*command, "--compare-to", str(config)]) == 0
    out = capsys.readouterr()
    assert "x as fast" in out.out
    assert "not read from" in out.err
    assert run([*command, "--compare-to", str(plan_file), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["plan"]["estimate"] == both["today"]["estimate"]


@pytest.mark.parametrize(
    ("command", "code", "status"),
    [
        (["optimize", "gpt2", "-c", "8xZ900"], 2, "unsupported_gpu"),
        (["optimize", "gpt2", "-c", "8xV100"], 2, "unsupported_gpu"),
        (["optimize", "gpt7", "-c", "8xA100"], 2, "bad_input"),
        (["optimize", "gpt2", "-c", "1xA100", "--memory-limit", "1GB"], 3,
         "does_not_fit"),
        (["serve-plan", "gpt2", "-c", "1xL4", "--tpot-limit", "1e-7"], 3,
         "limit_unreachable"),
    ],
)  # fmt: skip
def test_json_errors_say_of_which_kind_they_are(
    command: list[str], code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["status"] == status
    assert error["what"]
