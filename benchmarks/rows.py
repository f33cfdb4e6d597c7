"""Measured training rows -> what the planner prices: model, cluster, layout, stack.

A row states most of a configuration; what its source leaves out is filled by the rules
of this file, one per source and never per row, and the rules are text in
:data:`SOURCES`. A row that lacks what no rule can give raises :class:`SkipRowError`.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.hybrid_model import HYBRIDS
from benchmarks.row_models import ModelSpec
from cost_models.transformer import cost_balanced_layers
from planner.workload import Parallelism, RecomputeMode

Row = Mapping[str, str]
DATA = Path(__file__).parent / "data"


class SkipRowError(Exception):
    """A row that can not be priced; its text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a source's rows leave unsaid. ``defaults`` fill empty columns."""

    stack: str
    defaults: Mapping[str, str] = field(default_factory=lambda: {})
    dropout: float = 0.0
    tied: bool = True
    network: str = ""  # kind of network behind a bare bandwidth
    gradients: str = "fp32"  # dtype in which gradients accumulate and travel


_OLD = {"recompute": "full", "sp": "0", "flash_attn": "0"}
_MODERN = {"sp": "1", "flash_attn": "1", "recompute": "none", "zero_or_fsdp": "1"}
_UNFUSED = {"recompute": "none", "flash_attn": "0"}

#: One entry per ``config_group``; :data:`OTHER` for sources that are not named.
SOURCES: dict[str, Source] = {
    "megatron-2020": Source("megatron-2020", _OLD, dropout=0.1, gradients="fp16"),
    "megatron-sc21": Source("megatron-2021", _OLD, dropout=0.1),
    "korthikanti": Source("megatron-2021", _OLD, dropout=0.1),
    "vtrain-multi": Source("megatron-deepspeed", _OLD, dropout=0.1, gradients="fp16"),
    "vtrain-single": Source("megatron-deepspeed", _OLD, dropout=0.1, gradients="fp16"),
    "bigscience-176b": Source("megatron-deepspeed", _OLD, dropout=0.1),
    "bigscience-v100": Source("megatron-deepspeed", _OLD, dropout=0.1),
    "megatron-h100": Source("megatron", _MODERN, tied=False),
    "megatron-ci": Source("megatron-deterministic", _MODERN, tied=False),
    "nemo-launcher": Source(
        "nemo",
        {
            **_MODERN,
            "recompute": "selective",
            "flash_attn": "0",
            "global_batch": "2048",
        },
    ),
    "nemo-2407": Source("megatron-bridge", _MODERN, tied=False),
    "nemo-longctx": Source("megatron-bridge", _MODERN, tied=False),
    "llama3-paper": Source("megatron", _MODERN, tied=False),
    "simumax-b200": Source("megatron-exposed", _MODERN, tied=False),
    "megatron-bridge": Source("megatron-bridge", _MODERN, tied=False),
    "megatron-bridge-mem": Source("megatron-bridge", _MODERN, tied=False),
    "mlperf-gpt3": Source("nemo-mlperf", _MODERN),
    "mlperf-405b": Source("nemo-mlperf", _MODERN, tied=False),
    "mlperf-8b": Source("nemo-mlperf", _MODERN, tied=False),
    "mlperf-lora70b": Source("nemo-mlperf", _MODERN, tied=False),
    "mosaicml": Source("llm-foundry", _MODERN),
    "torchtitan": Source("torchtitan", _MODERN, tied=False),
    "fms-fsdp": Source("torchtitan", _MODERN, tied=False),
    "internevo": Source(
        "internevo", {**_MODERN, "sp": "0"}, tied=False, gradients="bf16"
    ),
    "internevo-mem": Source("internevo", {**_MODERN, "sp": "0"}, tied=False),
    "ultrascale": Source("nanotron", _MODERN, network="efa"),
    "bert-dle": Source("bert-dle", _UNFUSED, dropout=0.1),
}  # fmt: skip
OTHER = Source("megatron", _MODERN, tied=False)


@dataclass(frozen=True, slots=True)
class Case:
    """One row ready to be priced; ``measured_s`` is the time of a step."""

    id: str
    group: str
    quality: str
    model_name: str
    gpu: str
    spec: ModelSpec
    cluster: tuple[tuple[str, Any], ...]
    stack: str
    attention: str  # kernel: flash or math
    precision: str
    optimizer: str
    recipe: str | None
    parallelism: Parallelism
    micro_batch_given: bool
    measured_s: float
    tokens_per_step: float
    notes: str

    @property
    def num_gpus(self) -> int:
        return self.parallelism.num_gpus

    @property
    def model_key(self) -> tuple[str, str, int]:
        """Rows that compare plans of one model on one machine."""
        return (self.model_name, self.gpu, self.num_gpus)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, gzipped or not; "nan" reads as empty."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return [
        {k: "" if v in (None, "nan", "NaN") else v for k, v in row.items()}
        for row in csv.DictReader(io.StringIO(text))
    ]


def case_of(row: Row) -> Case:
    """The configuration of a ``train_llm`` row; raises SkipRowError with the reason."""
    group = row["config_group"]
    source = SOURCES.get(group, OTHER)
    full = {k: v or source.defaults.get(k, "") for k, v in row.items()}
    spec = _spec(full, source)
    shape, given = _parallelism(full, spec)
    batch = _int(full, "global_batch")
    seconds = _measured(full, batch, shape.num_gpus)
    precision = _precision(full)
    return Case(
        id=row["id"],
        group=group,
        quality=row["quality"] or "A",
        model_name=row["model"],
        gpu=row["gpu"],
        spec=replace(spec, dtype=_traced_dtype(precision)),
        cluster=tuple(sorted(_cluster(full, source).items())),
        stack=_stack(full, source),
        attention="math" if full["flash_attn"] in ("0", "0.0") else "flash",
        precision=precision,
        optimizer="adamw",
        recipe=_recipe(precision, source),
        parallelism=shape,
        micro_batch_given=given,
        measured_s=seconds,
        tokens_per_step=float(batch * spec.seq_len),
        notes=row["notes"],
    )


def _int(row: Row, name: str, default: int = 0) -> int:
    text = row.get(name) or ""
    return int(float(text)) if text else default


def _recipe(precision: str, source: Source) -> str | None:
    if precision == "bf16" and source.gradients == "fp32":
        return "bf16_fp32_gradients"
    return None


def _spec(row: Row, source: Source) -> ModelSpec:
    layers, width, heads = (_int(row, n) for n in ("layers", "hidden", "heads"))
    if row["model"].lower() in HYBRIDS:
        return _hybrid(row["model"].lower(), _int(row, "seq_len", 8192))
    if not (layers and width and heads):
        raise SkipRowError(f"{row['config_group']}: {_no_dims(row)}")
    gated = row["ffn_gated"] not in ("0", "0.0")
    inner = _int(row, "ffn_hidden") or (8 * width // 3 if gated else 4 * width)
    vocab = _int(row, "vocab")
    if not vocab:
        raise SkipRowError(f"{row['config_group']}: no vocabulary")
    tp = _int(row, "tp", 1)
    model = row["model"].lower()
    bert = row["config_group"] == "bert-dle" or "bert" in model
    spec = ModelSpec(
        family="bert" if bert else "llama" if gated else "gpt",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_int(row, "kv_heads", heads),
        inner=inner,
        vocab=-(-vocab // (128 * tp)) * 128 * tp,
        seq_len=_int(row, "seq_len", 2048),
        head_dim=_int(row, "head_dim") if gated else 0,
        experts=_int(row, "moe_experts"),
        top_k=_int(row, "moe_topk", 1) if row["moe_experts"] else 0,
        tied=source.tied,
        dropout=source.dropout,
        qk_norm="qwen3" in model,
        lora=16 if "lora" in model else 0,
    )
    if row["config_group"] == "ultrascale":
        spec = replace(spec, tied=width < 8192)
    if spec.experts and ("deepseek" in model or "kimi" in model):
        second = "v2" in model
        dense, dense_inner = (
            (1, 12288 if second else 18432)
            if (second or "kimi" in model)
            else (3, 18432)
        )
        return replace(
            spec,
            family="deepseek",
            dense_layers=dense,
            dense_inner=dense_inner,
            shared=2 if second else 1,
            head_dim=0,
            tied=False,
        )
    if spec.experts and not gated:
        raise SkipRowError(f"{row['config_group']}: experts without a gate")
    return spec


def _hybrid(name: str, seq_len: int) -> ModelSpec:
    c = HYBRIDS[name]
    return ModelSpec(
        "hybrid", len(c.pattern), c.width, c.heads, c.kv_heads, c.inner, c.vocab,
        seq_len, head_dim=c.head_dim, experts=c.experts, top_k=c.top_k, tied=False,
        name=name,
    )  # fmt: skip


def _no_dims(row: Row) -> str:
    if "nemotron" in row["model"].lower():
        return "hybrid Mamba and attention layers, whose sizes the row does not give"
    return "no layers, width or heads"


def _parallelism(row: Row, spec: ModelSpec) -> tuple[Parallelism, bool]:
    gpus = _int(row, "num_gpus")
    group = row["config_group"]
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    if group == "nemo-launcher" and not tp:
        # the repository's recipe for one GPU; 64 GPUs at least hold the large model,
        # presumed without sequence parallelism, which then needs full recompute
        large = {"vpp": "12", "microbatch": "1", "recompute": "full", "sp": "0"}
        tp, pp = (8, 8) if spec.layers == 96 else (1, 1)
        row = {**row, **(large if tp > 1 else {"vpp": "1", "microbatch": "4"})}
    tp, pp = tp or 1, pp or 1
    if gpus % (tp * pp * cp):
        raise SkipRowError(f"{group}: tp x pp x cp does not divide the GPUs")
    dp = gpus // (tp * pp * cp)
    batch = _int(row, "global_batch")
    if not batch:
        raise SkipRowError(f"{group}: no global batch")
    micro = _int(row, "microbatch")
    given = bool(micro)
    if not micro:  # one micro-batch where nothing else is said
        micro = batch // dp if pp == 1 and batch % dp == 0 else 1
        micro = min(micro, 4)
        while micro > 1 and batch % (dp * micro):
            micro -= 1
    if batch % (dp * micro):
        raise SkipRowError(f"{group}: the batch does not divide over dp x micro-batch")
    vpp = _int(row, "vpp") or _chunks(spec.layers, pp) if pp > 1 else 1
    if vpp > 1 and (batch // (dp * micro)) % pp:
        raise SkipRowError(f"{group}: interleaved micro-batches not a multiple of pp")
    zero = _zero(row["zero_or_fsdp"]) if dp * cp > 1 else 0
    layers = None
    if group == "ultrascale" and pp > 1:
        h = spec.width
        layer = 4 * h * h + 3 * h * spec.inner
        late = row["quality"] == "C" or "abnormal" in row["notes"]
        vocab = _int(row, "vocab")
        layers = cost_balanced_layers(spec.layers, layer, vocab * h, pp, strict=late)
    return (
        Parallelism(
            pp=pp,
            dp_replicate=1 if zero else dp,
            dp_shard=dp if zero else 1,
            cp=cp,
            ep=_int(row, "ep", 1),
            tp=tp,
            vpp=vpp,
            sequence_parallel=tp > 1 and row["sp"] not in ("0", "0.0"),
            zero=zero,
            micro_batch_size=micro,
            recompute=_recompute(row["recompute"], pp),
            layers_per_stage=layers,
        ).derive(batch),
        given,
    )


def _chunks(layers: int, pp: int) -> int:
    """Chunks per rank where a source with a pipeline does not say: interleaved, as far
    as layers divide, up to 12."""
    per_rank = layers // pp
    if layers % pp:
        return 1
    return max(v for v in range(1, 13) if per_rank % v == 0)


def _zero(text: str) -> int:
    text = text.lower()
    if "fsdp" in text:
        return 3
    match = re.search(r"[0-3]", text)
    return int(match[0]) if match else 0


def _recompute(text: str, pp: int) -> RecomputeMode | tuple[int, ...]:
    match = re.match(r"full \(first (\d+) layers?\)", text)
    if match:
        count = int(match[1])
        return tuple(count if k == 0 else 0 for k in range(pp))
    if text == "selective":
        return "selective"
    return "full" if text.startswith("full") else "none"


def _precision(row: Row) -> str:
    text = row["precision"].lower()
    for name in ("nvfp4", "fp4"):
        if name in text:
            return "fp4"
    if "fp8" in text:
        return "fp8"
    for name in ("bf16", "fp16", "tf32", "fp32"):
        if name in text:
            return name
    return "bf16"


def _traced_dtype(precision: str) -> str:
    known = {"fp8": "bf16", "fp4": "bf16", "tf32": "fp32"}
    return known.get(precision, precision)


def _cluster(row: Row, source: Source) -> dict[str, Any]:
    gpus, per_node = _int(row, "num_gpus"), _int(row, "gpus_per_node", 8)
    found: dict[str, Any] = {"gpu": row["gpu"], "num_gpus": gpus}
    if "NVL72" not in row["intra_link"]:
        found["gpus_per_node"] = min(per_node, gpus)
    rate = row["inter_link_gbps_per_gpu"]
    if rate and gpus > found.get("gpus_per_node", 72):
        found["inter"] = f"{float(rate):g}Gb/s {source.network}".strip()
    return found


def _stack(row: Row, source: Source) -> str:
    name = source.stack
    if name == "torchtitan" and row["compile"] in ("0", "0.0"):
        return "torchtitan-eager"
    if "rowwise" in row["precision"]:
        return "torchtitan-rowwise"
    if "async TP" in row["notes"]:
        return "torchtitan-async-tp"
    return name


def _measured(row: Row, batch: int, gpus: int) -> float:
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        rate = float(row["tokens_per_s_per_gpu"]) * gpus
        return batch * _int(row, "seq_len", 2048) / rate
    raise SkipRowError(f"{row['config_group']}: memory only, no time")
