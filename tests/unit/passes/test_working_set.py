"""Peak of a recomputed block, by hand on small ones."""

from __future__ import annotations

import torch
from torch import nn

from passes.backward import saved_bytes
from passes.ir import Block, OpGraph
from passes.pipeline import run_passes
from passes.trace import trace
from passes.working_set import block_working_set, working_set

ROW = 4  # bytes of one FP32 number


def graph_of(model: nn.Module, *shape: int) -> OpGraph:
    with torch.device("meta"):
        return run_passes(trace(model, (torch.zeros(*shape),)))


def whole(graph: OpGraph) -> Block:
    return Block(0, "all", 0, 0, len(graph.ops))


def test_two_products() -> None:
    """x[5, 4] -> 12 -> gelu -> 4, in numbers:

    forward    h + g (h is kept by gelu, g by the second product), then y
    backward   kept h, g; dy and dg alive, then dg and dh after g has gone
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 4))
    graph = graph_of(model, 5, 4)
    h = g = 5 * 12 * ROW
    y = 5 * 4 * ROW
    assert saved_bytes(graph) == h + g
    found = working_set(graph, whole(graph))
    assert found.forward_bytes == h + g + y
    assert found.backward_bytes == max(h + g + y + g, h + g + h)
    assert block_working_set(graph, whole(graph)) == found.backward_bytes


def test_views_are_free() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).view(5, 2, 3).transpose(0, 1))

    plain = graph_of(Views(), 5, 4)
    found = working_set(plain, whole(plain))
    hidden, out = 5 * 6 * ROW, 5 * 2 * 2 * ROW
    assert found.backward_bytes in (
        2 * hidden + out,  # the product keeps a view
        3 * hidden + out,  # or a copy of it beside
    )


def test_a_branch_adds_two_gradients() -> None:
    """y = f(h) + h: both contributions to dh live at once before their sum."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(h) + h

    graph = graph_of(Residual(), 5, 4)
    one = 5 * 4 * ROW
    assert saved_bytes(graph) == one  # h, for b's weight gradient
    found = working_set(graph, whole(graph))
    assert found.backward_bytes == one + 3 * one


def test_gradients_of_inputs_and_parameters_are_elsewhere() -> None:
    """The input needs no gradient and the weights' have their own line."""
    graph = graph_of(nn.Linear(4, 6), 5, 4)
    assert working_set(graph, whole(graph)).backward_bytes == 5 * 6 * ROW


def test_scores_of_unfused_attention_dominate() -> None:
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(1, 2)).softmax(-1) @ v

    length = 256
    graph = graph_of(Eager(), 2, length, 16)
    scores = 2 * length**2 * ROW
    found = working_set(graph, whole(graph))
    # kept: the softmax; in flight: the gradients of softmax and scores
    assert 3 * scores < found.backward_bytes < 3.5 * scores
