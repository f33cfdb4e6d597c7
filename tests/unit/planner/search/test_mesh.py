"""Groups of a mesh axis over nodes."""

from __future__ import annotations

import pytest

from planner.search.mesh import Mesh, axis_group, divisors, meshes


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "concurrent"),
    [
        (8, 1, 8, 1),  # tensor ranks fill a node
        (4, 2, 4, 1),  # data ranks inside it
        (16, 1, 8, 1),  # two nodes
        (8, 8, 1, 8),  # one rank a node: eight groups share its ports
        (4, 4, 2, 4),  # two ranks a node
        (36, 1, 6, 1),  # 36 ranks do not fill nodes of 8: six nodes of six
        (16, 6, 2, 4),
    ],
)
def test_groups(size: int, stride: int, per_node: int, concurrent: int) -> None:
    group, sharing = axis_group(size, stride, 8)
    assert (group.size, group.per_node) == (size, per_node)
    assert sharing == concurrent


def test_strides_follow_the_axes_from_the_inside() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=8)
    assert [mesh.stride(a) for a in ("tp", "cp", "dp_shard", "dp_replicate", "pp")] == [
        1, 8, 16, 64, 128,
    ]  # fmt: skip
    assert mesh.size == 256


def test_all_factorisations_once() -> None:
    found = list(meshes(12, max_pp=12, max_tp=12, max_dp=12, pins={}))
    assert len(found) == len(set(found)) == 18
    assert all(pp * tp * dp == 12 for pp, tp, dp in found)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
