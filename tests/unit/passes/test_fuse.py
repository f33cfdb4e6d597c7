"""Fusion groups are chains that one kernel may run."""

from __future__ import annotations

import pytest
import torch

from passes.cluster_layers import cluster_layers
from passes.fuse import fuse
from passes.ir import OpGraph, OpKind
from passes.lower import lower
from passes.trace import trace
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
        reached: set[str] = set(graph.ops[members[0]].outputs)
        left = set(members[1:])
        while left:
            joined = {
                i
                for i in left
                if reached.intersection(graph.ops[i].inputs + graph.ops[i].outputs)
            }
            assert joined, [graph.ops[i].name for i in left]
            for i in joined | set(members) - left:
                reached |= {*graph.ops[i].inputs, *graph.ops[i].outputs}
            left -= joined


@pytest.mark.parametrize("name", NAMES)
def test_matrix_ops_stay_alone(name: str) -> None:
    alone = (OpKind.GEMM, OpKind.CONV, OpKind.ATTENTION, OpKind.SORT, OpKind.GATHER)
    assert all(op.fusion < 0 for op in fused(name).ops if op.kind in alone)


def test_rotary_is_one_kernel_from_both_halves() -> None:
    graph = fused("grouped")
    add = next(op for op in graph.ops if op.target == "aten.add.Tensor")
    made = {n: op for op in graph.ops for n in op.outputs}
    assert add.fusion >= 0
    assert [made[n].fusion for n in add.inputs] == [add.fusion, add.fusion]


def test_a_written_out_norm_is_one_kernel() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * 2

    graph = fuse(lower(trace(Norm(), (torch.zeros(4, 8, device="meta"),))))
    assert {op.fusion for op in graph.ops} == {0}


def test_norm_and_relu_run_with_the_residual() -> None:
    graph = fused("resnet")
    tail = [op for op in graph.ops if op.module.startswith("layer1.0")][-4:]
    kinds = [op.target.split(".")[1] for op in tail]
    assert kinds[-3:] == ["batch_norm", "add", "relu"]
    assert len({op.fusion for op in tail[-3:]}) == 1
    assert tail[-1].fusion >= 0
