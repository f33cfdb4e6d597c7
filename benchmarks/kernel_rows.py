"""Rows of the micro-benchmark tables, as arguments of the cost models.

What a source measured is not always an average kernel time. ``Bias`` says how it
differs (time = ratio x price + delta); the values are fitted by
``benchmarks/fit/fit_gemm.py`` and stay here, outside the product.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from cost_models.attention import (
    AttentionConstants,
    attention_pairs,
    attention_time,
    cache_write,
    fused,
)
from cost_models.conv import Shape, implicit_gemm
from cost_models.errors import SpecError
from cost_models.gemm import gemm_time
from cost_models.hardware import DeviceSpec, load_device
from cost_models.roofline import dtype_bytes, pointwise_time

DATA = Path(__file__).parent / "data"
BIAS_FILE = DATA / "measurement_bias.json"

#: GPU names of the sources to device names.
DEVICES: dict[str, str] = {
    "A100-80GB": "A100-SXM-80GB",
    "A100 SXM (40GB presumed)": "A100-SXM-40GB",
    "A100 PCIe": "A100-PCIE-80GB",
    "H100-80GB": "H100-SXM-80GB",
    "V100-16GB (DGX-1)": "V100-SXM2-16GB",
    "T4 (inference set)": "T4",
}

#: dtype names of DeepBench.
DTYPES: dict[str, str] = {
    "fp16 (mixed, fp32 acc)": "fp16",
    "mixed/GEMM, Conv: Int8 multiplication, 32 bit": "dp4a",
}

SOURCES: dict[str, str] = {
    "ai-dynamo": "aiconfigurator",
    "EleutherAI": "cookbook",
    "SimuMax": "simumax",
    "microsoft/vidur": "vidur",
    "Baidu": "deepbench",
}

Row = Mapping[str, str]


class SkipRow(Exception):
    """A row that can not be priced, with the reason."""


@dataclass(frozen=True, slots=True)
class Bias:
    """Measured = ratio x price + delta_s, with the reason."""

    ratio: float = 1.0
    delta_s: float = 0.0
    reason: str = ""


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a ``.csv`` or ``.csv.gz`` file."""
    file = Path(path)
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def source_name(row: Row) -> str:
    """A short name of the row's source."""
    for prefix, name in SOURCES.items():
        if row["source"].startswith(prefix):
            return name
    return row["source"].split()[0].lower() if row["source"] else "unknown"


def device_of(row: Row, dtype: str = "") -> DeviceSpec:
    """The row's device. DeepBench's int8 GEMMs ran on DP4A: 4 MACs per FP32 lane."""
    name = row["gpu"].strip()
    bare = re.sub(r"\s*\([^)]*\)", "", name)  # without "(DGX-1)", "(inference set)"
    tried = (DEVICES.get(name, name), DEVICES.get(bare, bare), bare.replace(" ", ""))
    for candidate in tried:
        try:
            device = load_device(candidate)
            break
        except SpecError:
            continue
    else:
        raise SkipRow(f"unknown GPU {name}")
    if dtype == "dp4a":
        peaks = (*device.peak_flops, ("dp4a", 4 * device.peak("fp32")))
        device = replace(device, peak_flops=peaks)
    return device


def dtype_of(row: Row) -> str:
    """The row's dtype as the cost models name it."""
    name = row["dtype"].strip()
    if name in DTYPES:
        return DTYPES[name]
    first = re.split(r"[ _,(/]", name.lower())[0]
    return {"float16": "fp16", "float32": "fp32", "nvfp4": "fp4"}.get(first, first)


@lru_cache(maxsize=1)
def biases() -> Mapping[str, Bias]:
    """Fitted measurement biases by source and, where it differs, GPU family."""
    if not BIAS_FILE.exists():
        return {}
    found = json.loads(BIAS_FILE.read_text("utf-8"))
    return {k: Bias(v["ratio"], v["delta_s"], v["reason"]) for k, v in found.items()}


def bias_of(source: str, family: str) -> Bias:
    """The measurement bias of a source, on a GPU family if that has its own."""
    known = biases()
    return known.get(f"{source}:{family}", known.get(source, Bias()))


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One measured GEMM."""

    id: str
    source: str
    device: DeviceSpec
    dtype: str
    m: int
    n: int
    k: int
    batch: int
    layout: str
    out_bytes: float
    time_s: float
    includes_quantisation: bool = False  # of the activations, before an fp8 GEMM


def gemm_row(row: Row) -> GemmRow:
    """A row of micro_gemm; raises SkipRow with the reason."""
    dtype = dtype_of(row)
    try:
        sizes = [int(float(row[c])) for c in ("m", "n", "k")]
        time_s = float(row["time_ms"]) / 1e3
    except ValueError as error:
        raise SkipRow(f"missing size or time: {error}") from error
    device = device_of(row, dtype)
    if not device.supports(dtype):
        raise SkipRow(f"{device.name} has no {dtype}")
    out = {"fp32": 4.0, "dp4a": 4.0}.get(dtype, 2.0)
    if "out_dtype=fp32" in row["notes"]:
        out = 4.0
    if "accumulate=True" in row["notes"]:
        out *= 2  # C is read and written
    source = source_name(row)
    if source == "deepbench":  # column-major: its m is the width of the weight
        sizes = [sizes[1], sizes[0], sizes[2]]
    return GemmRow(
        row["id"],
        source,
        device,
        dtype,
        *sizes,
        batch=int(float(row["batch"] or 1)),
        layout=row["layout"][:2] or "NT",
        out_bytes=out,
        time_s=time_s,
        includes_quantisation=source == "aiconfigurator" and dtype == "fp8",
    )


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One measured attention call; ``cached``: K and V are also written to a cache."""

    id: str
    source: str
    device: DeviceSpec
    dtype: str
    sizes: tuple[int, int, int, int, int, int, int]
    kernel: str
    cached: bool
    time_s: float

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V that the call reads."""
        batch, _, kv_heads, _, kv_len, qk, v = self.sizes
        return batch * kv_heads * kv_len * (qk + v) * dtype_bytes(self.dtype)


def attention_row(row: Row) -> AttentionRow:
    """A row of micro_attention; raises SkipRow with the reason."""
    try:
        batch, q_len, kv_len, heads, kv_heads, dim = (
            int(float(row[c]))
            for c in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
        )
        time_s = float(row["time_ms"]) / 1e3
    except ValueError as error:
        raise SkipRow(f"missing size or time: {error}") from error
    dtype, device = dtype_of(row), device_of(row)
    if not device.supports(dtype):
        raise SkipRow(f"{device.name} has no {dtype}")
    old = device.arch in ("pascal", "volta", "turing")
    return AttentionRow(
        row["id"],
        source_name(row),
        device,
        dtype,
        (batch, heads, kv_heads, q_len, kv_len, dim, dim),
        "efficient" if old else "flash",
        row["phase"].startswith("prefill") and row["kernel"].startswith("vllm"),
        time_s,
    )


def measured_attention_s(
    row: AttentionRow, constants: AttentionConstants, warm: float
) -> float:
    """What the source would time: the kernel, the cache write of prefill, and decode
    reads from L2 (``warm`` x the cold time) where the whole KV cache fits there."""
    slower = row.kernel == "efficient"
    op = fused(row.device, constants, row.sizes, row.dtype, True, slower)
    time_s = op.time_s
    if row.sizes[3] == 1 and row.kv_bytes <= row.device.l2_bytes:
        time_s = op.launch_s + (time_s - op.launch_s) * warm
    if row.cached:
        time_s += cache_write(row.device, constants, row.kv_bytes).time_s
    return time_s


@dataclass(frozen=True, slots=True)
class ConvRow:
    """One direction of one measured convolution."""

    id: str
    device: DeviceSpec
    dtype: str
    shape_name: str
    shape: Shape
    direction: str
    time_s: float


CONV_COLUMNS = {
    "forward": "fwd_ms",
    "backward_input": "bwd_input_ms",
    "backward_weight": "bwd_weight_ms",
}


def conv_rows(row: Row) -> list[ConvRow]:
    """The measured directions of a row of micro_conv; raises SkipRow."""
    names = ("n_batch", "c_in", "k_out", "h", "w", "out_h", "out_w")
    names += ("filter_h", "filter_w", "stride_h", "stride_w")
    try:
        n, ci, co, h, w, oh, ow, fh, fw, sh, sw = (int(float(row[c])) for c in names)
    except ValueError as error:
        raise SkipRow(f"missing size: {error}") from error
    dtype, device = dtype_of(row), device_of(row)
    if not device.supports(dtype):
        raise SkipRow(f"{device.name} has no {dtype}")
    found: list[ConvRow] = []
    for direction, column in CONV_COLUMNS.items():
        if not row.get(column) or float(row[column]) <= 0:
            continue
        sizes = (n, ci, co, (h, w), (oh, ow), (fh, fw), (sh, sw))
        shape = implicit_gemm(*sizes, 1, dtype, direction)
        time_s = float(row[column]) / 1e3
        name = f"{ci}.{co}.{h}.{w}.{fh}.{fw}.{sh}"
        found.append(ConvRow(row["id"], device, dtype, name, shape, direction, time_s))
    if not found:
        raise SkipRow("no measured direction")
    return found


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A transformer layer's forward: parts priced by the cost models, in seconds.

    ``pass_s``: one elementwise kernel over (tokens, hidden); ``scores``: query-key
    pairs of all heads. ``flash``: whether attention ran fused."""

    id: str
    gpu: str
    flash: bool
    hidden: int
    gemm_s: float
    attention_s: float
    pass_s: float
    scores: float
    time_s: float


def layer_row(row: Row) -> LayerRow:
    """A row of micro_layer: GPT-NeoX layer, MLP of 4h, no gate; SkipRow if unpriced."""
    names = ("micro_batch", "seq_len", "hidden", "heads", "tp", "flash_attn")
    try:
        batch, seq, hidden, heads, tp, flash = (int(float(row[c])) for c in names)
        time_s = float(row["layer_fwd_ms"]) / 1e3
    except ValueError as error:
        raise SkipRow(f"missing size or time: {error}") from error
    if tp != 1:
        raise SkipRow("only tp=1 rows are single-GPU times")
    dtype, device = dtype_of(row), device_of(row)
    tokens, dim = batch * seq, hidden // heads
    gemms = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden))
    gemms += ((hidden, 4 * hidden),)
    gemm_s = sum(gemm_time(device, tokens, n, k, 1, dtype).time_s for n, k in gemms)
    kernel = "flash" if flash else "math"
    sizes = (batch, heads, heads, seq, seq, dim, dim)
    attention = attention_time(device, *sizes, dtype=dtype, kernel=kernel)
    size = tokens * hidden * dtype_bytes(dtype)
    return LayerRow(
        row["id"],
        device.name,
        bool(flash),
        hidden,
        gemm_s,
        attention.time_s,
        pointwise_time(device, size, size).time_s,
        float(batch * heads * attention_pairs(seq, seq, True)),
        time_s,
    )


def measured_layer_s(
    row: LayerRow, ratio: float, passes: float, score_s: float
) -> float:
    """GEMMs under sustained load, eager elementwise passes, and the fused kernel's cost
    per score, which is what small head dims are bound by."""
    fused_s = row.scores * score_s if row.flash else 0.0
    return ratio * row.gemm_s + row.attention_s + fused_s + passes * row.pass_s
