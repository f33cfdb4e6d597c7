"""Normalising keeps numerics and mutations, and does nothing twice."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.normalize import Normalize, normalize


class Untidy(nn.Module):
    """Everything the pass removes or rewrites, and everything it must leave."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x)), inplace=True)  # safe: nobody else reads
        y = F.dropout(y, 0.0, True).to(torch.float32)[:]
        self.count.add_(y.detach().mean((0, 2, 3)))  # a buffer: must stay
        z = y * 2
        seen = z.view(-1)
        z.add_(1)  # a view of z is read later: must stay
        return (seen.sum() + z.contiguous().mean()) + F.dropout(y, 0.5, False).sum()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x * 2) + torch.sigmoid_(x * 3)


def exported(model: nn.Module, *args: Tensor) -> fx.GraphModule:
    return torch.export.export(model, args).module(check_guards=False)


def names(module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def test_what_computes_nothing_is_gone() -> None:
    module = exported(Untidy(), torch.randn(2, 3, 5, 5))
    found = names(normalize(module))
    for gone in ("dropout", "aten.to.", "slice", "_assert", "contiguous", "relu_"):
        assert not any(gone in name for name in found), gone
    assert "aten.relu.default" in found
    assert "aten.detach.default" in found
    assert found.count("aten.add_.Tensor") == names(module).count("aten.add_.Tensor")
    assert "aten.detach.default" not in names(normalize(module, training=False))


@pytest.mark.parametrize("model", [Untidy(), InPlace()])
def test_values_gradients_and_mutations_are_kept(model: nn.Module) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 5, 5)
    before = exported(copy.deepcopy(model), x)
    after = normalize(exported(copy.deepcopy(model), x))
    results = []
    for module in (before, after):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.sum().backward()
        grads = [p.grad for p in module.parameters()]
        results.append((y, leaf.grad, grads, list(module.buffers())))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def rereads(later: bool) -> fx.GraphModule:
    """y = x * 2; z = relu_(y); z + (y read before or after the write)."""
    mul, add = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(mul, (x, 2))
    before = graph.call_function(mul, (y, 3))
    z = graph.call_function(torch.ops.aten.relu_.default, (y,))
    after = graph.call_function(mul, (y, 5)) if later else before
    graph.output(graph.call_function(add, (z, after)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("later", [True, False])
def test_an_in_place_op_stays_where_its_input_is_read_later(later: bool) -> None:
    module = rereads(later)
    result = normalize(module)
    assert ("aten.relu_.default" in names(result)) is later
    x = torch.randn(3)
    torch.testing.assert_close(result(x), module(x))
    assert names(normalize(exported(InPlace(), x)))[1:4:2] == [
        "aten.relu.default",
        "aten.sigmoid.default",
    ]


def test_inputs_and_parameters_stay_mutated() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            self.scale.clamp_(max=0.5)
            return x * self.scale

    module = normalize(exported(Writes(), torch.ones(3)))
    x = torch.ones(3)
    torch.testing.assert_close(module(x), torch.ones(3))
    torch.testing.assert_close(x, torch.full((3,), 2.0))
    torch.testing.assert_close(module.scale, torch.full((3,), 0.5))


def test_random_numbers_keep_their_order() -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand_like(x)  # unused, but it moves the generator
            return F.dropout(x, 0.5, True) + torch.rand_like(x)

    x = torch.ones(64)
    module = exported(Random(), x)
    results = []
    for each in (module, normalize(module)):
        torch.manual_seed(3)
        results.append(each(x))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_it_is_idempotent_and_leaves_its_input_alone() -> None:
    module = exported(Untidy(), torch.randn(2, 3, 5, 5))
    before = str(module.graph)
    once = normalize(module)
    assert str(module.graph) == before
    assert str(normalize(once).graph) == str(once.graph)
    assert Normalize.name == "normalize"


def test_views_that_change_strides_stay() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            same = x.view(2, 3).expand(2, 3).reshape(2, 3)
            return same.t().contiguous() + x.expand(2, 3).view(3, 2)

    found = names(normalize(exported(Views(), torch.randn(2, 3))))
    assert "aten.contiguous.default" in found
    assert sum("view" in n or "reshape" in n or "expand" in n for n in found) == 1
