"""Convolutions written out as patches: equal work, more bytes, more time."""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false
import pytest
import torch
from torch import nn

import planner
from passes.backward import saved_bytes
from passes.conv_to_gemm import materialize
from passes.ir import OpKind
from passes.lower import with_batch
from passes.pipeline import run_passes
from passes.trace import trace
from planner.errors import PlannerError

Model = tuple[nn.Module, torch.Tensor]


def flat() -> Model:
    layers = (
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 5, 1, 2, groups=8),
        nn.Conv2d(8, 12, 1, 2),
        nn.ConvTranspose2d(12, 4, 3, 2, 1, output_padding=1),
    )
    return nn.Sequential(*layers), torch.zeros(2, 3, 32, 32)


def sound() -> Model:
    layers = (
        nn.Conv1d(1, 8, 10, 5),
        nn.GELU(),
        nn.Conv1d(8, 8, 3, dilation=4, padding=4, padding_mode="circular"),
        nn.ConvTranspose1d(8, 2, 6, 3, groups=2),
    )
    return nn.Sequential(*layers), torch.zeros(2, 1, 160)


def video() -> Model:
    layers = (
        nn.Conv3d(3, 8, (3, 5, 5), (1, 2, 2), (1, 2, 2)),
        nn.ReLU(),
        nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), groups=2),
    )
    return nn.Sequential(*layers), torch.zeros(2, 3, 4, 16, 16)


@pytest.mark.parametrize("build", [flat, sound, video])
def test_both_forms_do_equal_work(build) -> None:
    model, x = build()
    traced = trace(model, (x,))
    implicit, explicit = run_passes(traced), run_passes(materialize(traced))
    assert OpKind.CONV in {o.kind for o in implicit.ops}
    assert not {OpKind.CONV, OpKind.UNKNOWN} & {o.kind for o in explicit.ops}
    assert explicit.warnings == implicit.warnings
    assert explicit.parameters == implicit.parameters
    for field in ("forward_flops", "backward_flops"):
        one = sum(getattr(o, field) for o in implicit.ops)
        assert one == sum(getattr(o, field) for o in explicit.ops) > 0
    assert saved_bytes(explicit) > saved_bytes(implicit)
    assert saved_bytes(with_batch(explicit, 8)) > 3 * saved_bytes(explicit)


def test_patches_are_kept() -> None:
    """A 3x3 convolution keeps nine times its input, a 1x1 its input once."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1))
    traced = trace(model, (torch.zeros(2, 4, 8, 8),))
    between = 2 * 4 * 8 * 8 * 4
    by_module = {"0": 0, "1": 0}
    graph = run_passes(materialize(traced))
    for op in graph.ops:
        by_module[op.module] += saved_bytes(graph, [op])
    assert by_module == {"0": between, "1": 9 * between}
    # the input of the model is not counted
    assert saved_bytes(run_passes(traced)) == between


def test_patches_cost_memory_and_time() -> None:
    """At a batch that fills the GPU; a small product can beat a small convolution."""
    found = {}
    for form in ("implicit", "materialized"):
        workload = planner.Training(
            global_batch=2048, image_size=224, im2col=form, precision="fp32"
        )
        shape = planner.Parallelism(dp_replicate=8, micro_batch_size=256)
        found[form] = planner.predict("resnet50", "8xA100", workload, shape).estimate
    implicit, explicit = found["implicit"], found["materialized"]
    assert explicit.step_time_s > implicit.step_time_s
    less, more = (e.memory_per_stage[0].activations_bytes for e in (implicit, explicit))
    assert more > 1.5 * less


def test_optimize_plans_the_chosen_form() -> None:
    model, x = flat()
    kinds = {}
    for form in ("implicit", "materialized"):
        plan = planner.optimize(
            model, "2xA100", planner.Training(global_batch=8), example_inputs=(x,),
            im2col=form,
        )  # fmt: skip
        assert plan.workload.im2col == form
        kinds[form] = any("_patches" in name for name in plan.placements)
    assert kinds == {"implicit": False, "materialized": True}


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(PlannerError, match="im2col"):
        planner.Training(im2col="written")  # type: ignore[arg-type]
