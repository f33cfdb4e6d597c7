"""Plans on gloo ranks have the numbers of one process (loss 1e-5, gradients 1e-4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.parity import Case, check, make_plan

Row = tuple[str, int, int, dict[str, Any]]  # model, global batch, steps, shape

TWO_RANKS: list[Row] = [
    ("tiny_gpt", 4, 3, {"tp": 2}),
    ("odd_mlp", 4, 1, {"tp": 2, "sequence_parallel": False}),
    ("llama", 4, 1, {"tp": 2, "recompute": "full"}),
    ("tied_gpt", 8, 3, {"dp_shard": 2, "zero": 2, "micro_batch_size": 2}),
    ("tiny_gpt", 8, 3, {"dp_shard": 2, "zero": 3}),
    ("deep_gpt", 4, 1, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
]
FOUR_RANKS: list[Row] = [
    ("tied_gpt", 8, 3, {"pp": 2, "dp_replicate": 2, "schedule": "gpipe"}),
    ("preset_gpt", 8, 1, {"tp": 2, "pp": 2}),
    ("tiny_gpt", 8, 3, {"dp_shard": 2, "dp_replicate": 2, "zero": 3}),
]
EIGHT_RANKS: list[Row] = [
    ("tied_gpt", 8, 3, {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1}),
    ("tiny_gpt", 8, 3, {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 3}),
    ("llama", 8, 3, {"tp": 2, "pp": 2, "dp_replicate": 2}),
]
MORE_TWO_RANKS: list[Row] = [
    ("tiny_gpt", 4, 3, {"tp": 2, "sequence_parallel": False}),
    ("tied_gpt", 4, 3, {"tp": 2}),
    ("preset_gpt", 4, 3, {"tp": 2}),
    ("llama", 4, 3, {"tp": 2}),
    ("tiny_gpt", 8, 3, {"dp_replicate": 2, "micro_batch_size": 2}),
    ("tiny_gpt", 8, 3, {"dp_shard": 2, "zero": 1}),
    ("tiny_gpt", 8, 3, {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    ("tiny_gpt", 8, 3, {"tp": 2, "recompute": "selective"}),
    ("tied_gpt", 8, 3, {"pp": 2, "schedule": "gpipe"}),
    ("deep_gpt", 4, 3, {"pp": 2, "schedule": "zero_bubble"}),
    ("vit", 4, 3, {"tp": 2, "sequence_parallel": False, "micro_batch_size": 2}),
    ("vit", 4, 3, {"pp": 2, "micro_batch_size": 2}),
    ("vit", 4, 3, {"dp_shard": 2, "zero": 3, "micro_batch_size": 2}),
    ("t5", 4, 1, {"tp": 2, "micro_batch_size": 2}),
    ("t5", 4, 1, {"pp": 2, "micro_batch_size": 2}),
    ("t5", 4, 1, {"dp_shard": 2, "zero": 3}),
    ("resnet", 8, 1, {"tp": 2, "sequence_parallel": False, "micro_batch_size": 4}),
    ("resnet", 8, 1, {"pp": 2, "micro_batch_size": 4}),
    ("resnet", 16, 1, {"dp_shard": 2, "zero": 3, "micro_batch_size": 4}),
    ("unet", 4, 1, {"pp": 2, "micro_batch_size": 2}),
]


def run(rows: list[Row], ranks: int, folder: Path, timeout_s: float) -> None:
    cases: list[Case] = []
    for k, (model, batch, steps, shape) in enumerate(rows):
        file = folder / f"{k}.json"
        make_plan(model, ranks, batch, **shape).save(file)
        cases.append(Case(model, str(file), steps))
    for found in run_ranks(check, ranks, cases, timeout_s=timeout_s):
        assert found == [row[0] for row in rows]


def test_two_ranks(tmp_path: Path) -> None:
    run(TWO_RANKS, 2, tmp_path, 90)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    run(FOUR_RANKS, 4, tmp_path, 90)


@pytest.mark.slow
def test_more_shapes_on_two_ranks(tmp_path: Path) -> None:
    run(MORE_TWO_RANKS, 2, tmp_path, 400)


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path) -> None:
    run(EIGHT_RANKS, 8, tmp_path, 200)
