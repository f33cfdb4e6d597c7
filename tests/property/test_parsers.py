"""Whatever a file or an argument holds: the thing itself or one PlannerError/SpecError.

No other exception, no hang, nothing executed: a plan is data.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cost_models.errors import SpecError
from cost_models.hardware import ClusterSpec, parse_cluster
from planner import importers
from planner.errors import PlannerError
from planner.models import resolve_model
from planner.plan import Plan, load_plan, parse_plan
from planner.plan.documents import write_atomic
from tests.unit.planner.plan_samples import sample

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
QUICK = settings(
    max_examples=150,
    deadline=20_000,  # a hang, not a busy machine
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _paths(inner, (*at, index))
    return found


TEXT = sample().to_json()
PATHS = [p for p in _paths(json.loads(TEXT)) if p]


@QUICK
@given(st.binary(max_size=300) | JSON.map(lambda v: json.dumps(v).encode()))
def test_plan_loader_takes_any_bytes(data: bytes) -> None:
    with pytest.raises(PlannerError):
        parse_plan(data)


@QUICK
@given(path=st.sampled_from(PATHS), value=JSON, drop=st.booleans())
def test_plan_loader_takes_any_edit(
    path: tuple[Any, ...], value: Any, drop: bool
) -> None:
    data = json.loads(TEXT)
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    if drop:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    try:
        plan = parse_plan(json.dumps(data))
    except PlannerError as error:
        refused = error
    else:
        assert isinstance(plan, Plan)
        assert parse_plan(plan.to_json()) == plan
        plan.check()  # finds faults, raises none
        return
    assert "\n" not in refused.what


def test_deep_nesting_and_size(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"a":' * 50_000):
        with pytest.raises(PlannerError):
            parse_plan(text)
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(PlannerError, match="too large"):
        load_plan(big)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


def test_a_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "plan.json"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PlannerError, match="not JSON"):
        load_plan(file)
    with pytest.raises(PlannerError):
        resolve_model(str(file))
    with pytest.raises(PlannerError):
        importers.read(file, 8, "deepspeed.json")
    assert not (tmp_path / "exploded").exists()


CLUSTER_WORDS = st.lists(
    st.sampled_from(
        ["64", "8", "0", "-1", "99999999999", "x", "A100", "H100", "V100-32GB", "-",
         "@", "100Gbps", "+", "PCIe", " ", "80GB", "1e9", ".", "nan"]
    ),
    max_size=8,
).map("".join)  # fmt: skip


@QUICK
@given(
    CLUSTER_WORDS | st.text(max_size=30) | st.dictionaries(st.text(max_size=8), JSON)
)
def test_cluster_parser(given_value: Any) -> None:
    try:
        found = parse_cluster(given_value)
    except SpecError:
        return
    assert isinstance(found, ClusterSpec)
    assert found.num_gpus >= 1


@QUICK
@given(st.text(st.characters(exclude_characters=":/."), max_size=30))
def test_model_names(name: str) -> None:
    try:
        resolve_model(name)
    except PlannerError as error:
        refused = error
    else:
        return
    assert refused.fix


FIELD = st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=5) | st.booleans()


@pytest.mark.slow
@settings(QUICK, max_examples=60, deadline=None)
@given(
    value=JSON
    | st.fixed_dictionaries(
        {
            "model_type": st.sampled_from(["gpt2", "llama", "mixtral", "x"]) | JSON,
            "hidden_size": FIELD,
            "num_hidden_layers": FIELD,
        }
    )
)
def test_model_config_files(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(value))
    try:
        found = resolve_model(str(file))
    except PlannerError:
        return
    assert found.name


ARGS = st.lists(
    st.sampled_from(
        ["--tensor-model-parallel-size", "--micro-batch-size", "--global-batch-size",
         "--pipeline-model-parallel-layout", "Et*9|t", "2", "0", "x", "'", "--bf16",
         "\\", "\n", "#", "$(touch exploded)", "--recompute-granularity", "full",
         "--use-megatron-fsdp", "--pipeline-model-parallel-size", "(tt|)*9999"]
    ),
    max_size=12,
).map(" ".join)  # fmt: skip


@QUICK
@given(ARGS | st.text(max_size=60), st.sampled_from([1, 8, 12]))
def test_megatron_arguments(text: str, gpus: int) -> None:
    _only_planner_errors(importers.megatron_args, text, gpus)


@QUICK
@given(JSON.map(json.dumps) | st.text(max_size=60), st.sampled_from([1, 8]))
def test_deepspeed_configs(text: str, gpus: int) -> None:
    _only_planner_errors(importers.deepspeed_json, text, gpus)


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(
            ["train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
             "gradient_accumulation_steps", "tensor_parallel", "bf16", "optimizer"]
        ),
        JSON,
    ),
    st.sampled_from([1, 8]),
)  # fmt: skip
def test_deepspeed_values(config: dict[str, Any], gpus: int) -> None:
    _only_planner_errors(importers.deepspeed_json, json.dumps(config), gpus)


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(
            ["tensor_parallel_degree", "data_parallel_shard_degree",
             "pipeline_parallel_degree", "pipeline_parallel_schedule",
             "module_fqns_per_model_part"]
        ),
        st.integers(-3, 9) | st.text("ab1F", max_size=4) | st.booleans(),
    ),
    st.sampled_from([1, 8]),
)  # fmt: skip
def test_torchtitan_jobs(table: dict[str, Any], gpus: int) -> None:
    lines = [f"{k} = {json.dumps(v)}" for k, v in table.items()]
    text = "[parallelism]\n" + "\n".join(lines)
    _only_planner_errors(importers.torchtitan_toml, text, gpus)
    _only_planner_errors(importers.torchtitan_toml, "\n".join(lines) + "[", gpus)


def _only_planner_errors(read: Any, text: str, gpus: int) -> None:
    try:
        found = read(text, gpus)
    except PlannerError:
        return
    assert found.parallelism.num_gpus == gpus


# ---- files -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    file = tmp_path / "plan.json"
    sample().save(file)
    before = file.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlannerError, match="can not write the file"):
        sample(8).save(file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_that_takes_no_files() -> None:
    with pytest.raises(PlannerError, match="can not write the file"):
        sample().save("/proc/plan.json")


def test_two_writers_and_a_killed_one_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code = (
        "import sys; from pathlib import Path\n"
        "from planner.plan.documents import write_atomic\n"
        "print('up', flush=True)\n"
        "while True: write_atomic(Path(sys.argv[1]), sys.argv[2] * 200_000)\n"
    )
    command = [sys.executable, "-c", code, str(file)]
    writers = [
        subprocess.Popen([*command, letter], stdout=subprocess.PIPE) for letter in "ab"
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        for _ in range(40):
            time.sleep(0.005)
            if file.exists():
                assert file.read_text() in ("a" * 200_000, "b" * 200_000)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
    assert file.read_text() in ("a" * 200_000, "b" * 200_000)
    write_atomic(file, "c")
    assert file.read_text() == "c"
