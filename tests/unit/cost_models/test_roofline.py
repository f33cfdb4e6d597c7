"""The roofline: pointwise kernels and the record that every price is."""

from __future__ import annotations

import pytest

from cost_models.errors import SpecError
from cost_models.hardware import load_device
from cost_models.roofline import bound_of, dtype_bytes, pointwise_time

A100 = load_device("A100")


def test_large_pointwise_streams_near_hbm() -> None:
    op = pointwise_time(A100, 2e9, 2e9)
    rate = op.bytes / op.time_s / A100.hbm_bytes_per_s
    assert op.bound == "memory"
    assert 0.8 < rate < 0.95


def test_small_pointwise_is_a_kernel_launch() -> None:
    op = pointwise_time(A100, 1e3, 1e3)
    assert op.bound == "launch"
    assert op.time_s == pytest.approx(A100.kernel_s, rel=0.01)


def test_arithmetic_can_bound_a_pointwise_kernel() -> None:
    op = pointwise_time(A100, 1e6, 1e6, flops=1e11)
    assert op.bound == "compute"
    assert op.time_s >= 1e11 / A100.peak("fp32")


def test_no_work_takes_no_time() -> None:
    assert pointwise_time(A100, 0, 0).time_s == 0.0


def test_negative_work_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(SpecError, match="negative"):
        pointwise_time(A100, -1, 0)
    with pytest.raises(SpecError, match="fp17"):
        dtype_bytes("fp17")


@pytest.mark.parametrize(
    ("times", "name"),
    [((2, 1, 0.5), "compute"), ((1, 2, 0.5), "memory"), ((1, 2, 3), "launch")],
)
def test_bound_names_the_longest(times: tuple[float, float, float], name: str) -> None:
    assert bound_of(*times) == name
