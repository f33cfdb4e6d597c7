"""GEMM prices: the regimes that a planner relies on, and their surfaces."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from cost_models.errors import SpecError
from cost_models.gemm import (
    gemm_time,
    gemm_times,
    measured,
    quantise_time,
    sustained_ratio,
    weight_only_gemm_time,
)
from cost_models.hardware import device_names, load_device
from cost_models.surfaces import find_surface, interpolate, surfaces

A100, H100 = load_device("A100"), load_device("H100")


def test_batch_one_decode_is_memory_bound_and_under_a_tenth_of_peak() -> None:
    op = gemm_time(A100, 1, 4096, 4096, dtype="bf16")
    assert op.bound == "memory"
    assert op.utilization < 0.1
    # 32 MiB of weights at 2039 GB/s take 16.5 us
    assert 16.5e-6 < op.time_s < 30e-6


def test_large_fp16_is_about_sixteen_times_fp32_on_a100() -> None:
    half = gemm_time(A100, 8192, 8192, 8192, dtype="fp16").time_s
    single = gemm_time(A100, 8192, 8192, 8192, dtype="fp32", out_bytes=4).time_s
    assert 312 / 19.5 == 16
    assert single / half == pytest.approx(16, rel=0.15)


def test_large_square_reaches_what_libraries_reach() -> None:
    assert 0.7 < gemm_time(A100, 8192, 8192, 8192).utilization < 0.95
    assert 0.6 < gemm_time(H100, 8192, 8192, 8192).utilization < 0.95


def test_fp8_doubles_the_rate_where_the_device_has_it() -> None:
    half = gemm_time(H100, 8192, 8192, 8192, dtype="bf16").time_s
    eight = gemm_time(H100, 8192, 8192, 8192, dtype="fp8").time_s
    assert 1.3 < half / eight < 2.2
    with pytest.raises(SpecError, match="fp8"):
        gemm_time(A100, 128, 128, 128, dtype="fp8")


def test_bf16_on_v100_is_refused() -> None:
    with pytest.raises(SpecError, match="bf16"):
        gemm_time(load_device("V100"), 128, 128, 128, dtype="bf16")


def test_one_tile_more_than_a_wave_costs_nearly_a_wave() -> None:
    # 128 x 128 tiles of m = 13824 fill 108 SMs once at n = 128; n = 256 is two waves
    one = gemm_time(H100, 132 * 128, 256, 8192).time_s
    more = gemm_time(H100, 133 * 128, 256, 8192).time_s
    linear = gemm_time(H100, 264 * 128, 256, 8192).time_s
    assert one < more <= linear
    assert more - one > (linear - one) / 132


def test_odd_vocabulary_is_slower_than_an_aligned_one() -> None:
    aligned = gemm_time(A100, 8192, 51200, 14336, dtype="fp16").time_s
    even = gemm_time(A100, 8192, 51206, 14336, dtype="fp16").time_s
    odd = gemm_time(A100, 8192, 51185, 14336, dtype="fp16").time_s
    assert 1.4 < even / aligned < 2.5
    assert 2.5 < odd / aligned < 4.5


def test_vector_path_equals_single_calls() -> None:
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, 9000, 60) for _ in range(3))
    batch = rng.integers(1, 5, 60)
    for device, dtype in ((A100, "bf16"), (H100, "fp8"), (load_device("T4"), "fp32")):
        many = gemm_times(device, m, n, k, batch, dtype)
        rows = zip(m.tolist(), n.tolist(), k.tolist(), batch.tolist(), strict=True)
        single = [
            gemm_time(device, a, b, c, d, dtype, out_bytes=2).time_s
            for a, b, c, d in rows
        ]
        np.testing.assert_allclose(many, single, rtol=1e-9)


def test_vector_path_broadcasts_and_takes_empty_input() -> None:
    assert gemm_times(A100, [[1], [8]], [64, 128, 256], 512).shape == (2, 3)
    assert gemm_times(A100, [], 1, 1).shape == (0,)


def test_four_bit_weights_speed_up_decode_but_not_prefill() -> None:
    dense = gemm_time(A100, 1, 8192, 8192).time_s
    four = weight_only_gemm_time(A100, 1, 8192, 8192, 4, 128).time_s
    eight = weight_only_gemm_time(A100, 1, 8192, 8192, 8, 128).time_s
    assert four < eight < dense
    assert 2 < dense / four < 4
    large = gemm_time(A100, 8192, 8192, 8192).time_s
    assert weight_only_gemm_time(A100, 8192, 8192, 8192, 4, 128).time_s >= large


def test_weight_only_bytes_count_scales_and_zero_points() -> None:
    op = weight_only_gemm_time(A100, 1, 1024, 4096, 4, 128)
    weights = 1024 * 4096 // 2 + 1024 * 32 * 2.5
    assert op.bytes == weights + (4096 + 1024) * 2


def test_quantising_activations_grows_with_rows() -> None:
    small, large = quantise_time(H100, 16, 4096), quantise_time(H100, 8192, 4096)
    assert small.time_s < large.time_s
    assert large.time_s >= large.bytes / H100.hbm_bytes_per_s


@pytest.mark.parametrize(
    "call",
    [
        lambda: gemm_time(A100, 0, 1, 1),
        lambda: gemm_time(A100, 1, 1, 1, layout="XX"),
        lambda: gemm_time(A100, 1, 1, 1, dtype="bf17"),
        lambda: gemm_times(A100, [1, 0], 4, 4),
        lambda: weight_only_gemm_time(A100, 1, 64, 64, 5, 128),
    ],
)
def test_wrong_input_is_refused(call) -> None:
    with pytest.raises(SpecError):
        call()


def test_every_device_has_a_price_and_says_whether_it_was_measured() -> None:
    for name in device_names():
        device = load_device(name)
        for dtype, _ in device.peak_flops:
            if dtype == "fp64":
                continue
            assert gemm_time(device, 512, 512, 512, dtype=dtype).time_s > 0
    assert measured(A100, "bf16")
    assert measured(H100, "fp8")
    assert not measured(load_device("H200"), "bf16")


def test_sustained_load_is_slower_where_it_was_measured() -> None:
    assert 1.2 < sustained_ratio(load_device("B200"), "bf16") < 1.8
    assert sustained_ratio(A100, "bf16") == 1.0


def test_an_unknown_architecture_falls_back_to_the_datasheet_surface() -> None:
    new = replace(A100, name="X1", family="X1", arch="future")
    surface, own = find_surface("gemm", new, "bf16")
    assert (surface.family, own) == ("datasheet", False)
    assert gemm_time(new, 8192, 8192, 8192).utilization > 0.5


@pytest.mark.parametrize("kind", ["gemm", "attention", "conv"])
def test_every_fitted_entry_carries_source_and_error(kind: str) -> None:
    file = resources.files("cost_models") / "utilization" / f"{kind}.json"
    for raw in json.loads(file.read_text("utf-8")):
        assert f"benchmarks/fit/fit_{kind}.py" in raw["source"]
        assert raw["error"] or raw["family"] == "datasheet"
    assert ("datasheet", "fp16") in surfaces(kind)


def test_interpolation_is_exact_at_knots_and_clamped_outside() -> None:
    knots, grid = ((0.0, 1.0, 3.0), (0.0, 2.0)), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert interpolate(knots, grid, (1.0, 2.0)) == 3.0
    assert interpolate(knots, grid, (2.0, 1.0)) == pytest.approx(3.5)
    assert interpolate(knots, grid, (9.0, -9.0)) == 4.0
