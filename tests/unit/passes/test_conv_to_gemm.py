"""The im2col rewrite on whole models, every overload, symbolic sizes and metadata."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from passes.conv_to_gemm import CONV_TARGETS, ConvInfo, ConvRole, ConvToGemm
from passes.conv_to_gemm import conv_to_gemm as rewrite
from passes.errors import PassError
from passes.trace import trace

aten = torch.ops.aten


class Residual(nn.Module):
    def __init__(self, ci: int, co: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(ci, co, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(co, co, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(ci, co, 1, stride, bias=False)
        self.na, self.nb, self.ns = (nn.BatchNorm2d(co) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.nb(self.b(F.relu(self.na(self.a(x)), inplace=True)))
        return F.relu(y + self.ns(self.skip(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3)
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(F.max_pool2d(self.stem(x), 3, 2, 1)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, 2, 1, padding_mode="reflect")
        self.mid = nn.Conv2d(6, 6, 3, padding="same", dilation=2)
        self.norm = nn.GroupNorm(2, 6)
        self.up = nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1)
        self.out = nn.Conv2d(7, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(F.silu(self.norm(self.mid(self.down(x)))))
        return self.out(torch.cat([y, x], 1))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(4, 16, 1, bias=False)
        self.depth = nn.Conv2d(16, 16, 5, 2, 2, groups=16, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 6, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.norm(self.depth(self.expand(x))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return self.project(x * F.hardsigmoid(gate))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.depth = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8)
        self.fc, self.out = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.out(F.gelu(self.fc(y)))
        return x + y.permute(0, 3, 1, 2)


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(
            nn.Conv1d(1, 8, 10, 5, bias=False),
            nn.GELU(),
            nn.Conv1d(8, 8, 3, 2, bias=False),
            nn.GELU(),
            nn.Conv1d(8, 8, 16, padding=8, groups=4),
            nn.ConvTranspose1d(8, 2, 4, 3, 1, groups=2, output_padding=2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv3d(3, 4, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        # no bias before a norm: its gradient is zero, so only rounding would compare
        self.b = nn.Conv3d(
            4, 6, (3, 1, 1), padding=(1, 0, 0), padding_mode="circular", bias=False
        )
        self.norm = nn.BatchNorm3d(6)
        self.c = nn.ConvTranspose3d(6, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.norm(self.b(F.relu(self.a(x))))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (3, 33, 29)),
    "unet": (UNet, (3, 16, 12)),
    "mobilenet": (MobileNet, (4, 15, 13)),
    "convnext": (ConvNeXt, (3, 32, 32)),
    "audio": (Audio, (1, 400)),
    "video": (Video, (3, 4, 10, 12)),
}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Largest difference within 1e-5 of the largest value (at least of 1)."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) <= 1e-5 * max(1.0, float(a.abs().max()))


def outputs_and_gradients(run: Callable, model: nn.Module, x: torch.Tensor):
    x = x.clone().requires_grad_()
    y = run(x)
    torch.manual_seed(1)
    tensors = [x, *model.parameters()]
    return [y, *torch.autograd.grad(y, tensors, torch.randn_like(y))]


@pytest.mark.parametrize("name", MODELS)
def test_models_run_the_same(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, *shape)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    module = rewrite(exported)
    assert not any(n.target in CONV_TARGETS for n in module.graph.nodes)
    for rows in (1, 2, 5):  # one graph for every batch
        sample = torch.randn(rows, *shape)
        want = outputs_and_gradients(model, model, sample)
        got = outputs_and_gradients(module, module, sample)
        assert len(want) == len(got)
        assert all(close(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_values_and_flops(name: str) -> None:
    """Every new node's fake value is what it computes; GEMM views give the FLOPs."""
    make, shape = MODELS[name]
    model, x = make(), torch.randn(2, *shape)
    exported = torch.export.export(model, (x,)).module()
    module = rewrite(exported)

    class Check(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node):
            result = super().run_node(n)
            if n.op == "call_function" and "conv" in n.meta:
                value = n.meta["val"]
                assert value.shape == result.shape
                assert value.dtype == result.dtype
            return result

    with FlopCounterMode(display=False) as counter:
        Check(module).run(x)
    with FlopCounterMode(display=False) as before:
        exported(x)
    assert counter.get_total_flops() == before.get_total_flops()
    infos = {n.meta["conv"] for n in module.graph.nodes if "conv" in n.meta}
    other = sum(
        2 * n.meta["val"].numel() * n.args[0].meta["val"].shape[-1]
        for n in module.graph.nodes
        if n.target is aten.linear.default and "conv" not in n.meta
    )
    assert sum(i.flops for i in infos) + other == before.get_total_flops()


def test_metadata_and_input_untouched() -> None:
    model = UNet()
    exported = torch.export.export(model, (torch.randn(2, 3, 16, 12),)).module()
    code = exported.code
    module = rewrite(exported)
    assert exported.code == code
    groups: dict[str, set[ConvRole]] = {}
    stacks = {n.name: n.meta.get("nn_module_stack") for n in exported.graph.nodes}
    for node in module.graph.nodes:
        info = node.meta.get("conv")
        if info is not None:
            assert isinstance(info, ConvInfo)
            assert node.meta["nn_module_stack"] == stacks[info.name]
            groups.setdefault(info.name, set()).add(node.meta["conv_role"])
    assert len(groups) == 4
    assert all(ConvRole.GEMM in roles for roles in groups.values())
    assert [n for n in module.graph.nodes if "batch_norm" in n.name] == []
    assert any(n.target is aten.pad.default for n in module.graph.nodes)
    assert (
        dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    )
    for key, value in exported.named_parameters():
        assert module.get_parameter(key) is value


def test_gemm_view_of_a_strided_grouped_convolution() -> None:
    conv = nn.Conv2d(8, 12, (3, 5), (2, 1), (1, 2), groups=4)
    exported = torch.export.export(conv, (torch.randn(2, 8, 9, 7),)).module()
    info = _first_info(rewrite(exported))
    assert (info.m, info.n, info.k, info.groups) == (2 * 5 * 7, 3, 2 * 15, 4)
    assert info.out_size == (5, 7)
    assert info.stride == (2, 1)


def _first_info(module: torch.fx.GraphModule) -> ConvInfo:
    return next(n.meta["conv"] for n in module.graph.nodes if "conv" in n.meta)


GENERAL = {
    "convolution": lambda x, w, b: aten.convolution.default(
        x, w, b, [2, 1], [1, 0], [1, 2], False, [0, 0], 2
    ),
    "convolution transposed": lambda x, w, b: aten.convolution.default(
        x, w.transpose(0, 1).contiguous(), None, [2, 3], [1, 1], [1, 1], True, [1, 2], 1
    ),
    "conv2d unbatched": lambda x, w, b: F.conv2d(x[0], w, b, padding=1, groups=2),
    "conv2d same": lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2),
    "channels last": lambda x, w, b: F.conv2d(
        x.contiguous(memory_format=torch.channels_last), w, b, groups=2
    ),
}


@pytest.mark.parametrize("name", GENERAL)
def test_overloads(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4 if name == "convolution transposed" else 2, 3, 3)
    args = torch.randn(2, 4, 9, 8), weight, torch.randn(6)

    class Net(nn.Module):
        def forward(self, x, w, b):
            return GENERAL[name](x, w, b)

    module = torch.export.export(Net(), args).module()
    if name.startswith("convolution"):
        module = make_fx(GENERAL[name], tracing_mode="fake")(*args)
    rewritten = rewrite(module)
    assert not any(n.target in CONV_TARGETS for n in rewritten.graph.nodes)
    want, got = GENERAL[name](*args), rewritten(*args)
    assert close(want, got)
    assert want.stride() == got.stride()


def test_only_some_ranks() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(2, 3, 3), nn.Conv2d(1, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).unsqueeze(1))

    module = torch.export.export(Both(), (torch.randn(2, 2, 9),)).module()
    left = {n.target for n in ConvToGemm(only=(1,))(module).graph.nodes}
    assert aten.conv2d.default in left
    assert aten.conv1d.default not in left


def test_autocast_region() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1, groups=1)
            self.depth = nn.Conv2d(4, 4, 3, groups=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.depth(self.conv(x)).float()

    model, x = Mixed(), torch.randn(2, 3, 8, 8)
    module = rewrite(torch.export.export(model, (x,)).module())
    assert "conv2d" not in module.code.replace("conv2d_", "")
    torch.testing.assert_close(module(x), model(x), rtol=2e-2, atol=2e-2)


def test_traced_model() -> None:
    """The graph of a trace on meta tensors keeps its module paths."""
    traced = trace(ResNet(), (torch.empty(2, 3, 32, 32),))
    module = rewrite(traced.graph_module)
    paths = {
        n.meta["conv"].name: n.meta["module_path"]
        for n in module.graph.nodes
        if "conv" in n.meta
    }
    assert "body.0.a" in paths.values()
    assert len(paths) == 7


def test_without_fake_values() -> None:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    w.meta["val"] = torch.empty(3, 2, 3, 3)
    x.meta["val"] = torch.empty(1, 2, 5, 5)
    y = graph.call_function(aten.conv2d.default, (x, w))
    y.meta["val"] = torch.empty(1, 3, 3, 3)
    graph.output(y)
    with pytest.raises(PassError, match="without a fake value: conv2d"):
        rewrite(torch.fx.GraphModule(nn.Module(), graph))
