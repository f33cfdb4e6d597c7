"""What ranks do in checkpoint and fault tests."""

from __future__ import annotations

# pyright: reportArgumentType=false
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import planner
from planner.plan import load_document
from tests.distributed.parity import MODELS


def _built(name: str, plan_file: str) -> tuple[Any, Any, tuple[Tensor, ...]]:
    plan = load_document(plan_file)
    torch.manual_seed(0)
    model, make = MODELS[name]()
    parallel = planner.runtime.apply(plan, model, make(1, 0))
    data = make(plan.workload.global_batch, 1)  # type: ignore[union-attr]
    start = parallel.data_rank * parallel.local_batch
    mine = tuple(x[start : start + parallel.local_batch] for x in data)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    return parallel, optimizer, mine


def _whole(parallel: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and states of this rank's stage, whole."""
    found: dict[str, Tensor] = {}
    for name, p in parallel.named_parameters():
        found[name] = parallel.full_parameter(name).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            local = optimizer.state[p][key].to_local()
            found[f"{name}/{key}"] = parallel.store.full(name, local).clone()
        found[f"{name}/step"] = optimizer.state[p]["step"].clone()
    return found


def train_and_save(name: str, plan_file: str, folder: str) -> dict[str, Any]:
    parallel, optimizer, mine = _built(name, plan_file)
    for _ in range(2):
        parallel.step(*mine)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
    parallel.save(folder, optimizer)
    return {n: t.tolist() for n, t in _whole(parallel, optimizer).items()}


def load_and_show(name: str, plan_file: str, folder: str) -> dict[str, Any]:
    parallel, optimizer, mine = _built(name, plan_file)
    with torch.no_grad():
        for p in parallel.parameters():
            p.zero_()
    parallel.load(folder, optimizer)
    found = {n: t.tolist() for n, t in _whole(parallel, optimizer).items()}
    found["loss"] = float(parallel.step(*mine))
    return found


def dies(name: str, plan_file: str, how: str) -> str:
    """Rank 1 dies or hangs in its second step; what the others saw."""
    parallel, _, mine = _built(name, plan_file)
    parallel.step(*mine)
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    try:
        parallel.step(*mine)
    except planner.PlannerError as error:
        return str(error)
    return "finished"


def run_code(code: str, folder: str, port: int) -> float:
    """Runs a training loop as torchrun would; its last loss."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    torch.manual_seed(0)
    model, make = MODELS["tiny_gpt"]()

    def batches(data_rank: int, size: int) -> list[tuple[Tensor, ...]]:
        return [make(size, seed + 10 * data_rank) for seed in range(2)]

    space: dict[str, Any] = {
        "model": model, "example_inputs": make(1, 0), "batches": batches
    }  # fmt: skip
    exec(code, space)
    return float(space["loss"])
