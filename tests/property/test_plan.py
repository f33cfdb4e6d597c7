"""Plans: text forms read back equal, and the checker is never fooled by one number."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlannerError
from planner.plan import (
    expand,
    format_range,
    local_elements,
    parse_placement,
    parse_plan,
    parse_range,
    placement_error,
    wildcard,
)
from planner.plan.jsontext import dumps
from planner.search.check import check
from planner.search.placements import Placement, shard
from planner.workload import Parallelism
from tests.unit.planner.plan_samples import edited, sample

SAMPLE = sample()
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=40,
)


@given(values)
def test_json_text_reads_back_equal(value: object) -> None:
    text = dumps(value)
    assert json.loads(text) == value
    assert dumps(json.loads(text)) == text


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranges_read_back_equal(numbers: set[int]) -> None:
    assert parse_range(format_range(numbers)) == tuple(sorted(numbers))


@given(st.integers(1, 300))
def test_wildcards_expand_to_the_same_names(count: int) -> None:
    names = [f"model.layers.{i}.mlp.up.weight" for i in range(count)]
    ((pattern, numbers),) = wildcard(names).items()
    assert list(expand(pattern, format_range(numbers))) == names


@given(
    st.integers(0, 3),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_shards_print_parse_and_hold_their_share(
    axis: int, parts: list[int], size: int
) -> None:
    sizes = tuple(size * p for p in parts)
    placement = shard(axis, 1, sizes) if len(sizes) > 1 else shard(axis)
    assert parse_placement(str(placement)) == placement
    shape = [7, 7, 7, 7]
    shape[axis] = sum(sizes)
    assert placement_error(str(placement), shape, size) is None
    assert abs(local_elements(str(placement), shape, size) - 1 / size) < 1e-12


@given(st.text(max_size=12))
def test_placement_text_is_parsed_or_refused(text: str) -> None:
    try:
        placement = parse_placement(text)
    except PlannerError:
        return
    assert isinstance(placement, Placement)


degrees = st.integers(1, 8)


@given(degrees, degrees, degrees, degrees, st.integers(0, 3), st.integers(1, 8))
def test_parallelism_survives_json(
    pp: int, dp: int, cp: int, tp: int, zero: int, micro: int
) -> None:
    p = Parallelism(
        pp=pp, dp_shard=dp, cp=cp, tp=tp, zero=zero, micro_batch_size=micro
    ).derive(dp * micro * 3)
    assert p.num_micro_batches == 3
    plan = SAMPLE.model_copy(update={"parallelism": p})
    assert parse_plan(plan.to_json()).parallelism == p


def _numbers(value: Any, path: str = "") -> list[tuple[str, float]]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [(path, value)]
    found: list[tuple[str, float]] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _numbers(item, f"{path}/{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += _numbers(item, f"{path}/{i}")
    return [(p.lstrip("/"), n) for p, n in found]


#: Numbers that other numbers of the document imply (memory, stages, the step).
IMPLIED = [
    (path, number)
    for path, number in _numbers(json.loads(SAMPLE.to_json()))
    if number
    and path.startswith(("stages/", "estimate/", "mesh/"))
    and not path.endswith(("backward_weight_s", "limit_bytes"))
    and not (path.startswith("estimate/") and path.endswith("hardware_flops"))
]


@settings(max_examples=60)
@given(st.sampled_from(IMPLIED), st.integers(2, 9))
def test_one_changed_number_is_always_found(
    target: tuple[str, float], factor: int
) -> None:
    path, number = target
    assert check(edited(SAMPLE, path, number * factor))
