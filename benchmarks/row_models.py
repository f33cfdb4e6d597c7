"""Models of measured rows: dimensions -> a traced graph, kept on disk between runs.

A row gives dimensions, not code. The modules are the product's presets, with the sizes
of the row and the few variants that published runs need (grouped keys without a gated
feed-forward, tied heads, low-rank adapters).
"""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false
import hashlib
import pickle
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes.trace
import planner.presets
from benchmarks.hybrid_model import HYBRIDS, Hybrid
from passes.ir import OpGraph
from passes.pipeline import run_passes
from passes.trace import trace
from planner.presets.bert import Bert, BertConfig
from planner.presets.deepseek import DeepSeek, DeepSeekConfig
from planner.presets.gpt import GPT, GPTConfig
from planner.presets.llama import Llama, LlamaConfig
from planner.search.job import scaled_context

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of one model.

    ``family``: gpt, llama, deepseek, bert, hybrid or vision.

    ``inner``: feed-forward width (of one expert where ``experts``). ``lora``: rank of
    adapters on the attention projections, everything else frozen; 0: none.
    ``name``: of a hybrid, or a library's name for vision, whose ``seq_len`` is the side
    of an image.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    seq_len: int
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    tied: bool = True
    dropout: float = 0.0
    qk_norm: bool = False
    dense_layers: int = 0
    dense_inner: int = 0
    shared: int = 1
    lora: int = 0
    dtype: str = "bf16"
    name: str = ""


class WideGPTAttention(nn.Module):
    """Causal attention of a GPT block with fewer key-value heads than query heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dim = spec.head_dim or spec.width // spec.heads
        self.q = nn.Linear(spec.width, spec.heads * self.dim)
        self.k = nn.Linear(spec.width, spec.kv_heads * self.dim)
        self.v = nn.Linear(spec.width, spec.kv_heads * self.dim)
        self.proj = nn.Linear(spec.heads * self.dim, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, -1, self.dim).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class Adapted(nn.Module):
    """A frozen linear layer beside a trainable low-rank product."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Offset(nn.Module):
    """A frozen embedding whose output needs gradients, so that all blocks are alike."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base = base
        self.offset = nn.Parameter(torch.zeros(base.embedding_dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.base(ids) + self.offset


def _gpt(spec: ModelSpec) -> nn.Module:
    config = GPTConfig(
        spec.layers,
        spec.width,
        spec.heads,
        vocab=spec.vocab,
        positions=spec.seq_len,
        dropout=spec.dropout,
    )
    model = GPT(config, spec.seq_len)
    own_dim = spec.head_dim and spec.head_dim * spec.heads != spec.width
    for block in model.layers:
        assert isinstance(block, nn.Module)
        if spec.kv_heads != spec.heads or own_dim:
            block.attn = WideGPTAttention(spec)
        if spec.inner != 4 * spec.width:
            block.fc_in = nn.Linear(spec.width, spec.inner)
            block.fc_out = nn.Linear(spec.inner, spec.width)
    if not spec.tied:
        model.head = nn.Linear(spec.width, spec.vocab, bias=False)
    return model


def _llama(spec: ModelSpec) -> nn.Module:
    model = Llama(
        LlamaConfig(
            spec.layers,
            spec.width,
            spec.inner,
            spec.heads,
            spec.kv_heads,
            spec.vocab,
            positions=spec.seq_len,
            head_dim=spec.head_dim or spec.width // spec.heads,
            experts=spec.experts,
            top_k=spec.top_k,
            qk_norm=spec.qk_norm,
        )
    )
    if spec.tied:
        model.head.weight = model.embed.weight
    if spec.lora:
        model.requires_grad_(False)
        model.embed = Offset(model.embed)
        for block in model.layers:
            assert isinstance(block, nn.Module)
            attention: Any = block.attn
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = getattr(attention, name)
                setattr(attention, name, Adapted(linear, spec.lora))
    return model


def _deepseek(spec: ModelSpec) -> nn.Module:
    groups = 8 if spec.experts % 8 == 0 else 1
    model = DeepSeek(
        DeepSeekConfig(
            layers=spec.layers,
            dense_layers=min(spec.dense_layers, spec.layers - 1),
            width=spec.width,
            dense_inner=spec.dense_inner,
            expert_inner=spec.inner,
            heads=spec.heads,
            experts=spec.experts,
            top_k=spec.top_k,
            groups=groups,
            top_groups=max(1, groups // 2),
            vocab=spec.vocab,
            positions=spec.seq_len,
        )
    )
    if spec.shared > 1:
        for block in model.layers:
            mlp: Any = block.mlp
            if hasattr(mlp, "shared"):
                wide = spec.shared * spec.inner
                mlp.shared.gate_proj = nn.Linear(spec.width, wide, bias=False)
                mlp.shared.up_proj = nn.Linear(spec.width, wide, bias=False)
                mlp.shared.down_proj = nn.Linear(wide, spec.width, bias=False)
    return model


def _bert(spec: ModelSpec) -> nn.Module:
    return Bert(
        BertConfig(
            spec.layers,
            spec.width,
            spec.inner,
            spec.heads,
            spec.vocab,
            max(512, spec.seq_len),
            dropout=spec.dropout,
        ),
        spec.seq_len,
    )


def _hybrid(spec: ModelSpec) -> nn.Module:
    return Hybrid(HYBRIDS[spec.name])


_BUILDERS = {
    "gpt": _gpt,
    "llama": _llama,
    "deepseek": _deepseek,
    "bert": _bert,
    "hybrid": _hybrid,
}


class ImageLoss(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixels).float(), labels)


def build(spec: ModelSpec, train: bool = True) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module on the meta device and one sample's inputs."""
    dtype = DTYPES[spec.dtype]
    with torch.device("meta"):
        if spec.family == "vision":
            return _vision(spec, dtype, train)
        model = _BUILDERS[spec.family](spec)
        ids = torch.zeros(1, spec.seq_len, dtype=torch.long)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    model = planner.presets._cast(model, dtype).train(train)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model, {"input_ids": ids, "labels": ids}


def _vision(
    spec: ModelSpec, dtype: torch.dtype, train: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    from planner.models import resolve_model

    source = resolve_model(
        spec.name, image_size=spec.seq_len, dtype=dtype, mode="infer"
    )
    model, args, kwargs = source.build()
    pixels = args[0] if args else next(iter(kwargs.values()))
    if not train:
        return model.eval(), {next(iter(kwargs), "x"): pixels}
    labels = torch.zeros(1, dtype=torch.long, device="meta")
    return ImageLoss(model).train(), {"pixels": pixels, "labels": labels}


def traced(spec: ModelSpec, train: bool = True) -> OpGraph:
    """The operator graph of one sample."""
    model, inputs = build(spec, train)
    if spec.family == "vision" and not train:
        result = trace(model, tuple(inputs.values()), {}, batch=1, training=False)
    else:
        result = trace(model, (), inputs, batch=1, training=train)
    graph = run_passes(result)
    if spec.family == "vision":
        return graph
    return graph if graph.seq_len else replace(graph, seq_len=spec.seq_len)


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Hash of the code that makes graphs: a change of it makes new ones."""
    digest = hashlib.sha256()
    for module in (passes.trace, planner.presets):
        assert module.__file__ is not None
        for path in sorted(Path(module.__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()


class Graphs:
    """Traced graphs by dimensions, in memory and in ``folder`` (None: the system's
    temporary folder). ``stale``: take graphs that older code made, if there are any."""

    def __init__(self, folder: Path | None = None, stale: bool = False) -> None:
        default = Path(tempfile.gettempdir()) / "parallel-planner-graphs"
        self.folder, self.stale = folder or default, stale
        self._kept: dict[tuple[ModelSpec, bool], OpGraph] = {}

    def path(self, spec: ModelSpec, train: bool) -> Path:
        code = "any" if self.stale else source_digest()
        text = repr((sorted(asdict(spec).items()), train, code))
        return self.folder / (hashlib.sha256(text.encode()).hexdigest() + ".pickle")

    def get(self, spec: ModelSpec, train: bool = True) -> OpGraph:
        """The graph of ``spec``, traced if it was not before."""
        key = (spec, train)
        if key not in self._kept:
            path = self.path(*key)
            if path.exists():
                self._kept[key] = pickle.loads(path.read_bytes())
            else:
                graph = traced(spec, train)
                self.folder.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_bytes(pickle.dumps(graph))
                part.replace(path)
                self._kept[key] = graph
        return self._kept[key]

    def at_cp(self, spec: ModelSpec, cp: int) -> OpGraph:
        """The graph of one of ``cp`` sequence chunks; attention sees all keys."""
        return scaled_context(self.get(replace(spec, seq_len=spec.seq_len // cp)), cp)
