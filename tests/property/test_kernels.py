"""Kernel prices on arbitrary shapes: never beat the hardware, and grow with work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.attention import attention_time
from cost_models.conv import DIRECTIONS, WINOGRAD_GAIN, conv_time
from cost_models.gemm import gemm_time, gemm_times, weight_only_gemm_time
from cost_models.hardware import device_names, load_device
from cost_models.roofline import pointwise_time

DEVICES = [load_device(name) for name in device_names()]
A100 = load_device("A100")
size = st.integers(1, 20000)
device = st.sampled_from(DEVICES)


@settings(max_examples=300, deadline=None)
@given(device, size, size, size, st.integers(1, 64), st.data())
def test_gemm_never_beats_the_physical_limit(on, m, n, k, batch, data) -> None:
    dtype = data.draw(st.sampled_from([d for d, _ in on.peak_flops]))
    op = gemm_time(on, m, n, k, batch, dtype)
    assert op.time_s >= op.flops / on.peak(dtype) * (1 - 1e-12)
    assert op.time_s >= op.bytes / on.hbm_bytes_per_s * (1 - 1e-12)
    assert 0 < op.utilization <= 1 + 1e-12


@settings(max_examples=60, deadline=None)
@given(device, size, size, size, st.integers(1, 8))
def test_vector_path_equals_the_single_one(on, m, n, k, batch) -> None:
    single = gemm_time(on, m, n, k, batch, "fp32", out_bytes=4).time_s
    many = gemm_times(on, [m], [n], [k], [batch], "fp32", out_bytes=4)
    assert many[0] == pytest.approx(single, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 13), st.integers(10, 14), st.integers(10, 14))
def test_more_rows_do_not_cost_less(m, n, k) -> None:
    # up to the noise of the measured surface, which follows real library choices
    small = gemm_time(A100, 2**m, 2**n, 2**k).time_s
    large = gemm_time(A100, 2 ** (m + 1), 2**n, 2**k).time_s
    assert large > 0.75 * small
    assert gemm_time(A100, 2 ** (m + 3), 2**n, 2**k).time_s > 0.9 * small


@settings(max_examples=80, deadline=None)
@given(size, st.integers(64, 16384), st.integers(64, 16384), st.sampled_from([4, 8]))
def test_weight_only_never_beats_the_limit(m, n, k, bits) -> None:
    op = weight_only_gemm_time(A100, m, n, k, bits, 128)
    limit = max(op.flops / A100.peak("bf16"), op.bytes / A100.hbm_bytes_per_s)
    assert op.time_s >= limit * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 4096),
    st.integers(0, 4096),
    st.sampled_from([64, 80, 128]),
    st.booleans(),
    st.booleans(),
)
def test_attention_never_beats_the_limit(b, kv, group, q, extra, dim, causal, back):
    op = attention_time(
        A100, b, kv * group, kv, q, q + extra, dim, dim, causal=causal, backward=back
    )
    limit = max(op.flops / A100.peak("bf16"), op.bytes / A100.hbm_bytes_per_s)
    assert op.time_s >= limit * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([d for d in DEVICES if d.supports("fp16")]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 2]),
    st.sampled_from(["fp16", "fp32"]),
    st.sampled_from(DIRECTIONS),
)
def test_convolution_never_beats_the_limit(on, n, ci, co, out, r, s, dtype, way):
    args = (on, n, 8 * ci, 8 * co, (out * s,) * 2, (out,) * 2, (r, r), (s, s))
    op = conv_time(*args, dtype=dtype, direction=way)
    peak = on.peak(dtype) * (WINOGRAD_GAIN if dtype == "fp32" else 1.0)
    assert op.time_s >= op.flops / peak * (1 - 1e-12)
    assert op.time_s >= op.bytes / on.hbm_bytes_per_s * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(device, st.floats(1, 1e10), st.floats(1, 1e10))
def test_pointwise_grows_and_never_beats_hbm(on, read, write) -> None:
    op = pointwise_time(on, read, write)
    assert op.time_s >= op.bytes / on.hbm_bytes_per_s
    assert pointwise_time(on, 2 * read, write).time_s > op.time_s
