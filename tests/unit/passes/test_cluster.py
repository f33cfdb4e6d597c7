"""Blocks, their kinds, and whole depth from two traced layers."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from passes.accounting import module_tensors
from passes.cluster_layers import cluster_layers, partition
from passes.errors import PassError
from passes.expand import expand
from passes.format import format_graph
from passes.lower import lower
from passes.pipeline import run_passes
from passes.trace import trace
from passes.traced import LayerRun, TracedModel
from tests.unit.passes.small_models import GPT, tokens, traced


def gpt(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        return GPT(layers)


def reduced(layers: int) -> TracedModel:
    """Two layers traced, with the accounting of ``layers``."""
    names = tuple(str(k) for k in range(layers))
    run = LayerRun("layers", names, names[:2])
    two = trace(gpt(2), tokens(4))
    return replace(two, tensors=module_tensors(gpt(layers)), runs=(run,))


def test_gpt_blocks() -> None:
    graph = cluster_layers(lower(traced("gpt")))
    assert [b.name for b in graph.blocks] == ["embed", "layers.0", "layers.1", "head"]
    kinds = [b.kind for b in graph.blocks]
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 3


def test_resnet_blocks_are_bottlenecks() -> None:
    graph = cluster_layers(lower(traced("resnet")))
    kinds = {b.name: b.kind for b in graph.blocks}
    assert kinds["layer1.0"] == kinds["layer1.1"] != kinds["layer2.0"]
    assert kinds["layer2.0"] == kinds["layer2.1"]
    assert graph.blocks[-1].stop == len(graph.ops)


def test_a_model_without_layers_is_one_block() -> None:
    graph = cluster_layers(lower(traced("moe")))
    assert [b.name for b in graph.blocks] == ["model"]


def test_a_layer_called_again_is_a_block_each_time() -> None:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.layers[0](x).relu()
            return x

    args = (torch.zeros(4, 8, device="meta"),)
    graph = cluster_layers(lower(trace(Again(), args)))
    names = [b.name for b in graph.blocks]
    assert names == ["layers.0", "layers.0#2", "layers.0#3", "head"]


def test_kind_depends_on_structure_not_on_names() -> None:
    module = gpt(3)
    module.layers[1].requires_grad_(False)  # type: ignore[index,union-attr]
    graph = cluster_layers(lower(trace(module, tokens(4))))
    _, first, second, third, _ = (b.kind for b in graph.blocks)
    assert first == third != second


def test_blocks_cover_the_ops_in_order() -> None:
    graph = lower(traced("unet"))
    spans = partition(graph.ops)
    assert spans[0][1] == 0
    assert spans[-1][2] == len(graph.ops)
    assert all(a[2] == b[1] for a, b in pairwise(spans))


def test_expanded_graph_equals_the_whole_trace() -> None:
    whole = trace(gpt(5), tokens(4), shorten_runs=False)
    small = run_passes(reduced(5))
    assert whole.runs == ()
    assert format_graph(small) == format_graph(run_passes(whole))
    assert [b.name for b in small.blocks][1:-1] == [f"layers.{k}" for k in range(5)]


def test_encoder_and_decoder_are_two_runs() -> None:
    """A decoder that reads the encoder's output in every layer."""

    class Pair(torch.nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            cell = torch.nn.TransformerDecoderLayer
            self.encoder = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
                for _ in range(layers)
            )
            self.decoder = torch.nn.ModuleList(
                cell(16, 2, 32, 0.0, batch_first=True) for _ in range(layers)
            )

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.encoder:
                x = layer(x)
            for layer in self.decoder:
                y = layer(y, x)
            return y

    with torch.device("meta"):
        model = Pair(5)
        args = torch.zeros(4, 6, 16), torch.zeros(4, 8, 16)
    short = trace(model, args)
    assert {r.prefix for r in short.runs} == {"encoder", "decoder"}
    whole = replace(trace(model, args, shorten_runs=False), warnings=short.warnings)
    graph = run_passes(short)
    assert format_graph(graph) == format_graph(run_passes(whole))
    assert len(graph.blocks) == 10
    assert len({b.kind for b in graph.blocks}) == 4


def test_expanded_counts_follow_the_depth() -> None:
    two, many = (
        lower(trace(gpt(2), tokens(4))),
        expand(lower(reduced(12)), reduced(12).runs),
    )
    layer = sum(o.forward_flops for o in two.ops if o.module.startswith("layers.1"))
    assert sum(o.forward_flops for o in many.ops) == (
        sum(o.forward_flops for o in two.ops) + 10 * layer
    )
    assert many.parameter_count == sum(p.numel() for p in gpt(12).parameters())
    assert len({o.name for o in many.ops}) == len(many.ops)
    used = {n for o in many.ops for n in o.inputs}
    assert {t.name for t in many.parameters} <= used


def test_units_that_differ_are_refused() -> None:
    graph = lower(trace(gpt(3), tokens(4)))
    wrong = LayerRun("layers", ("0", "1", "2"), ("0", "1"))
    ops = tuple(o for o in graph.ops if o.module != "layers.1.ln2")
    with pytest.raises(PassError, match="layers"):
        expand(replace(graph, ops=ops), (wrong,))


def test_126_layers_expand_in_time() -> None:
    source = reduced(126)
    graph = lower(source)
    start = time.process_time()
    whole = cluster_layers(expand(graph, source.runs))
    assert time.process_time() - start < 1.5
    assert len(whole.blocks) == 128
    assert len({b.kind for b in whole.blocks}) == 3
