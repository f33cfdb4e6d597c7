"""Predicted against measured peak memory: ``train_megatron_ci`` and ``train_llm``.

Every row gives dimensions and a layout; peak memory comes from
:mod:`cost_models.transformer` and :mod:`cost_models.memory`. Measured figures are what
torch's allocator held (no context), so ``MemoryLines.allocated_bytes`` is compared.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.memory import MemoryInputs, training_memory
from cost_models.transformer import (
    ActivationProfile,
    Split,
    TransformerDims,
    cost_balanced_layers,
    load_activation_profile,
    rank_memory,
)
from cost_models.units import GIB

Row = Mapping[str, str]
#: Share of reserved memory that no tensor uses, where a source states what the driver
#: shows; torch's caching allocator keeps 10-20 % after the peaks of several sizes.
_RESERVED_SHARE = 0.15
DATA = Path(__file__).parent / "data"
ARCH = {
    "A1": "ampere",
    "A8": "ampere",
    "H": "hopper",
    "GB": "blackwell",
    "B": "blackwell",
}


class CanNotPriceError(Exception):
    """A row outside the model; its text says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: ``ranks`` are the stages whose largest peak was measured."""

    dims: TransformerDims
    split: Split
    profile: ActivationProfile
    stages: tuple[int, ...]
    arch: str
    measured_bytes: float
    reserved: bool = False  # the driver's figure: context and caches included
    live: float | None = None
    encoder: TransformerDims | None = None  # runs before ``dims`` on the same rank
    cross_bytes: float = 0.0  # saved by attention from ``dims`` to the encoder


def _int(row: Row, name: str, default: int = 0) -> int:
    text = row.get(name) or ""
    return int(float(text)) if text not in ("", "nan") else default


def _arch(gpu: str) -> str:
    for prefix, arch in ARCH.items():
        if gpu.startswith(prefix):
            return arch
    return "volta"


def predict_inputs(case: Case) -> tuple[MemoryInputs, ...]:
    """Inputs of every rank that may hold the peak."""
    found: list[MemoryInputs] = []
    for stage in case.stages:
        args = (case.split, case.profile, stage, 80 * GIB, case.arch)
        inputs = rank_memory(case.dims, *args, live=case.live)
        if case.encoder is not None:
            before = rank_memory(case.encoder, *args, live=case.live)
            inputs = replace(
                inputs,
                groups=inputs.groups + before.groups,
                activation_bytes=inputs.activation_bytes
                + before.activation_bytes
                + case.cross_bytes,
            )
        if case.reserved:
            inputs = replace(inputs, fragmentation=_RESERVED_SHARE)
        found.append(inputs)
    return tuple(found)


def predict_bytes(case: Case) -> float:
    """Peak that the source reports of the measured ranks."""
    lines = [training_memory(x) for x in predict_inputs(case)]
    return max(x.total_bytes if case.reserved else x.allocated_bytes for x in lines)


# --- train_megatron_ci: the last rank logs its own peak ---------------------------

#: Dimensions that the test's name or the public model gives and the row leaves out.
GPT2_VOCAB, BERT_VOCAB = 50_257, 30_522
_RELEASE_GPUS = 64  # of the release tests whose count the row leaves out


def _padded(vocab: int, tp: int) -> int:
    """Megatron pads the vocabulary to a multiple of 128 tp."""
    return -(-vocab // (128 * tp)) * 128 * tp


def _ci_vocab(row: Row) -> int:
    case = row["test_case"]
    if _int(row, "vocab_arg"):
        return _int(row, "vocab_arg")
    if row["model_family"] in ("bert", "t5"):
        return BERT_VOCAB
    for name, vocab in (
        ("15b", 256_000),
        ("7b_tp", 151_643),
        ("mixtral", 32_000),
        ("deepseekv3", 128_000),
        ("check_grads", 131_072),
    ):
        if name in case:
            return vocab
    return GPT2_VOCAB


def ci_case(row: Row) -> Case:
    """The layout of a Megatron functional test."""
    family, case = row["model_family"], row["test_case"]
    if family in ("hybrid", "multimodal-llava", "mimo", "nemotron"):
        raise CanNotPriceError(f"{family}: layers that the row does not describe")
    tp, pp, cp = _int(row, "tp", 1), _int(row, "pp", 1), _int(row, "cp", 1)
    micro = _int(row, "micro_batch", 1)
    batch = _int(row, "global_batch", 1152)
    gpus = _int(row, "num_gpus", _RELEASE_GPUS if "release" in case else 8)
    dp = max(1, min(gpus // (tp * pp * cp), batch // micro))
    layers = _int(row, "layers")
    per_chunk = _int(row, "layers_per_vpp_stage")
    virtual = max(1, layers // pp // per_chunk) if per_chunk and pp > 1 else 1
    dims = _ci_dims(row, tp)
    split = Split(
        tp=tp,
        sequence_parallel=row["sp"] == "1" and tp > 1,
        cp=cp,
        pp=pp,
        virtual=virtual,
        dp=dp,
        ep=_int(row, "ep", 1),
        etp=_int(row, "etp"),
        zero=3 if row["megatron_fsdp"] == "1" else _int(row, "dist_optimizer"),
        micro_batch=micro,
        micro_batches=max(1, batch // (dp * micro)),
        recompute=row["recompute"] or "none",
    )
    profile = load_activation_profile("megatron")
    if not _fused(row):
        profile = replace(profile, score=5.0)
    if "cross_entropy_loss_fusion" in case or "defer_embedding_wgrad" in case:
        # both hold the FP32 logits, or the deferred gradient, beside the softmax
        profile = replace(profile, loss_peak=profile.loss_peak + 4)
    if "multi_dist_optimizer_instances" in case:  # states are kept by each half
        split = replace(split, optimizer_replicas=2)
    if "uneven_pipeline" in case:
        split = replace(split, layers_per_stage=(2, 4, 4, 2))
    if split.recompute == "selective" and "offloading" not in case:
        split = replace(split, recompute="none")  # of small modules, not attention
    live = None
    if "account_for_embedding_loss" in case:  # embedding and loss count as layers
        split = replace(split, layers_per_stage=(1, 2, 2, 1))
        live = float(pp)  # the last rank's one layer is in its first chunk
    encoder, cross = None, 0.0
    if family == "t5":  # dims is the decoder of 128 tokens with cross-attention
        queries, keys = 128 * micro, dims.seq_len
        cross = profile.score * dims.heads * queries * (keys - 128)  # scores
        cross += 2 * 2 * dims.hidden * keys * micro  # k and v of the encoder's tokens
        cross *= dims.layers / tp
        encoder = replace(dims, tied=True, vocab=0)
        dims = replace(dims, seq_len=128, heads=2 * dims.heads, head_dim=dims.head_size)
        dims = replace(dims, kv_heads=dims.heads)
    measured = float(row["mem_max_allocated_gib"]) * GIB
    return Case(
        dims,
        split,
        profile,
        (pp - 1,),
        _arch(row["gpu"]),
        measured,
        live=live,
        encoder=encoder,
        cross_bytes=cross,
    )


def _ci_dims(row: Row, tp: int) -> TransformerDims:
    """Dimensions of the row; blanks are Megatron's defaults or the named model's."""
    case, hidden, heads = row["test_case"], _int(row, "hidden"), _int(row, "heads")
    gated = any(
        name in case for name in ("swiglu", "mixtral", "deepseek", "check_grads")
    )
    ffn = _int(row, "ffn_hidden", 4 * hidden)
    deepseek = "deepseekv3" in case
    return TransformerDims(
        layers=_int(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_int(row, "kv_groups", heads),
        ffn=ffn,
        vocab=_padded(_ci_vocab(row), tp),
        seq_len=_int(row, "seq_len"),
        gated=gated,
        tied=not any(n in case for n in ("untie", "7b_tp", "mixtral", "deepseekv3")),
        head_dim=128 if deepseek else 0,
        learned_positions="rope" not in case,
        experts=_int(row, "num_experts"),
        top_k=_int(row, "topk", 1),
        expert_ffn=2048 if deepseek else ffn,
        shared_ffn=2048 if deepseek else 0,
        dense_layers=3 if deepseek else 0,
    )


def _fused(row: Row) -> bool:
    """Whether attention keeps no s x s scores.

    Fused unless stated, local, or a deterministic run in an old container, whose
    Transformer Engine had no deterministic fused attention.
    """
    backend = row["attention_backend"]
    if backend in ("flash", "fused"):
        return True
    if backend in ("unfused", "local") or row["transformer_impl"] == "local":
        return False
    file = row["path"].rsplit("/", 1)[-1]
    old = "dracooci" in file or ("lts" in file and not row["num_gpus"])
    return not (old and row["deterministic"] == "1")


# --- train_llm -------------------------------------------------------------------


def llm_case(row: Row) -> Case:
    """The layout of a training row; raises CanNotPriceError."""
    if row["config_group"] == "ultrascale":
        return _nanotron_case(row)
    return _generic_case(row)


#: Profile of a source's stack; Megatron's for the rest.
_PROFILES = {
    "torchtitan": "torchtitan",
    "internevo-mem": "internevo",
    "fms-fsdp": "torchtitan",
}


def _generic_case(row: Row) -> Case:
    """Any row with dimensions: its stack's profile, the largest peak of all stages."""
    group = row["config_group"]
    hidden, layers, heads = (_int(row, n) for n in ("hidden", "layers", "heads"))
    if not (hidden and layers and heads and _int(row, "vocab")):
        raise CanNotPriceError(f"{group}: no dimensions")
    tp, pp, cp = _int(row, "tp", 1), _int(row, "pp", 1), _int(row, "cp", 1)
    micro, dp = _int(row, "microbatch", 1), _int(row, "dp", 1)
    sharded = row["zero_or_fsdp"]
    zero = (
        3 if "fsdp" in sharded.lower() or sharded == "3" else _int(row, "zero_or_fsdp")
    )
    dims = _llm_dims(row, layers, hidden, heads)
    vpp = _int(row, "vpp", 1)
    split = Split(
        tp=tp,
        sequence_parallel=tp > 1 and row["sp"] not in ("0", "0.0"),
        cp=cp,
        pp=pp,
        virtual=vpp if pp > 1 else 1,
        dp=dp,
        ep=_int(row, "ep", 1),
        etp=1 if dims.experts else 0,
        zero=zero,
        micro_batch=micro,
        micro_batches=max(1, _int(row, "global_batch", 4 * dp * micro) // (dp * micro)),
        recompute=row["recompute"] if row["recompute"] in _MODES else "none",
    )
    profile = load_activation_profile(_PROFILES.get(group, "megatron"))
    if row["flash_attn"] in ("0", "0.0"):
        profile = replace(profile, score=5.0)
    measured = float(row["mem_gib_per_gpu"]) * GIB
    reserved = group == "internevo-mem"  # as nvidia-smi shows it
    stages = tuple(range(pp))
    return Case(dims, split, profile, stages, _arch(row["gpu"]), measured, reserved)


_MODES = ("none", "selective", "full")


def _llm_dims(row: Row, layers: int, hidden: int, heads: int) -> TransformerDims:
    gated = row["ffn_gated"] not in ("0", "0.0")
    ffn = _int(row, "ffn_hidden", 8 * hidden // 3 if gated else 4 * hidden)
    experts = _int(row, "moe_experts")
    dims = TransformerDims(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_int(row, "kv_heads", heads),
        ffn=ffn,
        vocab=_padded(_int(row, "vocab"), _int(row, "tp", 1)),
        seq_len=_int(row, "seq_len", 2048),
        gated=gated,
        tied=not gated and row["config_group"] != "megatron-ci",
        head_dim=_int(row, "head_dim"),
        experts=experts,
        top_k=_int(row, "moe_topk", 1),
    )
    if row["model"].startswith("deepseekv2"):  # latent attention, one dense layer
        return replace(
            dims,
            head_dim=128,
            attention_weights=149_000_000,
            ffn=12_288,
            expert_ffn=1_536,
            shared_ffn=3_072,
            dense_layers=1,
        )
    return dims


def _nanotron_case(row: Row) -> Case:
    """Ultra-Scale Playbook: rank 0 (first stage) reports its peak; 4,096 tokens.

    Two settings of ``tp_recompute_allgather`` ran, and the source does not print which:
    the runs that are marked as delayed (quality C), and those on two stages with micro
    -batches below 2 tp, kept no gathered inputs.
    """
    h, ffn = _int(row, "hidden"), _int(row, "ffn_hidden")
    tp, pp, dp = _int(row, "tp", 1), _int(row, "pp", 1), _int(row, "dp", 1)
    micro, layers = _int(row, "microbatch", 1), _int(row, "layers")
    vocab = _int(row, "vocab")
    late = row["quality"] == "C" or "abnormal" in row["notes"]
    split_layers = cost_balanced_layers(
        layers, 4 * h * h + 3 * h * ffn, vocab * h, pp, strict=late
    )
    dims = TransformerDims(
        layers=layers,
        hidden=h,
        heads=_int(row, "heads"),
        kv_heads=_int(row, "kv_heads"),
        ffn=ffn,
        vocab=vocab,
        seq_len=_int(row, "seq_len", 4096),
        gated=True,
        tied=h < 8192,
    )
    split = Split(
        tp=tp,
        sequence_parallel=tp > 1,
        pp=pp,
        dp=dp,
        zero=_int(row, "zero_or_fsdp"),
        micro_batch=micro,
        micro_batches=max(1, _int(row, "global_batch", 256) // (dp * micro)),
        layers_per_stage=split_layers,
    )
    gathers_again = late or (pp == 2 and micro < 2 * tp)
    name = "nanotron" if gathers_again else "nanotron_kept"
    profile = load_activation_profile(name)
    measured = float(row["mem_gib_per_gpu"]) * GIB
    return Case(dims, split, profile, (0,), _arch(row["gpu"]), measured)


# --- figures ----------------------------------------------------------------------


def figures(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float | int]:
    """Errors of predicted bytes, relative to measured."""
    if not len(predicted):
        return {"n": 0}
    error = predicted / measured - 1
    return {
        "n": len(error),
        "median_ape": round(float(np.median(np.abs(error))), 4),
        "p90_ape": round(float(np.quantile(np.abs(error), 0.9)), 4),
        "bias": round(float(np.median(error)), 4),
        "under_3pct_fraction": round(float(np.mean(error < -0.03)), 4),
    }


def evaluate(rows: Iterable[Row]) -> dict[str, Any]:
    """Figures over the rows of either table that state memory, in all and by group."""
    skipped: Counter[str] = Counter()
    predicted: list[float] = []
    measured: list[float] = []
    groups: list[str] = []
    for row in rows:
        table_ci = "mem_max_allocated_gib" in row
        text = row["mem_max_allocated_gib" if table_ci else "mem_gib_per_gpu"]
        if text in ("", "nan"):
            continue
        try:
            case = ci_case(row) if table_ci else llm_case(row)
        except CanNotPriceError as reason:
            skipped[str(reason)] += 1
            continue
        predicted.append(predict_bytes(case))
        measured.append(case.measured_bytes)
        groups.append(row["model_family"] if table_ci else row["config_group"])
    p, m = np.array(predicted), np.array(measured)
    by_group = {
        name: figures(p[mask], m[mask])
        for name in sorted(set(groups))
        for mask in [np.array([g == name for g in groups])]
    }
    reasons = [f"{count} rows: {reason}" for reason, count in skipped.most_common()]
    return {**figures(p, m), "skipped": reasons, "by_group": by_group}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, gzipped or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def main(argv: list[str]) -> None:
    paths = [Path(a) for a in argv] or [
        DATA / "train_megatron_ci.csv.gz",
        DATA / "train_llm.csv.gz",
    ]
    for path in paths:
        print(json.dumps({path.name: evaluate(read_rows(path))}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
