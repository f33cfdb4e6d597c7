"""Saved bytes against torch's own record, and the rules that attribute them."""

from __future__ import annotations

# pyright: reportCallIssue=false, reportIndexIssue=false
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.backward import annotate_saved, saved_bytes, saved_tensors
from passes.ir import Op, OpGraph, OpKind, TensorKind
from passes.lower import lower, with_batch
from passes.pipeline import run_passes
from passes.trace import trace
from passes.traced import TracedModel
from tests.unit.passes.saved_oracle import fake_cuda_works, kept_storages
from tests.unit.passes.small_models import NAMES, build

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
BF16 = torch.bfloat16

needs_cuda_build = pytest.mark.skipif(
    not fake_cuda_works(), reason="this build of torch has no fake CUDA tensors"
)


def total(traced: TracedModel) -> int:
    return sum(s.nbytes for s in saved_tensors(traced.graph_module))


def small(make: Callable[[], nn.Module], *shape: int, dtype=torch.float32) -> Case:
    with torch.device("meta"):
        return make().to(dtype), (torch.zeros(*shape, dtype=dtype),), {}


class Attention(nn.Module):
    """One attention layer with a free choice of what changes its kernel."""

    def __init__(self, width=32, heads=4, kv_heads=0, causal=True, mask=False, p=0.0):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.size, self.causal, self.mask, self.p = width // heads, causal, mask, p
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q = self.q(x).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = (
            t.view(b, s, self.kv_heads, -1).transpose(1, 2)
            for t in self.kv(x).chunk(2, -1)
        )
        mask = None
        if self.mask:
            ones = torch.ones(s, s, dtype=torch.bool, device=x.device)
            mask = ones.tril()[None, None].expand(b, 1, s, s)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.p, self.causal, enable_gqa=self.kv_heads != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(b, s, d))


def hf(config: str, model: str, labels: bool = True, **options: Any) -> Case:
    library = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "use_cache": False}
    if config.startswith("GPT2"):
        sizes |= {"n_layer": 2, "n_embd": 64, "n_head": 4}
    elif config.startswith("T5"):
        sizes |= {"num_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4}
        sizes |= {"d_ff": 96, "decoder_start_token_id": 0}
    else:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 96}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    attention = options.pop("attention", "sdpa")
    made = getattr(library, config)(**(sizes | ends | options))
    made._attn_implementation = attention
    with torch.device("meta"):
        module = getattr(library, model)(made).to(BF16).train()
        ids = torch.zeros(2, 32, dtype=torch.long)
    return module, (), {"input_ids": ids} | ({"labels": ids} if labels else {})


def vision(name: str, side: int = 64) -> Case:
    library = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = getattr(library.models, name)(weights=None).train()
        return model, (torch.zeros(2, 3, side, side),), {}


@contextmanager
def one_answer_about_masks() -> Iterator[None]:
    """Transformers makes a mask under torch.export that it does not make when run."""
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    with mock.patch.object(
        masking_utils, "is_torchdynamo_exporting", return_value=False
    ):
        yield


FLASH = {"dtype": BF16}
CASES: dict[str, Callable[[], Case]] = {
    "flash": lambda: small(Attention, 2, 16, 32, **FLASH),
    "flash, grouped queries": lambda: small(
        lambda: Attention(kv_heads=2), 2, 16, 32, **FLASH
    ),
    "flash, dropout": lambda: small(lambda: Attention(p=0.1), 2, 16, 32, **FLASH),
    "efficient, fp32": lambda: small(Attention, 2, 48, 32),
    "efficient, bool mask": lambda: small(
        lambda: Attention(causal=False, mask=True), 2, 16, 32, **FLASH
    ),
    "dropout": lambda: small(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)), 4, 8
    ),
    "norms": lambda: small(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.GroupNorm(2, 8)
        ),
        *(2, 3, 9, 9),
        dtype=BF16,
    ),
    "rms norm": lambda: small(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.SiLU()),
        *(2, 5, 16),
        dtype=BF16,
    ),
    "gpt2, sdpa": lambda: hf("GPT2Config", "GPT2LMHeadModel"),
    "gpt2, eager": lambda: hf("GPT2Config", "GPT2LMHeadModel", attention="eager"),
    "llama": lambda: hf("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2),
    "phi3, eager": lambda: hf(
        "Phi3Config", "Phi3ForCausalLM", num_key_value_heads=4, attention="eager"
    ),
    "bert": lambda: hf("BertConfig", "BertForMaskedLM"),
    "t5": lambda: hf("T5Config", "T5ForConditionalGeneration"),
    "resnet18": lambda: vision("resnet18"),
    "mobilenet": lambda: vision("mobilenet_v3_small"),
    "swin": lambda: vision("swin_t", 64),
    "convnext": lambda: vision("convnext_tiny"),
} | {
    f"small {n}": lambda n=n: (*build(n), {})
    for n in NAMES  # the families of the passes' tests
}


@needs_cuda_build
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_torchs(name: str) -> None:
    """To the byte, for every family."""
    model, args, kwargs = CASES[name]()
    with one_answer_about_masks():
        traced = trace(model, args, kwargs, shorten_runs=False)
        want = sum(kept_storages(model, args, kwargs).values())
    assert total(traced) == want > 0


@pytest.mark.parametrize("name", ["flash", "llama", "gpt2, eager", "mobilenet"])
def test_graph_carries_the_same_bytes_at_any_batch(name: str) -> None:
    model, args, kwargs = CASES[name]()
    traced = trace(model, args, kwargs, shorten_runs=False)
    graph = annotate_saved(lower(traced), traced)
    assert saved_bytes(graph) == total(traced)
    for batch in (4, 6):
        other = traced.with_batch(batch)
        assert saved_bytes(with_batch(graph, batch)) == total(other)
        assert saved_bytes(annotate_saved(lower(other), other)) == total(other)
    owners = [s.tensor for op in graph.ops for s in op.saved]
    assert len(owners) == len(set(owners))


# --- worked figures -------------------------------------------------------------------


def graph_of(case: Case, **options: Any) -> OpGraph:
    return run_passes(trace(*case[:2], case[2], **options))


def kept_by(graph: OpGraph, op: Op) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        s.tensor: (graph.tensor(s.tensor).shape, graph.tensor(s.tensor).dtype)
        for s in op.saved
    }


def test_unfused_attention_of_phi3() -> None:
    """32 heads at 4096 tokens: FP32 softmax and its BF16 copy, 6 a s^2 b bytes a layer,
    3.578 GiB a layer in all."""
    hf_ = pytest.importorskip("transformers")
    config = hf_.Phi3Config(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        use_cache=False, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = hf_.Phi3ForCausalLM(config).to(BF16).train()
        ids = torch.zeros(1, 4096, dtype=torch.long)
    graph = run_passes(trace(model, (), {"input_ids": ids}))
    layers = [b for b in graph.blocks if b.name.startswith("model.layers.")]
    assert len(layers) == 32
    assert len({b.kind for b in layers}) == 1
    square = 0
    for op in graph.ops[layers[5].start : layers[5].stop]:
        for kept in op.saved:
            tensor = graph.tensor(kept.tensor)
            square += tensor.nbytes if tensor.shape[-2:] == (4096, 4096) else 0
    assert square == 6 * 32 * 4096**2 == 3_221_225_472
    layer = saved_bytes(graph, graph.ops[layers[5].start : layers[5].stop])
    assert layer == 3_842_015_232
    assert round(layer / 2**30, 3) == 3.578


def test_loss_keeps_four_bytes_a_logit() -> None:
    """BF16 logits, an FP32 copy and the FP32 log-softmax: only the last is kept."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 1000, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x).float().view(-1, 1000), labels.view(-1))

    with torch.device("meta"):
        x = torch.zeros(2, 30, 64, dtype=BF16)
        case = Head().to(BF16), (x, torch.zeros(2, 30, dtype=torch.long)), {}
    graph = graph_of(case)
    logits = 2 * 30 * 1000
    counter = 4  # the summed weight of the targets, one FP32 number
    assert saved_bytes(graph) == 4 * logits + counter
    loss = next(o for o in graph.ops if o.kind is OpKind.LOSS)
    sizes = {d.name: d.size for d in loss.space.dims}
    kept = next(s for s in loss.saved if graph.tensor(s.tensor).numel == logits)
    assert [[sizes[d] for d in a.dims] for a in kept.axes] == [[2, 30], [1000]] or [
        [sizes[d] for d in a.dims] for a in kept.axes
    ] == [[60], [1000]]


def test_flash_keeps_no_scores() -> None:
    graph = graph_of(small(lambda: Attention(kv_heads=2), 3, 64, 32, dtype=BF16))
    op = next(o for o in graph.ops if o.kind is OpKind.ATTENTION)
    kept = kept_by(graph, op)
    assert kept.pop(f"{op.name}.saved{len(kept) - 1}") == ((3, 4, 64), "float32")
    assert set(kept) == {*op.inputs, *op.outputs}
    sums = op.saved[-1]
    assert [a.dims for a in sums.axes] == [("b",), ("h", "g"), ("q",)]
    assert graph.tensor(sums.tensor).per_sample == (1, 0, 0)


def test_attention_that_no_kernel_takes_keeps_scores() -> None:
    """Grouped queries with a mask: torch multiplies them out, in FP32."""
    make = lambda: Attention(kv_heads=2, causal=False, mask=True)  # noqa: E731
    graph = graph_of(small(make, 3, 64, 32, dtype=BF16))
    op = next(o for o in graph.ops if o.kind is OpKind.ATTENTION)
    scores = [s for s in op.saved if graph.tensor(s.tensor).shape[-2:] == (64, 64)]
    assert {graph.tensor(s.tensor).dtype for s in scores} == {"float32"}
    dims = {d for s in scores for a in s.axes for d in a.dims}
    assert {"b", "h", "g", "q", "kv"} <= dims


def test_dropout_keeps_a_mask_of_bools() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.1), nn.Linear(6, 4))

    graph = graph_of(small(make, 5, 8))
    op = next(o for o in graph.ops if "dropout" in o.target)
    assert list(kept_by(graph, op).values()) == [((5, 6), "bool")]
    assert op.saved[0].axes == op.space.outputs[0].axes
    off = small(make, 5, 8)
    off[0].eval()
    assert saved_bytes(graph_of(off)) == saved_bytes(graph) - 30


def test_norm_statistics_are_rows_in_fp32() -> None:
    graph = graph_of(
        small(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), 3, 5, 8, **FLASH)
    )
    op = next(o for o in graph.ops if o.kind is OpKind.NORM)
    extra = [s for s in op.saved if graph.tensor(s.tensor).kind is TensorKind.SAVED]
    rows = op.space.inputs[0].axes[:2]
    assert len(extra) == 2
    for kept in extra:
        tensor = graph.tensor(kept.tensor)
        assert (tensor.shape, tensor.dtype) == ((3, 5, 1), "float32")
        assert kept.axes[:2] == rows


# --- attribution ----------------------------------------------------------------------


def names(case: Case) -> dict[str, tuple[str, int]]:
    """Tensor (or node of an unnamed one) -> owner, bytes."""
    traced = trace(*case[:2], case[2])
    found = saved_tensors(traced.graph_module)
    return {s.name or f"{s.node}?": (s.node, s.nbytes) for s in found}


def test_parameters_inputs_and_views_of_them_are_free() -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(6, 4))
            self.register_buffer("b", torch.empty(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, 2:] @ self.w.t()) * self.b[1:2]

    # the product keeps a view of x, the multiplication one of b
    assert names(small(Free, 5, 6)) == {}


def test_an_activation_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu_()
            return self.b(y.view(2, 2, 4)).view(4, 4) + self.c(y)

    # the in-place result, its view and itself are one storage
    assert list(names(small(Twice, 4, 4)).values()) == [("relu_", 64)]


def test_parts_of_a_fused_product_count_apart() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.qkv(x).chunk(3, -1)
            return a * b + c.exp() * c.sin()

    found = names(small(Fused, 5, 4))
    assert {n: b for n, (_, b) in found.items() if n.startswith("getitem")} == {
        "getitem": 80, "getitem_1": 80, "getitem_2": 80,
    }  # fmt: skip


def test_a_kept_part_keeps_the_whole() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)[:, 0])

    found = names(small(First, 3, 50, 4))
    assert found == {"linear": ("linear", 3 * 50 * 4 * 4)}


def test_no_grad_frozen_and_inference_keep_less() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.a(x).exp().sin()
            return self.c(self.b(x).tanh())

    case = small(Half, 3, 4)
    assert {n for n, _ in names(case).values()} == {"linear_1", "tanh"}
    case[0].b.requires_grad_(False)
    # the input of the last product alone: its weight still trains
    assert list(names(case).values()) == [("linear_2", 48)]
    traced = trace(*case[:2], training=False)
    assert saved_bytes(run_passes(traced)) == 0


def test_layers_stay_equal_when_they_share() -> None:
    """Rotary angles are kept by every layer and owned by none."""
    case = hf("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=3)
    graph = graph_of(case)
    layers = [b for b in graph.blocks if b.name.startswith("model.layers.")]
    assert len({b.kind for b in layers}) == 1
    each = {saved_bytes(graph, graph.ops[b.start : b.stop]) for b in layers}
    assert len(each) == 1
    # two traced units stand for three layers, to the byte
    assert saved_bytes(graph) == saved_bytes(graph_of(case, shorten_runs=False))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrence_keeps_its_reserve(kind: type[nn.RNNBase]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(6, 10, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    per_unit = {nn.LSTM: 6, nn.GRU: 5, nn.RNN: 2}[kind]
    graph = graph_of(small(Net, 3, 7, 6))
    states = 2 if kind is nn.LSTM else 1
    assert saved_bytes(graph) >= 4 * 3 * 7 * 10 * (per_unit + 1)
    assert saved_bytes(graph) <= 4 * 3 * 10 * (7 * (per_unit + 1) + 2 * states)
