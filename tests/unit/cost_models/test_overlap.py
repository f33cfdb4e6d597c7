"""Exposed communication."""

from __future__ import annotations

import pytest

from cost_models.errors import SpecError
from cost_models.overlap import data_parallel, exposed, prefetched, tensor_parallel


def test_what_compute_can_not_hide_shows():
    assert exposed(3.0, 2.0).exposed_s == 1.0
    assert exposed(1.0, 2.0).exposed_s == 0.0
    assert exposed(1.0, 2.0, fraction=0.25).exposed_s == 0.75
    slowed = exposed(1.0, 2.0, slowdown=0.25)
    assert (slowed.exposed_s, slowed.hidden_s) == (0.25, 1.0)


def test_data_parallel_hides_under_one_micro_batch():
    got = data_parallel(3.0, 2.0, backward_s=2.0, forward_s=1.0, tail_s=0.5)
    assert got.exposed_s == pytest.approx(0.5 + 0.5 + 1.0)
    assert data_parallel(3.0, 2.0, 9.0, 9.0, fraction=0.0).exposed_s == 5.0
    assert data_parallel(1.0, 0.0, 9.0, 9.0, tail_s=2.0).exposed_s == 1.0


def test_prefetch_takes_the_longer_of_layer_and_next_gather():
    got = prefetched([2.0, 2.0, 2.0], [1.0, 3.0, 1.0])
    assert got.exposed_s == 1.0 + 1.0
    assert got.hidden_s == 2.0 + 1.0
    assert prefetched([], []).exposed_s == 0


def test_tensor_parallel_shows_unless_the_stack_splits_it():
    assert tensor_parallel(1.0, 5.0).exposed_s == 1.0
    assert tensor_parallel(1.0, 5.0, fraction=0.5).exposed_s == 0.5


def test_bad_times_are_refused():
    with pytest.raises(SpecError):
        exposed(-1.0, 1.0)
    with pytest.raises(SpecError):
        exposed(1.0, 1.0, fraction=1.5)
    with pytest.raises(SpecError):
        prefetched([1.0], [])
