"""A plan on gloo ranks against the same model in one process."""

from __future__ import annotations

# pyright: reportArgumentType=false
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import planner
from planner.plan import load_document
from planner.plan.documents import Document
from tests import small
from tests.distributed.zoo_models import ZOO

Made = tuple[nn.Module, Callable[[int, int], tuple[Tensor, ...]]]


def _tokens(vocab: int, seq: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (size, seq), generator=g)
        return ids, torch.randint(vocab, (size, seq), generator=g)

    return batch


def tiny_gpt(tied: bool = False, layers: int = 2) -> Made:
    """TinyGPT with a vocabulary that tp has to pad."""
    return small.TinyGPT(layers, 32, 4, 1002 + 1, tied), _tokens(1003, 12)


def tied_gpt() -> Made:
    return tiny_gpt(tied=True)


def deep_gpt() -> Made:
    return tiny_gpt(layers=5)


class OddMLP(nn.Module):
    """Odd sizes: nothing divides but what the planner finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(15, 42), nn.GELU(), nn.Linear(42, 15))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


def odd_mlp() -> Made:
    def batch(size: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(size, 15, generator=torch.Generator().manual_seed(seed)),)

    return OddMLP(), batch


def preset_gpt() -> Made:
    from planner.presets.gpt import GPT, GPTConfig

    config = GPTConfig(2, 32, 4, vocab=1008, positions=16, dropout=0.0)
    return GPT(config, 16), _tokens(1008, 12)


def llama() -> Made:
    from planner.presets.llama import Llama, LlamaConfig

    return Llama(LlamaConfig(2, 32, 48, 4, 2, 1008, head_dim=8)), _tokens(1008, 12)


MODELS: dict[str, Callable[[], Made]] = {
    f.__name__: f for f in (tiny_gpt, tied_gpt, deep_gpt, odd_mlp, preset_gpt, llama)
} | ZOO


def slow_cluster(gpus: int) -> Any:
    """GPUs so slow that dividing small models pays."""
    from cost_models.hardware import parse_cluster

    cluster = parse_cluster(f"{gpus}xA100")
    (group,) = cluster.groups
    device = replace(
        group.device,
        peak_flops=tuple((k, v / 1e7) for k, v in group.device.peak_flops),
        hbm_bytes_per_s=group.device.hbm_bytes_per_s / 1e6,
        l2_bytes=1,
    )
    return replace(cluster, groups=(replace(group, device=device),))


def make_plan(name: str, gpus: int, batch: int, **shape: Any) -> Document:
    """The plan of ``name`` for a given shape on slow GPUs."""
    torch.manual_seed(0)
    model, make = MODELS[name]()
    return planner.predict(
        model,
        cluster=slow_cluster(gpus),
        workload=planner.Training(global_batch=batch, precision="fp32"),
        parallelism=planner.Parallelism(**shape),
        example_inputs=make(1, 0),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a plan (a file), for ``steps`` optimizer steps."""

    model: str
    plan: str
    steps: int = 1


def check(cases: list[Case]) -> list[str]:
    """On every rank: loss and gradients of step 1, parameters after all steps."""
    assert "ortools" not in sys.modules
    return [check_one(case) for case in cases]


def check_one(case: Case) -> str:
    plan = load_document(case.plan)
    torch.manual_seed(0)
    model, make = MODELS[case.model]()
    parallel = planner.runtime.apply(plan, model, make(1, 0))
    total = plan.workload.global_batch  # type: ignore[union-attr]
    mine = slice(
        parallel.data_rank * parallel.local_batch,
        (parallel.data_rank + 1) * parallel.local_batch,
    )
    mean = _reference_step
    # a key's bias has no gradient but rounding noise, which a tiny eps would amplify
    options = {"lr": 1e-3, "eps": 1e-5}
    theirs = torch.optim.AdamW(model.parameters(), **options)
    ours = torch.optim.AdamW(parallel.parameters(), **options)
    for step in range(case.steps):
        data = make(total, step)
        theirs.zero_grad()
        expected = mean(model, data, plan.parallelism.micro_batch_size)
        loss = parallel.step(*(x[mine] for x in data))
        error = abs(float(loss) - expected) / max(1.0, abs(expected))
        assert error < 1e-5, f"{case}: loss {float(loss)} in place of {expected}"
        if step == 0:
            _compare_gradients(case, parallel, model)
        ours.step()
        theirs.step()
    for name, expected in model.named_parameters():
        if name in parallel.store.parameters and expected.requires_grad:
            got = parallel.full_parameter(name)
            _close(f"{case}: {name}", got, expected, 1e-4, floor=1e-2)
    return case.model


def _reference_step(model: nn.Module, data: tuple[Tensor, ...], micro: int) -> float:
    """Mean of micro-batch losses and their gradients, in one process."""
    count = data[0].shape[0] // micro
    total = 0.0
    for i in range(count):
        part = tuple(x[i * micro : (i + 1) * micro] for x in data)
        loss = model(*part) / count
        loss.backward()
        total += float(loss.detach())
    return total


def _compare_gradients(case: Case, parallel: Any, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name in parallel.store.parameters and parameter.requires_grad:
            grad = parameter.grad
            assert grad is not None
            _close(
                f"{case}: gradient of {name}", parallel.full_gradient(name), grad, 1e-4
            )


def _close(
    what: str, got: Tensor, expected: Tensor, tolerance: float, floor: float = 0.0
) -> None:
    """Within ``tolerance`` of the largest element (at least ``floor``: biases that
    start at zero have moved by two or three rounded steps only)."""
    assert got.shape == expected.shape, what
    scale = max(float(expected.detach().abs().max()), floor)
    error = float((got.detach() - expected.detach()).abs().max())
    assert error <= tolerance * scale + 1e-9, f"{what}: off by {error}, largest {scale}"


def check_all(cases: list[Case]) -> list[str]:
    """As :func:`check`, but reports every case in place of stopping at the first."""
    import traceback

    found: list[str] = []
    for case in cases:
        print(f"checking {case}", flush=True)
        try:
            found.append(f"ok {check_one(case)}")
        except Exception:
            found.append(f"FAIL {case}\n{traceback.format_exc()[-1500:]}")
    return found


def planned_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A factory that the command line can name."""
    model, batch = deep_gpt()
    return model, batch(1, 0)
