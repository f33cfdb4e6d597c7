"""The plan document: round trip, bytes, files, versions, schema, summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cost_models.memory import MemoryLines
from planner.errors import PlannerError
from planner.plan import (
    MAX_FILE_BYTES,
    SCHEMA_VERSION,
    MemoryRecord,
    VerdictRecord,
    expand,
    format_range,
    json_schema,
    load_plan,
    parse_placement,
    parse_plan,
    parse_range,
    placement_error,
    wildcard,
)
from planner.plan.jsontext import dumps
from planner.workload import Parallelism
from tests.unit.planner.plan_samples import sample


def test_round_trip_keeps_content_and_bytes(tmp_path: Path) -> None:
    plan = sample()
    file = tmp_path / "plan.json"
    plan.save(file)
    again = load_plan(file)
    assert again == plan
    assert again.to_json() == plan.to_json() == file.read_text("utf-8")


def test_tuples_of_a_parallelism_round_trip() -> None:
    p = Parallelism(pp=2, recompute=(3, 1), layers_per_stage=(4, 3))
    plan = sample().model_copy(update={"parallelism": p})
    assert parse_plan(plan.to_json()).parallelism == p


def test_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.unit.planner.plan_samples import sample;"
        "sys.stdout.write(sample().to_json())"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1] == sample().to_json()


def test_json_follows_the_printed_schema() -> None:
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    data = json.loads(sample().to_json())
    assert list(validator.iter_errors(data)) == []
    data["stages"][0]["surprise"] = 1
    assert len(list(validator.iter_errors(data))) == 1


def test_keys_of_the_design() -> None:
    data = json.loads(sample().to_json())
    assert data["schema_version"] == SCHEMA_VERSION == 1
    assert {
        "model",
        "cluster",
        "workload",
        "parallelism",
        "mesh",
        "stages",
        "placements",
        "recompute",
        "collectives",
        "estimate",
        "certificate",
        "alternatives",
        "warnings",
        "provenance",
    } <= data.keys()
    assert data["parallelism"]["num_micro_batches"] == 8
    assert data["estimate"]["breakdown"].keys() == {
        "compute",
        "tp_comm",
        "cp_comm",
        "ep_comm",
        "dp_comm_exposed",
        "pp_p2p",
        "pp_bubble",
        "recompute",
        "optimizer",
        "launch",
    }


def test_a_long_model_stays_small() -> None:
    """Layers repeat as wildcards: 96 of them add block names, not placements."""
    small, large = len(sample(4).to_json()), len(sample(96).to_json())
    assert large < small + 92 * 120


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, ["schema_version 2", "upgrade"]),
        ({"schema_version": 0}, ["schema_version 0", "plan again"]),
        ({"schema_version": None}, ["schema_version None", "plan again"]),
        ({"schema_version": True}, ["schema_version True", "plan again"]),
        ({"surprise": 1}, ["schema at surprise"]),
        ({"stages": "none"}, ["schema at stages"]),
        ({"document": "prediction"}, ["holds a prediction, not a plan"]),
        ({"document": "novel"}, ["schema at document"]),
    ],
)
def test_files_of_another_shape_are_refused(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    data = json.loads(sample().to_json()) | change
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlannerError) as error:
        load_plan(file)
    message = str(error.value)
    assert "\n" not in message
    assert str(file) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 1', b"[" * 100_000, b"NaN"],
)
def test_corrupt_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlannerError) as error:
        load_plan(file)
    assert "\n" not in str(error.value)


def test_a_plan_holds_no_illegal_parallelism() -> None:
    data = json.loads(sample().to_json())
    data["parallelism"]["zero"] = 7
    with pytest.raises(PlannerError, match=r"illegal value.*zero must be"):
        parse_plan(json.dumps(data))


def test_numbers_are_not_read_from_text() -> None:
    data = json.loads(sample().to_json())
    data["estimate"]["step_time_s"] = "0.3"
    with pytest.raises(PlannerError, match=r"estimate\.step_time_s"):
        parse_plan(json.dumps(data))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(PlannerError, match="too large"):
        load_plan(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlannerError, match="can not read"):
            load_plan(path)


def test_save_replaces_whole_files_and_leaves_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    sample().save(file)
    assert load_plan(file) == sample()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_save_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="can not write"):
        sample().save(tmp_path / "none" / "plan.json")


def test_summary_is_a_screenful() -> None:
    text = sample().summary()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(text.splitlines()) <= 24
    for part in ("tp 2 x pp 2 x dp 4", "MFU", "45.0%", "312", "dense", "my::op"):
        assert part in text


def test_memory_lines_become_whole_bytes() -> None:
    lines = MemoryLines(
        parameters_bytes=0.5,
        gradients_bytes=1.0,
        optimizer_bytes=2.2,
        activations_bytes=0.0,
        logits_bytes=0.0,
        gather_buffers_bytes=0.0,
        workspace_bytes=0.0,
        reserved_bytes=3.0,
        total_bytes=6.7,
        limit_bytes=80.9,
        peak_moment="backward",
    )
    record = MemoryRecord.of(lines)
    assert record.lines()["parameters_bytes"] == 1
    assert record.total_bytes == 1 + 1 + 3 + 3
    assert record.limit_bytes == 80
    assert record.peak_moment == "backward"


def test_verdict_names_the_lines_that_miss() -> None:
    gib = 2**30
    lines: dict[str, Any] = {
        "parameters_bytes": 50 * gib,
        "gradients_bytes": 0,
        "optimizer_bytes": 40 * gib,
        "activations_bytes": 0,
        "logits_bytes": 0,
        "gather_buffers_bytes": 0,
        "workspace_bytes": 0,
        "reserved_bytes": gib,
    }
    memory = MemoryRecord(**lines, total_bytes=91 * gib, limit_bytes=80 * gib)
    roomy = memory.model_copy(update={"limit_bytes": 100 * gib})
    verdict = VerdictRecord.of((roomy, memory))
    assert (verdict.fits, verdict.stage) == (False, 1)
    assert verdict.missing_bytes == 11 * gib
    assert "misses by 11.0 GiB on stage 1" in verdict.message
    assert "parameters 50.0 GiB, optimizer 40.0 GiB" in verdict.message
    assert VerdictRecord.of((roomy,)).spare_bytes == 9 * gib


@pytest.mark.parametrize(
    "text", ["R", "P(sum)", "S(0)", "S(3)", "S(1;3x)", "S(1;4096,1024,1024)"]
)
def test_placement_text_round_trip(text: str) -> None:
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "S(1;)", "P(max)", "s(0)", "S(0) "])
def test_other_placement_text_is_refused(text: str) -> None:
    with pytest.raises(PlannerError):
        parse_placement(text)


def test_legal_shards() -> None:
    assert placement_error("S(0)", (32, 8), 4) is None
    assert placement_error("S(0;3x)", (96, 8), 4) is None
    assert placement_error("S(0;64,16,16)", (96, 8), 4) is None
    assert "over 4 ranks" in (placement_error("S(0)", (30, 8), 4) or "")
    assert placement_error("S(0)", (30, 8), 4, padded=True) is None
    assert "dim 2" in (placement_error("S(2)", (32, 8), 4) or "")
    assert "add up" in (placement_error("S(0;64,16)", (96, 8), 4) or "")
    assert "over 4 ranks" in (placement_error("S(0;60,18,18)", (96, 8), 4) or "")


def test_ranges_and_wildcards() -> None:
    assert format_range([0, 1, 2, 5]) == "0-2,5"
    assert parse_range("0-2,5") == (0, 1, 2, 5)
    assert expand("layers.*.w", "0,3") == ("layers.0.w", "layers.3.w")
    assert expand("w", None) == ("w",)
    names = ["layers.0.w", "layers.1.w", "head"]
    assert wildcard(names) == {"layers.*.w": [0, 1], "head": []}
    for text in ("", "a", "3-1", "1,1", "2,0-1"):
        with pytest.raises(PlannerError):
            parse_range(text)


def test_json_text_refuses_what_json_has_not() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"x": float("nan")})
