"""Fusion groups are chains that one kernel may run."""

from __future__ import annotations

import pytest

from passes.cluster_layers import cluster_layers
from passes.fuse import fuse
from passes.ir import OpGraph, OpKind
from passes.lower import lower
from tests.unit.passes.small_models import NAMES, traced


def fused(name: str) -> OpGraph:
    return fuse(cluster_layers(lower(traced(name))))


def groups(graph: OpGraph) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if op.fusion >= 0:
            result.setdefault(op.fusion, []).append(i)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_no_path_leaves_a_group_and_returns(name: str) -> None:
    graph = fused(name)
    made = {n: i for i, op in enumerate(graph.ops) for n in op.outputs}
    for members in groups(graph).values():
        inside = set(members)
        tainted: set[int] = set()
        for i in range(min(members), max(members) + 1):
            sources = [made[n] for n in graph.ops[i].inputs if n in made]
            outside = any(s in tainted for s in sources) or (
                i not in inside and any(s in inside for s in sources)
            )
            if i in inside:
                assert not any(s in tainted for s in sources), graph.ops[i].name
            elif outside:
                tainted.add(i)


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_connected_and_stay_in_a_block(name: str) -> None:
    graph = fused(name)
    for members in groups(graph).values():
        assert len(members) > 1
        blocks = {
            b.index for b in graph.blocks for i in members if b.start <= i < b.stop
        }
        assert len(blocks) == 1
        made = {n for i in members for n in graph.ops[i].outputs}
        for i in members[1:]:
            assert made.intersection(graph.ops[i].inputs), graph.ops[i].name


@pytest.mark.parametrize("name", NAMES)
def test_matrix_ops_stay_alone(name: str) -> None:
    alone = (OpKind.GEMM, OpKind.CONV, OpKind.ATTENTION, OpKind.SORT, OpKind.GATHER)
    assert all(op.fusion < 0 for op in fused(name).ops if op.kind in alone)


def test_norm_and_relu_run_with_the_residual() -> None:
    graph = fused("resnet")
    tail = [op for op in graph.ops if op.module.startswith("layer1.0")][-4:]
    kinds = [op.target.split(".")[1] for op in tail]
    assert kinds[-3:] == ["batch_norm", "add", "relu"]
    assert len({op.fusion for op in tail[-3:]}) == 1
    assert tail[-1].fusion >= 0
