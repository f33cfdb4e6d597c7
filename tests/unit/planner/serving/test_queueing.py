"""The simulated server against closed forms."""

import pytest

from planner.serving.queueing import closed_form_wait, erlang_c, simulate


def test_erlang_c_known_values() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)  # M/M/1: the load itself
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.0) == 0.0
    assert erlang_c(2, 2.0) == 1.0


def test_one_slot_is_an_m_d_1_queue() -> None:
    """Pollaczek-Khinchine for constant service: rho S / (2 (1 - rho))."""
    service = 0.5 + 9 * 0.05  # prefill, then nine more tokens
    for load in (0.3, 0.6, 0.8):
        rate = load / service
        seen = simulate(rate, 0.5, lambda n: 0.05, 10, 1, requests=20_000)
        exact = load * service / (2 * (1 - load))
        assert seen.mean_wait_s == pytest.approx(exact, rel=0.12)
        assert closed_form_wait(rate, service, 1) == pytest.approx(exact)


def test_many_slots_agree_with_the_approximation() -> None:
    """M/D/c: constant steps, no prefill to disturb them."""
    service = 99 * 0.01
    rate = 0.9 * 8 / service
    seen = simulate(rate, 0.0, lambda n: 0.01, 100, 8, requests=20_000)
    expected = closed_form_wait(rate, service, 8)
    # a request also waits for the step that is under way
    assert expected * 0.7 < seen.mean_wait_s < expected * 1.5 + 0.01


def test_littles_law() -> None:
    rate, seen = 4.0, simulate(4.0, 0.01, lambda n: 0.02, 50, 64, requests=5_000)
    stay = 0.01 + 49 * 0.02
    assert seen.mean_in_flight == pytest.approx(rate * stay, rel=0.35)
    assert seen.mean_wait_s < 0.05


def test_beyond_capacity_the_wait_grows_without_bound() -> None:
    few = simulate(30.0, 0.1, lambda n: 0.02, 50, 4, requests=200)
    many = simulate(30.0, 0.1, lambda n: 0.02, 50, 4, requests=800)
    assert many.mean_wait_s > 2 * few.mean_wait_s
    assert closed_form_wait(30.0, 1.1, 4) == float("inf")


def test_the_same_seed_gives_the_same_answer() -> None:
    one, two = (simulate(5.0, 0.01, lambda n: 0.01, 20, 8, 200) for _ in range(2))
    assert one == two
