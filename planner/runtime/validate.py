"""A plan on real ranks: the numbers of one process, then time and memory.

Under torchrun, on NCCL or gloo. Parity runs the plan in the model's own traced graph on
one micro-batch against the unsharded module (in fp32, where every rank can hold the
whole; else it says that parity was left out); then steps are timed.
"""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlannerError
from planner.plan.documents import Document
from planner.runtime.apply import Parallel, apply, traced_model
from planner.runtime.faults import guarded
from planner.runtime.weights import default_init, values_of

#: Parameters up to which every rank also builds the whole model, for parity.
WHOLE_MODEL_PARAMETERS = 200_000_000
LOSS_TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}


@dataclass(frozen=True, slots=True)
class Report:
    """What rank 0 tells. ``loss_error`` is None where parity was left out."""

    world: int
    device: str
    planned_device: str
    loss: float
    loss_error: float | None
    tolerance: float
    step_s: float
    planned_step_s: float
    tokens_per_s: float
    mfu: float | None
    peak_bytes: tuple[int, ...]  # per rank; empty on a CPU
    planned_bytes: tuple[int, ...]  # per stage

    @property
    def failure(self) -> str:
        """Why the plan is not valid, "" where it is."""
        if self.loss_error is not None and self.loss_error > self.tolerance:
            return f"the loss is off by {self.loss_error:.2e} (relative)"
        return ""

    @property
    def ok(self) -> bool:
        return not self.failure

    def data(self) -> dict[str, Any]:
        """JSON-ready."""
        names = tuple(self.__dataclass_fields__)
        return {n: getattr(self, n) for n in names} | {"ok": self.ok}

    def text(self) -> str:
        """A table."""
        parity = "left out: the model is too large for one rank"
        if self.loss_error is not None:
            parity = f"loss off by {self.loss_error:.1e} (allowed {self.tolerance:.0e})"
        rows = [
            ("ranks", f"{self.world} x {self.device}", self.planned_device),
            ("parity", parity, ""),
            ("step", f"{self.step_s:.4f} s", f"{self.planned_step_s:.4f} s"),
            ("rate", f"{self.tokens_per_s:.1f} /s", ""),
        ]
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%}", ""))
        for rank, peak in enumerate(self.peak_bytes):
            stage = rank * len(self.planned_bytes) // self.world
            planned = f"{self.planned_bytes[stage] / 2**30:.2f} GiB"
            rows.append((f"peak, rank {rank}", f"{peak / 2**30:.2f} GiB", planned))
        lines = [f"{'':<14}{'measured':<44}planned"]
        lines += [f"{a:<14}{b:<44}{c}".rstrip() for a, b, c in rows]
        return "\n".join(lines)


def run(plan: Document, *, steps: int, timeout_s: float) -> Report | None:
    """Start torch.distributed, check and measure; the report on rank 0, else None.

    Raises PlannerError for another world size, before anything is started, and where
    another rank stops.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.parallelism.num_gpus:
        raise PlannerError(
            "the plan is for another number of ranks",
            f"{world} ranks run, the plan has {plan.parallelism.num_gpus}",
            f"torchrun --nproc-per-node {plan.parallelism.num_gpus} for one node",
        )
    if plan.model.source.startswith("object:"):
        raise PlannerError(
            "the plan's model was handed in as an object",
            plan.model.source,
            "plan it from pkg.mod:factory",
        )
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank = int(os.environ.get("RANK", "0"))
    single = {} if "RANK" in os.environ else {
        "init_method": "tcp://127.0.0.1:29517", "rank": 0, "world_size": 1,
    }  # fmt: skip
    with guarded():
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            timeout=timedelta(seconds=timeout_s),
            **single,  # type: ignore[arg-type]
        )
        try:
            return _run(plan, device, steps, rank)
        finally:
            dist.destroy_process_group()


def _run(plan: Document, device: torch.device, steps: int, rank: int) -> Report | None:
    parallel = apply(plan, device=device)
    args = _samples(parallel, parallel.local_batch)
    error, loss = _parity(plan, parallel, args)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5)
    _timed_step(parallel, optimizer, args)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(_timed_step(parallel, optimizer, args) for _ in range(steps))
    step_s = seconds[len(seconds) // 2]
    peaks: list[int] = []
    name = "CPU"
    mfu = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        mine = torch.tensor([torch.cuda.max_memory_allocated()], device=device)
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        peaks = [int(r.item()) for r in rows]
        estimate = plan.estimate
        whole = step_s * dist.get_world_size() * estimate.peak_flops_per_s
        mfu = estimate.model_flops / whole
    if rank:
        return None
    workload = plan.workload
    units = (workload.global_batch or 1) * max(1, plan.model.seq_len)  # type: ignore[union-attr]
    return Report(
        world=dist.get_world_size(),
        device=name,
        planned_device=", ".join(g.device for g in plan.cluster.groups),
        loss=loss,
        loss_error=error,
        tolerance=LOSS_TOLERANCE[workload.precision],
        step_s=step_s,
        planned_step_s=plan.estimate.step_time_s,
        tokens_per_s=units / step_s,
        mfu=mfu,
        peak_bytes=tuple(peaks),
        planned_bytes=tuple(s.memory.total_bytes for s in plan.stages),
    )


def _samples(parallel: Parallel, count: int) -> dict[str, Tensor]:
    """Random inputs of this data rank: ids below every table's rows."""
    generator = torch.Generator().manual_seed(1 + parallel.data_rank)
    graph = parallel.graph
    rows = [
        graph.tensor(op.inputs[0]).shape[0]
        for op in graph.ops
        if op.target.startswith("aten.embedding.")
    ]
    losses = [
        graph.tensor(op.inputs[0]).shape[-1]
        for op in graph.ops
        if "cross_entropy" in op.target
    ]
    top = min([*rows, *losses], default=2)
    result: dict[str, Tensor] = {}
    for name, _ in parallel.inputs.places:
        shape = parallel.inputs.shapes[name]
        if name in parallel.inputs.batched:
            shape = (count, *shape[1:])
        dtype = parallel.inputs.dtypes[name]
        if dtype.is_floating_point:
            value = torch.randn(shape, generator=generator).to(dtype)
        else:
            value = torch.randint(top, shape, generator=generator).to(dtype)
        result[name] = value.to(parallel.device)
    return result


def _timed_step(
    parallel: Parallel, optimizer: torch.optim.Optimizer, bound: dict[str, Tensor]
) -> float:
    """Seconds of one whole step on this rank, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    parallel.run(bound)
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    if parallel.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def _parity(
    plan: Document, parallel: Parallel, bound: dict[str, Tensor]
) -> tuple[float | None, float]:
    """(relative error of the loss, the loss) of one step against one process."""
    got = float(parallel.mean_loss(parallel.run(bound)))
    if plan.model.parameters > WHOLE_MODEL_PARAMETERS:
        return None, got
    _, inputs, module = traced_model(plan, plan.model.source, None)
    whole = _whole_model(module, parallel)
    size = plan.parallelism.micro_batch_size
    total = torch.zeros((), device=parallel.device, dtype=torch.float64)
    count = plan.parallelism.num_micro_batches or 1
    with torch.no_grad():
        for index in range(count):
            part = inputs.micro(bound, index, size)
            named = {leaf: part[name] for name, leaf in inputs.places}
            total += _loss_of(whole(**named)).double() / count
    if parallel.topology.dp.size > 1:
        dist.all_reduce(total, group=parallel.topology.dp.group)
        total /= parallel.topology.dp.size
    expected = float(total)
    return abs(got - expected) / max(1.0, abs(expected)), got


def _whole_model(module: nn.Module, parallel: Parallel) -> nn.Module:
    """The unsharded module with the values that ``apply`` gave its parts."""
    names = [n for n, _ in module.named_parameters()]
    names += [n for n, _ in module.named_buffers()]
    held = dict(values_of(module, names, seed=0, init=default_init, dtype=None))
    whole = module.to_empty(device=parallel.device)
    with torch.no_grad():
        for name, value in held.items():
            path, _, key = name.rpartition(".")
            getattr(whole.get_submodule(path), key).copy_(value)
    return whole


def _loss_of(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    items = out.values() if isinstance(out, dict) else out
    return next(x for x in items if isinstance(x, Tensor) and x.numel() == 1)
