"""Convolution prices: FLOPs, bytes, directions, groups and layouts."""

from __future__ import annotations

import pytest

from cost_models.conv import conv_time
from cost_models.errors import SpecError
from cost_models.hardware import load_device
from cost_models.roofline import pointwise_time

V100, A100 = load_device("V100"), load_device("A100")
LAYER = (32, 128, 256, (28, 28), (28, 28), (3, 3), (1, 1))
DIRECTIONS = ("forward", "backward_input", "backward_weight")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flops_are_those_of_the_direct_convolution(direction: str) -> None:
    op = conv_time(V100, *LAYER, direction=direction)
    assert op.flops == 2 * 32 * 28 * 28 * 256 * 128 * 9
    assert op.time_s >= op.flops / V100.peak("fp16")


def test_im2col_bytes_are_not_moved() -> None:
    op = conv_time(V100, *LAYER)
    x, y, w = 32 * 128 * 784, 32 * 256 * 784, 256 * 128 * 9
    assert op.bytes == 2 * (x + y + w)


def test_a_strided_point_kernel_reads_only_what_it_meets() -> None:
    op = conv_time(V100, 8, 256, 512, (56, 56), (28, 28), (1, 1), (2, 2))
    assert op.bytes == 2 * (8 * 256 * 784 + 8 * 512 * 784 + 256 * 512)


def test_a_large_layer_uses_tensor_cores_well_and_fp32_does_not() -> None:
    half = conv_time(V100, 64, 256, 512, (28, 28), (28, 28), (3, 3), (1, 1))
    assert 0.5 < half.utilization <= 1
    single = conv_time(
        V100, 64, 256, 512, (28, 28), (28, 28), (3, 3), (1, 1), dtype="fp32"
    )
    assert 2 < single.time_s / half.time_s < 8


def test_depthwise_runs_near_the_speed_of_its_bytes() -> None:
    op = conv_time(A100, 64, 256, 256, (56, 56), (56, 56), (3, 3), (1, 1), groups=256)
    streamed = pointwise_time(A100, 64 * 256 * 3136 * 2, 64 * 256 * 3136 * 2).time_s
    assert streamed <= op.time_s < 2 * streamed
    assert op.utilization < 0.05
    dense = conv_time(A100, 64, 256, 256, (56, 56), (56, 56), (3, 3), (1, 1))
    assert op.flops * 256 == dense.flops


def test_groups_divide_the_work() -> None:
    whole = conv_time(A100, 32, 256, 256, (28, 28), (28, 28), (3, 3), (1, 1))
    parts = conv_time(A100, 32, 256, 256, (28, 28), (28, 28), (3, 3), (1, 1), groups=4)
    assert parts.flops * 4 == whole.flops
    assert parts.time_s < 1.5 * whole.time_s


def test_transposed_forward_is_the_input_gradient_of_its_transpose() -> None:
    up = conv_time(A100, 8, 64, 32, (32, 32), (64, 64), (2, 2), (2, 2), transposed=True)
    down = conv_time(
        A100,
        *(8, 32, 64, (64, 64), (32, 32), (2, 2), (2, 2)),
        direction="backward_input",
    )
    assert up == down


def test_channels_first_adds_the_conversion() -> None:
    last = conv_time(A100, *LAYER)
    first = conv_time(A100, *LAYER, channels_last=False)
    assert first.time_s > last.time_s
    assert first.bytes > last.bytes
    exact = {"dtype": "fp32", "channels_last": False}
    plain = conv_time(A100, *LAYER, dtype="fp32")
    assert conv_time(A100, *LAYER, **exact).time_s == plain.time_s


def test_one_and_three_dimensions() -> None:
    one = conv_time(A100, 8, 64, 64, (1000,), (1000,), (3,), (1,))
    three = conv_time(A100, 2, 32, 32, (16,) * 3, (16,) * 3, (3,) * 3, (1,) * 3)
    assert one.flops == 2 * 8 * 1000 * 64 * 64 * 3
    assert three.flops == 2 * 2 * 16**3 * 32 * 32 * 27


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"direction": "sideways"}, "direction"),
        ({"groups": 3}, "divide"),
        ({"kernel": (3,)}, "lengths"),
        ({"n": 0}, "sizes"),
    ],
)
def test_wrong_input_is_refused(change, match: str) -> None:
    names = ("n", "ci", "co", "in_size", "out_size", "kernel", "stride")
    with pytest.raises(SpecError, match=match):
        conv_time(A100, **(dict(zip(names, LAYER, strict=True)) | change))
