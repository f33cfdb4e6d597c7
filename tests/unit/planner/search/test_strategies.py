"""Strategies follow from the iteration space; reshards from pairs of placements."""

from __future__ import annotations

import pytest

from passes.ir import Axis, Dim, DimKind, IterationSpace, Op, Operand, OpKind
from planner.search.placements import (
    PARTIAL,
    REPLICATED,
    Placement,
    gradient_reshard,
    reshard,
    shard,
)
from planner.search.strategies import op_strategies


def _axes(*names: str | Axis) -> tuple[Axis, ...]:
    return tuple(n if isinstance(n, Axis) else Axis((n,)) for n in names)


def linear(n: int = 64, k: int = 32, fused: tuple[int, ...] = (), rows: int = 8) -> Op:
    out = Axis(("n",), parts=fused)
    space = IterationSpace(
        (
            Dim("b", rows),
            Dim("k", k, DimKind.REDUCTION),
            Dim("n", n // max(1, len(fused))),
        ),
        (Operand("x", _axes("b", "k")), Operand("w", (out, Axis(("k",))))),
        (Operand("y", (Axis(("b",)), out)),),
    )
    return Op("op", "aten.linear.default", OpKind.GEMM, ("x", "w"), ("y",), space)


def by_dim(op: Op, size: int, **kwargs: object) -> dict[str, object]:
    return {s.dim: s for s in op_strategies(op, size, **kwargs)}  # type: ignore[arg-type]


def test_linear_column_row_and_batch() -> None:
    found = {s.dim: s for s in op_strategies(linear(), 4)}
    assert set(found) == {"", "b", "k", "n"}
    column = found["n"]
    assert column.inputs == (REPLICATED, shard(0))
    assert column.outputs == (shard(1),)
    # the weight is divided with its gradient; the input's gradient is a pending sum
    assert column.gradients == (PARTIAL, shard(0))
    row = found["k"]
    assert row.inputs == (shard(1), shard(1))
    assert row.outputs == (PARTIAL,)
    batch = found["b"]
    assert batch.inputs == (shard(0), REPLICATED)
    assert batch.gradients == (shard(0), PARTIAL)  # data parallelism's all-reduce


def test_a_fused_projection_is_divided_part_by_part() -> None:
    found = {s.dim: s for s in op_strategies(linear(96, fused=(32, 32, 32)), 4)}
    assert found["n"].inputs[1] == Placement("S", 0, outer=3)
    uneven = linear(48, fused=(32, 8, 8))
    axes = uneven.space.inputs[1].axes[0]
    assert axes.parts == (32, 8, 8)
    found = {s.dim: s for s in op_strategies(uneven, 4)}
    assert str(found["n"].outputs[0]) == "S(1;32,8,8)"


def test_dims_that_do_not_divide_are_refused_unless_they_may_be_padded() -> None:
    assert "n" not in {s.dim for s in op_strategies(linear(n=63), 4)}
    padded = {s.dim: s for s in op_strategies(linear(n=63), 4, frozenset({63}))}
    assert padded["n"].padded


def test_coupled_dims_and_unknown_ops_stay_whole() -> None:
    space = IterationSpace(
        (Dim("b", 8), Dim("d", 16, DimKind.COUPLED)),
        (Operand("x", _axes("b", "d")),),
        (Operand("y", _axes("b", "d")),),
    )
    norm = Op("n", "t", OpKind.NORM, ("x",), ("y",), space)
    assert [s.dim for s in op_strategies(norm, 4)] == ["", "b"]
    unknown = Op("n", "t", OpKind.UNKNOWN, ("x",), ("y",), space)
    assert [s.dim for s in op_strategies(unknown, 4)] == [""]


def test_a_window_is_not_divided() -> None:
    space = IterationSpace(
        (Dim("o", 16), Dim("i", 3, DimKind.REDUCTION)),
        (Operand("x", (Axis(("o", "i"), window=True),)),),
        (Operand("y", _axes("o")),),
    )
    pool = Op("p", "t", OpKind.POOL, ("x",), ("y",), space)
    assert [s.dim for s in op_strategies(pool, 4)] == [""]


def test_the_inner_factor_of_a_merged_axis_is_a_strided_shard() -> None:
    space = IterationSpace(
        (Dim("b", 2), Dim("s", 16)),
        (Operand("x", (Axis(("b", "s")),)),),
        (Operand("y", _axes("b", "s")),),
    )
    view = Op("v", "t", OpKind.VIEW, ("x",), ("y",), space)
    found = {s.dim: s for s in op_strategies(view, 4)}
    assert found["s"].inputs[0] == Placement("S", 0, outer=2)
    assert found["s"].outputs[0] == shard(1)
    assert "+" in found  # a view passes a pending sum on


@pytest.mark.parametrize(
    ("src", "dst", "kind", "nbytes"),
    [
        (REPLICATED, shard(0), "", 0.0),
        (shard(0), shard(0), "", 0.0),
        (shard(0), REPLICATED, "all_gather", 64.0),
        (shard(0), shard(1), "all_to_all", 16.0),
        (PARTIAL, REPLICATED, "all_reduce", 64.0),
        (PARTIAL, shard(1), "reduce_scatter", 64.0),
    ],
)
def test_reshards(src: Placement, dst: Placement, kind: str, nbytes: float) -> None:
    found = reshard(src, dst, 64.0, 4)
    assert found is not None
    assert (found.kind, found.nbytes) == (kind, nbytes)


def test_nothing_becomes_a_pending_sum_but_a_replicated_gradient() -> None:
    assert reshard(REPLICATED, PARTIAL, 64.0, 4) is None
    assert reshard(shard(0), PARTIAL, 64.0, 4) is None
    assert gradient_reshard(REPLICATED, PARTIAL, 64.0, 4) is not None
    assert gradient_reshard(shard(0), PARTIAL, 64.0, 4) is None
