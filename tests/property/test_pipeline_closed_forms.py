"""Closed forms of the schedules against the discrete-event simulation."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.pipeline import Schedule, in_flight, simulate, step_time
from cost_models.schedules import Kind, legal

times = st.floats(0.1, 10.0)
ranks = st.integers(1, 8)
counts = st.integers(1, 24)
fast = settings(max_examples=80, deadline=None)


@fast
@given(st.data(), ranks, counts)
def test_gpipe_is_exact_for_any_stages_and_messages(data, s, m):
    forward = data.draw(st.lists(times, min_size=s, max_size=s))
    backward = data.draw(st.lists(times, min_size=s, max_size=s))
    p2p = data.draw(st.lists(st.floats(0, 2), min_size=s - 1, max_size=s - 1))
    got = step_time("gpipe", forward, backward, p2p or 0.0, m)
    want = simulate("gpipe", forward, backward, p2p or 0.0, m)
    assert got.total_s == pytest.approx(want.total_s)


@fast
@given(times, times, ranks, counts)
def test_1f1b_is_exact_for_equal_stages(f, b, s, m):
    got = step_time("1f1b", [f] * s, [b] * s, 0.0, m)
    assert got.total_s == pytest.approx(
        simulate("1f1b", [f] * s, [b] * s, 0, m).total_s
    )
    assert got.total_s == pytest.approx((m + s - 1) * (f + b))


@fast
@given(st.data(), ranks, counts, st.floats(0.5, 4))
def test_1f1b_without_messages_is_an_upper_bound(data, s, m, ratio):
    """Of stages whose backward is the same multiple of their forward."""
    forward = data.draw(st.lists(times, min_size=s, max_size=s))
    backward = [ratio * f for f in forward]
    bound = step_time("1f1b", forward, backward, 0.0, m).total_s
    real = simulate("1f1b", forward, backward, 0.0, m).total_s
    assert real <= bound * (1 + 1e-9)


@fast
@given(st.data(), ranks, counts)
def test_1f1b_stays_between_its_busiest_rank_and_gpipe(data, s, m):
    forward = data.draw(st.lists(times, min_size=s, max_size=s))
    backward = data.draw(st.lists(times, min_size=s, max_size=s))
    real = simulate("1f1b", forward, backward, 0.0, m).total_s
    busiest = max(f + b for f, b in zip(forward, backward, strict=True))
    assert real >= m * busiest * (1 - 1e-9)
    assert real <= step_time("gpipe", forward, backward, 0.0, m).total_s * (1 + 1e-9)


@fast
@given(times, st.floats(1.0, 3.0), st.floats(0, 0.5), ranks, counts, st.integers(2, 4))
def test_interleaved_is_exact_for_equal_stages(f, ratio, share, s, m, v):
    if legal(Schedule.INTERLEAVED, s, m, v) is not None:
        return
    p2p = 0.0 if m % s else share * f / v
    got = step_time("interleaved", [f] * s, [f * ratio] * s, p2p, m, v).total_s
    want = simulate("interleaved", [f] * s, [f * ratio] * s, p2p, m, v).total_s
    assert got == pytest.approx(want)


@fast
@given(times, st.floats(0.5, 2), st.floats(0.1, 1), st.integers(1, 8), counts)
def test_zero_bubble_is_exact_where_weights_are_no_longer(f, ratio, share, s, m):
    b = f * ratio
    w = share * min(f, b)
    got = step_time(
        "zero_bubble", [f] * s, [b + w] * s, 0, m, backward_weight_s=[w] * s
    )
    want = simulate(
        "zero_bubble", [f] * s, [b + w] * s, 0, m, backward_weight_s=[w] * s
    )
    assert got.total_s == pytest.approx(want.total_s)
    assert got.total_s <= (m + s - 1) * (f + b + w) * (1 + 1e-9)


@fast
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
    | st.sampled_from([("zero_bubble", 1), ("zero_bubble", 2)]),
    ranks,
    counts,
)
def test_live_micro_batches_equal_the_simulated_peak(schedule, s, m):
    name, v = schedule
    if legal(Schedule(name), s, m, v) is not None and name != "1f1b":
        return
    line = simulate(name, [1.0] * s, [2.0] * s, 0.1, m, v)
    live = [in_flight(name, k, s, m, v) for k in range(s)]
    assert live == list(line.in_flight_peak)
    assert len(line.events) == s * m * v * (3 if name == "zero_bubble" else 2)
    _check_dependencies(line.events)


def _check_dependencies(events):
    """No rank runs two things at once, and no B starts before its F ends."""
    by_rank = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    for line in by_rank.values():
        for a, b in itertools.pairwise(line):
            assert a.end_s <= b.start_s + 1e-9
        end = {(e.kind, e.micro, e.chunk): e.end_s for e in line}
        for e in line:
            if e.kind is not Kind.F:
                assert end[Kind.F, e.micro, e.chunk] <= e.start_s + 1e-9


def _deviation(schedule, virtual, spread, p2p, seed):
    """Relative errors of the closed form over random pipelines with m >= 2 S."""
    rng, errors = random.Random(seed), []
    for _ in range(120):
        s = rng.randint(2, 8)
        m = s * rng.randint(2, 5)
        forward = [1 + spread * rng.random() for _ in range(s)]
        backward = [2 * f for f in forward]
        args = (schedule, forward, backward, p2p, m, virtual)
        errors.append(step_time(*args).total_s / simulate(*args).total_s - 1)
    return errors


@pytest.mark.parametrize(
    ("schedule", "virtual", "spread", "p2p", "median", "low", "high"),
    [
        ("1f1b", 1, 0.2, 0.0, 0.01, 0.0, 0.04),
        ("1f1b", 1, 1.0, 0.0, 0.02, 0.0, 0.12),
        ("1f1b", 1, 0.0, 0.3, 0.01, -0.02, 0.02),
        ("1f1b", 1, 0.2, 0.1, 0.01, -0.02, 0.03),
        ("interleaved", 2, 0.2, 0.0, 0.03, 0.0, 0.10),
        ("interleaved", 2, 0.2, 0.1, 0.03, 0.0, 0.12),
        ("zero_bubble", 1, 0.2, 0.1, 0.01, -0.02, 0.02),
    ],
)
def test_unequal_stages_deviate_by_little(
    schedule, virtual, spread, p2p, median, low, high
):
    errors = _deviation(schedule, virtual, spread, p2p, seed=7)
    assert statistics.median(map(abs, errors)) <= median
    assert min(errors) >= low - 1e-9
    assert max(errors) <= high


def test_fast_enough_for_search():
    step = [1.0 + 0.01 * k for k in range(16)]
    best = min(
        _clock(lambda: step_time("1f1b", step, step, 0.1, 64)) for _ in range(50)
    )
    assert best < 50e-6
    run = min(_clock(lambda: simulate("1f1b", step, step, 0.1, 64)) for _ in range(5))
    assert run < 50e-3


def _clock(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
