"""Schedules: worked figures, legality per framework, live micro-batches."""

from __future__ import annotations

import pytest

from cost_models.errors import SpecError
from cost_models.pipeline import (
    Backend,
    Schedule,
    check_legal,
    in_flight,
    legal,
    simulate,
    step_time,
)


@pytest.mark.parametrize(
    ("m", "torch", "megatron"),
    [
        (3, True, False),
        (8, True, True),
        (9, False, False),
        (10, True, False),
        (11, False, False),
        (12, True, True),
    ],
)
def test_interleaved_micro_batches_differ_between_frameworks(m, torch, megatron):
    rule = legal(Schedule.INTERLEAVED, 4, m, 2, Backend.TORCH)
    assert (rule is None) is torch
    rule = legal(Schedule.INTERLEAVED, 4, m, 2, Backend.MEGATRON)
    assert (rule is None) is megatron


def test_1f1b_needs_a_micro_batch_per_stage_in_torch():
    assert "at least 4" in (legal(Schedule.ONE_F_ONE_B, 4, 3) or "")
    assert legal(Schedule.ONE_F_ONE_B, 4, 3, backend=Backend.MEGATRON) is None
    assert legal(Schedule.ONE_F_ONE_B, 4, 4) is None
    with pytest.raises(SpecError, match="at least 4"):
        check_legal(Schedule.ONE_F_ONE_B, 4, 3)


def test_chunks_per_rank():
    assert legal(Schedule.INTERLEAVED, 4, 8, 1) is not None
    assert legal(Schedule.ZERO_BUBBLE, 4, 8, 3) is not None
    assert legal(Schedule.ZERO_BUBBLE, 4, 8, 2) is None
    assert legal(Schedule.ZERO_BUBBLE, 4, 8, 1, Backend.MEGATRON) is not None
    assert legal(Schedule.GPIPE, 4, 8, 2) is not None


def test_step_of_four_equal_stages():
    """m = 8, S = 4, t = 3: 1F1B (8 + 3) x 3; two chunks halve the bubble."""
    plain = step_time("1f1b", [1] * 4, [2] * 4, 0.0, 8)
    assert (plain.total_s, plain.bubble_s, plain.p2p_exposed_s) == (33, 9, 0)
    halved = step_time("interleaved", [1] * 4, [2] * 4, 0.0, 8, 2)
    assert (halved.total_s, halved.bubble_s) == (28.5, 4.5)
    late = step_time("zero_bubble", [1] * 4, [2] * 4, 0.0, 8)
    assert (late.total_s, late.bubble_s) == (27, 3)
    folded = step_time("zero_bubble", [1] * 4, [2] * 4, 0.0, 8, 2)
    assert folded.total_s == pytest.approx(25.5)


def test_messages_are_exposed_in_fill_and_drain():
    got = step_time("gpipe", [1, 1], [2, 2], 0.25, 4)
    assert got.p2p_exposed_s == pytest.approx(0.5)
    got = step_time("interleaved", [1] * 4, [2] * 4, 0.01, 8, 2)
    assert got.p2p_exposed_s == pytest.approx(2 * 7 * 0.01)


def test_one_rank_has_no_bubble():
    got = step_time("1f1b", [1.0], [2.0], 5.0, 4)
    assert (got.total_s, got.bubble_s, got.p2p_exposed_s) == (12.0, 0.0, 0.0)


def test_live_micro_batches():
    assert [in_flight("1f1b", k, 4, 8) for k in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", k, 4, 2) for k in range(4)] == [2, 2, 2, 1]
    assert in_flight("gpipe", 3, 4, 8) == 8
    # 2 (S - k - 1) + (v - 1) S + 1 pieces of half a rank each
    assert [in_flight("interleaved", k, 4, 8, 2) for k in range(4)] == [
        5.5,
        4.5,
        3.5,
        2.5,
    ]
    assert [in_flight("zero_bubble", k, 4, 8) for k in range(4)] == [4, 4, 4, 4]
    with pytest.raises(SpecError, match="stage"):
        in_flight("1f1b", 4, 4, 8)


def test_chunk_times_in_model_order():
    equal = simulate("interleaved", [1.0] * 2, [2.0] * 2, 0.1, 4, 2)
    chunks = simulate("interleaved", [0.5] * 4, [1.0] * 4, 0.1, 4, 2, per_chunk=True)
    assert chunks.total_s == pytest.approx(equal.total_s)
    last_heavy = simulate(
        "interleaved", [0.5, 0.5, 0.5, 1.0], [1.0] * 4, 0.1, 4, 2, per_chunk=True
    )
    assert last_heavy.total_s > equal.total_s


@pytest.mark.parametrize(
    "args",
    [
        ("1f1b", [1.0], [1.0, 2.0], 0.0, 4),
        ("1f1b", [], [], 0.0, 4),
        ("1f1b", [1.0, 1.0], [1.0, 1.0], [0.1, 0.1, 0.1], 4),
        ("1f1b", [1.0], [1.0], 0.0, 0),
    ],
)
def test_bad_lengths_are_refused(args):
    with pytest.raises(SpecError):
        step_time(*args)
