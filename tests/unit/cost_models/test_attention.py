"""Attention prices: pairs, kernels, decode, and what each GPU can run."""

from __future__ import annotations

import pytest

from cost_models.attention import (
    attention_flops,
    attention_pairs,
    attention_time,
    kv_cache_write_time,
    padded_dim,
)
from cost_models.errors import SpecError
from cost_models.hardware import load_device

A100, H100, V100 = load_device("A100"), load_device("H100"), load_device("V100")


def brute(q: int, kv: int, causal: bool, window: int) -> int:
    count = 0
    for i in range(q):
        last = kv - q + i
        seen = [j for j in range(kv) if not causal or j <= last]
        if window and causal:
            seen = [j for j in seen if j > last - window]
        elif window:
            seen = seen[:window]
        count += len(seen)
    return count


@pytest.mark.parametrize("q", [1, 3, 8])
@pytest.mark.parametrize("kv", [1, 5, 8, 13])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_pairs_equal_counting(q: int, kv: int, causal: bool, window: int) -> None:
    assert attention_pairs(q, kv, causal, window) == brute(q, kv, causal, window)


def test_flops_of_full_attention() -> None:
    # 4 b h s^2 d forward, 2.5 times that backward with recomputed scores
    pairs = attention_pairs(1024, 1024, False)
    assert attention_flops(pairs, 8, 128, 128, False) == 4 * 8 * 1024**2 * 128
    assert attention_flops(pairs, 8, 128, 128, True) == 10 * 8 * 1024**2 * 128


def test_long_causal_prefill_reaches_flash_rates() -> None:
    op = attention_time(A100, 1, 32, 32, 16384, 16384, 128, 128)
    assert 150e12 < op.flops / op.time_s < 230e12
    full = attention_time(A100, 1, 32, 32, 16384, 16384, 128, 128, causal=False)
    assert 1.8 < full.time_s / op.time_s < 2.2


def test_backward_costs_more_than_forward() -> None:
    forward = attention_time(H100, 2, 16, 16, 4096, 4096, 128, 128)
    backward = attention_time(H100, 2, 16, 16, 4096, 4096, 128, 128, backward=True)
    assert 2 < backward.time_s / forward.time_s < 4


def test_decode_is_bound_by_the_cache_and_groups_share_it() -> None:
    grouped = attention_time(H100, 64, 64, 8, 1, 8192, 128, 128)
    full = attention_time(H100, 64, 64, 64, 1, 8192, 128, 128)
    assert grouped.bound == "memory"
    assert grouped.time_s >= grouped.bytes / H100.hbm_bytes_per_s
    assert 6 < full.time_s / grouped.time_s < 9


def test_a_window_bounds_work_and_bytes() -> None:
    whole = attention_time(A100, 1, 32, 8, 16384, 16384, 128, 128)
    near = attention_time(A100, 1, 32, 8, 16384, 16384, 128, 128, window=1024)
    assert near.time_s < whole.time_s / 4
    step = attention_time(A100, 32, 32, 8, 1, 16384, 128, 128, window=1024)
    assert step.bytes < attention_time(A100, 32, 32, 8, 1, 2048, 128, 128).bytes


def test_unfused_attention_moves_the_score_matrix() -> None:
    flash = attention_time(A100, 1, 32, 32, 4096, 4096, 128, 128)
    unfused = attention_time(A100, 1, 32, 32, 4096, 4096, 128, 128, kernel="math")
    assert unfused.bytes > 4 * 32 * 4096**2 * 2
    assert unfused.time_s > 2 * flash.time_s
    back = attention_time(
        A100, 1, 32, 32, 4096, 4096, 128, 128, kernel="math", backward=True
    )
    assert back.time_s > unfused.time_s


def test_flash_needs_ampere_and_efficient_runs_before_it() -> None:
    with pytest.raises(SpecError, match="Ampere"):
        attention_time(V100, 1, 16, 16, 2048, 2048, 64, 64, dtype="fp16")
    sizes = (1, 16, 16, 2048, 2048, 64, 64)
    efficient = attention_time(V100, *sizes, dtype="fp16", kernel="efficient")
    assert efficient.time_s > 0
    with pytest.raises(SpecError, match="bf16"):
        attention_time(V100, *sizes, dtype="bf16", kernel="efficient")


def test_head_dims_are_padded_to_compiled_ones() -> None:
    assert [padded_dim(d) for d in (3, 64, 80, 128, 576)] == [32, 64, 96, 128, 576]
    odd = attention_time(A100, 1, 32, 32, 8192, 8192, 80, 80)
    even = attention_time(A100, 1, 32, 32, 8192, 8192, 96, 96)
    assert odd.time_s == pytest.approx(even.time_s, rel=0.05)


def test_writing_the_cache_moves_it_twice() -> None:
    op = kv_cache_write_time(A100, 4, 8, 2048, 128, 128)
    assert op.bytes == 2 * 4 * 8 * 2048 * 256 * 2
    assert op.time_s > op.bytes / A100.hbm_bytes_per_s


@pytest.mark.parametrize(
    ("sizes", "match"),
    [((0, 1, 1, 1, 1, 1, 1), "sizes"), ((1, 6, 4, 8, 8, 64, 64), "divide")],
)
def test_wrong_sizes_are_refused(sizes, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        attention_time(A100, *sizes)
    with pytest.raises(SpecError, match="kernel"):
        attention_time(A100, 1, 1, 1, 8, 8, 64, 64, kernel="magic")
