"""The README's training loop runs."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import torch

import planner
from tests.distributed.harness import run_ranks
from tests.distributed.moves import run_code
from tests.distributed.parity import MODELS, slow_cluster

README = Path(__file__).parents[2] / "README.md"


def test_run_it(tmp_path: Path) -> None:
    section = README.read_text().split("## Run it")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    model, make = MODELS["tiny_gpt"]()
    plan = planner.optimize(
        model,
        slow_cluster(2),
        planner.Training(global_batch=4, precision="fp32"),
        example_inputs=make(1, 0),
        pins={"tp": 2, "pp": 1},
    )
    plan.save(tmp_path / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    losses = run_ranks(run_code, 2, code, str(tmp_path), port, timeout_s=80)
    assert losses[0] == losses[1]
    assert losses[0] < float(torch.log(torch.tensor(1003.0))) + 1
    assert (tmp_path / "checkpoint" / ".metadata").exists()
