"""Lowering: micro-batches, FLOPs, fused projections, gradients, text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from passes.errors import PassError
from passes.format import format_graph
from passes.ir import Op, OpGraph, OpKind, TensorKind
from passes.lower import lower, with_batch
from passes.pipeline import run_passes
from passes.trace import trace
from passes.traced import TracedModel
from planner.presets import PRESETS
from tests.unit.passes.small_models import GPT, NAMES, build, traced

GOLDEN = Path(__file__).parents[2] / "golden"


@lru_cache
def model(name: str) -> TracedModel:
    return traced(name)


@lru_cache
def graph(name: str) -> OpGraph:
    return lower(model(name))


def op(name: str, kind: OpKind, module: str = "") -> Op:
    return next(
        o for o in graph(name).ops if o.kind is kind and o.module.endswith(module)
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_space(name: str) -> None:
    assert graph(name).warnings == ()
    assert OpKind.UNKNOWN not in {o.kind for o in graph(name).ops}


@pytest.mark.parametrize("batch", [1, 2, 7, 32])
@pytest.mark.parametrize("name", NAMES)
def test_rescaled_graph_equals_lowering_at_that_batch(name: str, batch: int) -> None:
    again = lower(model(name).with_batch(batch))
    assert with_batch(graph(name), batch) == again
    assert with_batch(again, 4) == graph(name)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_trace(name: str) -> None:
    """Dims and shapes agree with the fake tensors at the traced batch."""
    for node in model(name).graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "get_attr" and isinstance(value, torch.Tensor):
            assert graph(name).tensor(node.name).shape == tuple(value.shape)
    for o in graph(name).ops:
        for operand in o.space.inputs + o.space.outputs:
            shape = graph(name).tensor(operand.tensor).shape
            for axis, size in zip(operand.axes, shape, strict=True):
                product = 1
                for d in axis.dims:
                    product *= o.space.dim(d).size
                if axis.dims and not axis.window:
                    assert product == size, (o.name, operand)


@pytest.mark.parametrize("name", NAMES)
def test_forward_flops_are_torchs(name: str) -> None:
    module, args = build(name)
    # the math backend: torch's CPU and meta flash kernels have no formula
    with FlopCounterMode(display=False) as mode, sdpa_kernel(SDPBackend.MATH):
        module(*args)
    counted = sum(o.forward_flops for o in graph(name).ops)
    assert counted == mode.get_total_flops() > 0


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama3-8b", "bert-large", "t5-11b", "vit-l16", "resnet50", "unet-sd"],
)
def test_forward_flops_of_presets_are_torchs(name: str) -> None:
    module, kwargs = PRESETS[name].build(dtype=torch.bfloat16)
    lowered = run_passes(trace(module, (), kwargs))
    with FlopCounterMode(display=False) as mode, sdpa_kernel(SDPBackend.MATH):
        module(**kwargs)
    counted = sum(o.forward_flops for o in lowered.ops)
    assert counted == mode.get_total_flops() > 0
    assert OpKind.UNKNOWN not in {o.kind for o in lowered.ops}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_grouped_products_count_where_torch_has_no_formula(name: str) -> None:
    """torch counts nothing for _grouped_mm: the rest must agree, and each grouped
    product is 2 x rows x n x k."""
    module, kwargs = PRESETS[name].build(dtype=torch.bfloat16, size=256)
    source = trace(module, (), kwargs, batch=2)
    lowered = lower(source)
    with FlopCounterMode(display=False) as mode, sdpa_kernel(SDPBackend.MATH):
        source.graph_module(
            *(
                torch.zeros(
                    n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta"
                )
                for n in source.graph_module.graph.find_nodes(op="placeholder")
            )
        )
    grouped = [o for o in lowered.ops if o.kind is OpKind.GROUPED_GEMM]
    rest = sum(o.forward_flops for o in lowered.ops if o not in grouped)
    assert rest == mode.get_total_flops() > 0
    for o in grouped:
        rows, k = lowered.tensor(o.inputs[0]).shape
        n = lowered.tensor(o.outputs[0]).shape[1]
        assert o.forward_flops == 2 * rows * n * k


@pytest.mark.parametrize("name", ["vision", "moe", "resnet"])
def test_backward_flops_are_torchs(name: str) -> None:
    """Models without fused attention and grouped convolutions.

    torch counts the weight gradient of a grouped convolution once too often per
    group; here it counts like the forward.
    """
    module, args = build(name)
    result = module(*args)
    with FlopCounterMode(display=False) as mode:
        result.sum().backward()
    counted = sum(o.backward_flops for o in graph(name).ops)
    assert counted == mode.get_total_flops() > 0


def test_attention_flops_are_torchs_flash_formula() -> None:
    """Whole, although causal: torch leaves the mask out, so it counts twice the work
    that a causal kernel does."""
    q, kv = (4, 8, 8, 4), (4, 2, 8, 4)
    attention = op("grouped", OpKind.ATTENTION)
    assert attention.attr("causal") is True
    assert attention.forward_flops == sdpa_flop_count(q, kv, kv)
    assert attention.backward_flops == sdpa_backward_flop_count(q, q, kv, kv)


def test_grouped_convolution_backward_is_twice_its_forward() -> None:
    depthwise = op("unet", OpKind.CONV, "depth")
    assert depthwise.backward_flops == 2 * depthwise.forward_flops


def test_first_layer_computes_no_input_gradient() -> None:
    stem = op("resnet", OpKind.CONV, "stem")
    assert stem.backward_flops == stem.forward_flops


def test_frozen_weights_compute_no_weight_gradient() -> None:
    module, args = build("gpt")
    assert isinstance(module, GPT)
    module.layers[1].requires_grad_(False)  # type: ignore[union-attr]
    frozen = lower(trace(module, args))
    fc = next(o for o in frozen.ops if o.module == "layers.1.fc")
    assert fc.backward_flops == fc.forward_flops
    assert not frozen.tensor("layers.1.fc.weight").trainable


def test_inference_has_no_backward() -> None:
    module, args = build("gpt")
    forward = lower(trace(module, args, training=False))
    assert sum(o.backward_flops for o in forward.ops) == 0
    assert sum(o.forward_flops for o in forward.ops) == sum(
        o.forward_flops for o in graph("gpt").ops
    )


def test_fused_qkv_is_split_in_parts_back_to_its_weight() -> None:
    linear = op("gpt", OpKind.GEMM, "qkv")
    for operand, axis in ((1, 0), (2, 0)):
        assert linear.space.inputs[operand].axes[axis].parts == (16, 16, 16)
    assert linear.space.outputs[0].axes[2].parts == (16, 16, 16)
    assert linear.space.outputs[0].axes[2].dims[0] == "n"
    assert linear.space.dim("n").size == 16


def test_uneven_qkv_shards_by_its_common_divisor() -> None:
    linear = op("grouped", OpKind.GEMM, "qkv")
    assert linear.space.inputs[1].axes[0].parts == (32, 8, 8)
    assert linear.space.dim("n").size == 8
    assert linear.attr("n") == 48


def test_gate_and_up_are_parts() -> None:
    linear = op("grouped", OpKind.GEMM, "gate_up")
    assert linear.space.inputs[1].axes[0].parts == (128, 128)


def test_rotary_halves_are_not_parts_of_the_projection() -> None:
    for o in graph("grouped").ops:
        if ".slice." in o.target:
            assert not any(a.parts for x in o.space.inputs for a in x.axes)


def test_outer_three_of_vision_qkv_stays_whole() -> None:
    linear = op("vision", OpKind.GEMM, "qkv")
    axis = linear.space.inputs[1].axes[0]
    assert [linear.space.dim(d).size for d in axis.dims] == [3, 16]


def test_merged_tokens_keep_batch_and_sequence() -> None:
    gate = op("moe", OpKind.GEMM, "gate")
    dims = [gate.space.dim(d) for d in gate.space.inputs[0].axes[0].dims]
    assert [(d.size, d.per_sample) for d in dims] == [(4, 1), (8, 0)]
    loss = op("gpt", OpKind.LOSS)
    rows = [loss.space.dim(d) for d in loss.space.inputs[1].axes[0].dims]
    assert [(d.size, d.per_sample) for d in rows] == [(4, 1), (8, 0)]


def test_tied_weight_is_listed_once() -> None:
    tied = graph("gpt").tensor("wte.weight")
    assert tied.aliases == ("head.weight",)
    assert "head.weight" not in {t.name for t in graph("gpt").tensors}
    parameters = [t for t in graph("gpt").tensors if t.kind is TensorKind.PARAMETER]
    module, _ = build("gpt")
    assert sum(t.numel for t in parameters) == sum(
        p.numel() for p in module.parameters()
    )


def test_a_fixed_batch_is_said_and_not_rescaled() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(4, -1) * 2

    fixed = lower(trace(Fixed(), (torch.zeros(4, 6, device="meta"),)))
    assert any("batch is fixed" in w for w in fixed.warnings)
    with pytest.raises(PassError, match="fixes it: 8"):
        with_batch(fixed, 8)


def test_a_write_through_a_view_reaches_the_readers_of_its_base() -> None:
    class Write(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            y[:, :2] = x[:, 2:4] * 2
            return y + 1

    graph = lower(trace(Write(), (torch.zeros(4, 6, device="meta"),)))
    made = {n: o for o in graph.ops for n in o.outputs}
    last = made[graph.outputs[0]]
    scatter = made[last.inputs[0]]
    assert scatter.target == "aten.slice_scatter.default"
    assert [made[n].target.split(".")[1] for n in scatter.inputs] == [
        "slice",
        "copy_",
    ]


def test_batch_must_be_positive() -> None:
    with pytest.raises(PassError, match="at least 1"):
        with_batch(graph("gpt"), 0)


@pytest.mark.parametrize("name", ["gpt", "grouped", "resnet"])
def test_golden_text(name: str, update_golden: bool) -> None:
    text = format_graph(run_passes(model(name)))
    path = GOLDEN / f"graph-{name}.txt"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text(), "run with --update-golden and read the diff"


def test_dump_writes_one_file_a_pass(tmp_path: Path) -> None:
    result = run_passes(model("gpt"), dump_dir=tmp_path)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files[0] == "00-lower.txt"
    assert (tmp_path / files[-1]).read_text() == format_graph(result)
