"""A checkpoint of one plan is bit-equal under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.harness import run_ranks
from tests.distributed.moves import load_and_show, train_and_save
from tests.distributed.parity import MODELS, make_plan

MODEL = "tied_gpt"


def _plan(folder: Path, name: str, gpus: int, **shape: Any) -> str:
    file = folder / f"{name}.json"
    make_plan(MODEL, gpus, 8, **shape).save(file)
    return str(file)


@pytest.mark.slow
def test_moves_between_plans(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    first = _plan(tmp_path, "first", 4, tp=2, dp_shard=2, zero=1)
    second = _plan(tmp_path, "second", 4, pp=2, dp_shard=2, zero=3)
    alone = _plan(tmp_path, "alone", 1)
    saved = run_ranks(train_and_save, 4, MODEL, first, folder, timeout_s=90)[0]
    losses: list[float] = []
    for plan, ranks in ((second, 4), (alone, 1)):
        found: dict[str, Any] = {}
        for part in run_ranks(load_and_show, ranks, MODEL, plan, folder, timeout_s=90):
            losses.append(part.pop("loss"))
            found |= part
        assert found == saved
    assert max(losses) - min(losses) < 1e-5 * max(losses)
    torch_file = tmp_path / "whole.pt"
    dcp_to_torch_save(folder, torch_file)
    model, _ = MODELS[MODEL]()
    state = torch.load(torch_file, weights_only=False)["model"]
    model.load_state_dict(state, strict=True)
    for name, p in model.named_parameters():
        assert p.tolist() == saved[name]
