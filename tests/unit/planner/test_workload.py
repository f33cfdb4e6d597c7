"""Workloads and parallelism refuse what can not run, and say what would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from planner.errors import PlannerError
from planner.workload import (
    Inference,
    Parallelism,
    Training,
    check_batch,
    check_pins,
    check_supported,
    nearest,
    parse_pins,
)


@dataclass(frozen=True)
class Device:
    """A stand-in for a GPU: a name and the precisions it has."""

    name: str
    has: tuple[str, ...]

    def supports(self, dtype: str) -> bool:
        return dtype in self.has


V100 = Device("V100-SXM2-16GB", ("fp16", "fp32"))
A100 = Device("A100-SXM4-80GB", ("bf16", "fp16", "tf32", "fp32", "int8"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_batch": 0}, "global batch must be at least 1: 0"),
        ({"global_batch": 1.5}, "whole number"),
        ({"global_batch": True}, "whole number"),
        ({"seq_len": -1}, "sequence length"),
        ({"precision": "bf61"}, "did you mean bf16"),
        ({"optimizer": "adam_w"}, "did you mean adamw"),
        ({"gradient_dtype": "int8"}, "gradient dtype"),
        ({"memory_limit_bytes": 0}, "memory limit"),
    ],
)
def test_training_refuses(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        Training(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_len": 0}, "prompt length"),
        ({"weights": "int5"}, "int4"),
        ({"tpot_limit_s": 0.0}, "greater than 0"),
        ({"arrival_per_s": float("nan")}, "greater than 0"),
        ({"objective": "speed"}, "objective"),
    ],
)
def test_inference_refuses(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        Inference(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 0}, "tp must be at least 1"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3"),
        ({"vpp": 2}, "vpp needs pp > 1"),
        ({"pp": 2, "vpp": 2, "schedule": "gpipe"}, "interleaved"),
        ({"ep": 3, "dp_shard": 4}, "ep must divide"),
        ({"zero": 1, "dp_replicate": 8}, "use dp_shard=8"),
        ({"pp": 4, "layers_per_stage": (8, 8, 8)}, "3 counts for pp=4"),
        ({"pp": 2, "recompute": (1,)}, "1 counts for pp=2"),
        ({"recompute": "some"}, "full, none, selective"),
        ({"schedule": "1F1B"}, "schedule"),
    ],
)
def test_parallelism_refuses(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        Parallelism(**fields)  # pyright: ignore[reportArgumentType]


def test_fields_that_follow_from_others() -> None:
    assert not Parallelism(dp_shard=8, zero=3).sequence_parallel
    assert Parallelism(tp=8).sequence_parallel
    assert Parallelism(pp=4, vpp=2).schedule == "interleaved"
    p = Parallelism(pp=4, dp_replicate=2, tp=8)
    assert (p.num_gpus, p.data_parallel) == (64, 2)
    assert p.axes == (
        ("pp", 4),
        ("dp_replicate", 2),
        ("dp_shard", 1),
        ("cp", 1),
        ("tp", 8),
    )
    p.check_cluster(64)
    with pytest.raises(PlannerError, match="= 64, the cluster has 32"):
        p.check_cluster(32)


def test_micro_batches_follow_from_the_batch() -> None:
    assert Parallelism(dp_shard=4, micro_batch_size=2).derive(64).num_micro_batches == 8
    with pytest.raises(PlannerError, match="use a global batch of 56 or 64"):
        Parallelism(dp_shard=4, micro_batch_size=2).derive(60)
    with pytest.raises(PlannerError, match=r"use a global batch of 8$"):
        Parallelism(dp_shard=4, micro_batch_size=2).derive(3)


def test_interleaving_needs_whole_rounds() -> None:
    p = Parallelism(pp=4, vpp=2)
    assert p.derive(8).num_micro_batches == 8
    with pytest.raises(PlannerError, match="use a global batch of 8 or 12"):
        p.derive(10)


def test_seven_gpus_and_a_batch_of_eight() -> None:
    with pytest.raises(PlannerError) as error:
        check_batch(8, 7)
    assert "8 can not be divided over 7 GPUs" in str(error.value)
    assert "7 or 14" in str(error.value)
    check_batch(56, 7)
    check_batch(8, 7, {"pp": 7})
    check_batch(1, 8)
    check_batch(12, 8)
    with pytest.raises(PlannerError, match="8 or 16"):
        check_batch(10, 16, {"dp_shard": 8})


def test_bf16_is_refused_on_volta() -> None:
    with pytest.raises(PlannerError, match=r"V100.*no bf16.*use precision fp16"):
        check_supported(Training(), V100)  # pyright: ignore[reportArgumentType]
    check_supported(Training(precision="fp16"), V100)  # pyright: ignore[reportArgumentType]
    check_supported(Training(), A100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlannerError, match="use precision bf16"):
        check_supported(Training(precision="fp8"), A100)  # pyright: ignore[reportArgumentType]


def test_pins() -> None:
    assert parse_pins(["tp=8", "micro-batch=2", "sequence_parallel=off"]) == {
        "tp": 8,
        "micro_batch_size": 2,
        "sequence_parallel": False,
    }
    tensor = "model.embed_tokens.weight"
    assert parse_pins([f"{tensor}=R"]) == {tensor: "R"}
    for text, words in [
        ("tp", "NAME=VALUE"),
        ("tp=", "NAME=VALUE"),
        ("tpp=8", "did you mean"),
        ("tp=eight", "whole number"),
        ("zero=5", "zero must be"),
        ("schedule=fast", "schedule"),
        (f"{tensor}=3", "placement"),
    ]:
        with pytest.raises(PlannerError, match=words):
            parse_pins([text])
    with pytest.raises(PlannerError, match="unknown pin"):
        check_pins({"wrong": 1})


def test_nearest_and_label() -> None:
    assert nearest(50, 8) == "48 or 56"
    assert nearest(3, 8) == "8"
    assert Parallelism().label() == "dp 1, micro-batch 1"
    assert (
        Parallelism(tp=8, pp=4, dp_replicate=2).label()
        == "tp 8 x pp 4 x dp 2, micro-batch 1"
    )
    assert "2 replicas of 4 shards" in Parallelism(dp_replicate=2, dp_shard=4).label()
