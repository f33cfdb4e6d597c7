"""Time of scaled dot-product attention: softmax(Q K^T) V, forward or backward.

FLOPs: with ``pairs`` the (query, key) pairs that a mask leaves,
  forward  2 pairs (qk_dim + v_dim),   backward (flash) 2 pairs (3 qk_dim + 2 v_dim)
per query head and sequence. Kernels: ``flash`` (tiles in shared memory, no S x S
bytes), ``efficient`` (the same traffic at a lower rate: no asynchronous copies, works
before Ampere), ``math`` (unfused: two GEMMs, and scores written and read by softmax).
Constants per GPU are read from ``utilization/attention.json``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cost_models.errors import SpecError
from cost_models.gemm import gemm_time
from cost_models.records import DeviceSpec
from cost_models.roofline import OpTime, dtype_bytes, op_time, pointwise_time
from cost_models.surfaces import find_surface

#: Architectures without the asynchronous copies that flash kernels need.
BEFORE_AMPERE = ("maxwell", "pascal", "volta", "turing")
KERNELS = ("flash", "efficient", "math")

#: batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim
Sizes = tuple[int, int, int, int, int, int, int]

#: Rows of a query tile in flash kernels.
TILE_Q = 128
#: Head dims for which flash kernels are compiled; others are padded to the next.
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
#: Most query rows per KV head (q_len x group) that still run as a decode kernel.
DECODE_ROWS = 64
#: Least keys of one slice of a split-KV decode kernel.
SPLIT_KEYS = 128
#: Passes over the score matrix of unfused attention: forward scale, mask and softmax
#: read and write each; backward of softmax and scale the same.
MATH_PASSES_FORWARD, MATH_PASSES_BACKWARD = 4, 4


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Fitted per GPU by ``benchmarks/fit/fit_attention.py``.

    eff: fraction of the dense peak in long sequences; backward: rate of backward over
    forward; ramp: keys' worth of fixed work per query tile; io: part of the bytes of q,
    k, v and o that does not hide under arithmetic; floor: shortest kernel over the
    device's; decode_floor: the same for decode; mem: fraction of HBM in decode;
    sm_load: load rate of one SM over its share of HBM; combine: cost of reducing 64
    slices of kv, over the shortest kernel; split_mha: 1 if kv is split without grouped
    queries too; cache: fraction of HBM in writing the KV cache; efficient: rate of the
    memory-efficient kernel over flash.
    """

    eff: float
    backward: float
    ramp: float
    io: float
    floor: float
    decode_floor: float
    mem: float
    sm_load: float
    combine: float
    split_mha: float
    cache: float
    efficient: float


@lru_cache(maxsize=256)
def attention_constants(device: DeviceSpec, dtype: str) -> AttentionConstants:
    surface, _ = find_surface("attention", device, dtype)
    return AttentionConstants(**dict(surface.constants))


def attention_pairs(q_len: int, kv_len: int, causal: bool, window: int = 0) -> int:
    """(query, key) pairs of one head: the last query sees the last key if causal;
    ``window`` > 0 limits each query to that many keys."""
    if not causal:
        return q_len * (min(kv_len, window) if window else kv_len)
    first = max(0, q_len - kv_len)  # rows before it see no key
    rows = q_len - first
    low = kv_len - rows + 1  # keys that the first of them sees
    if not window or window >= kv_len:
        return rows * (low + kv_len) // 2
    growing = max(0, min(rows, window - low))
    return growing * (2 * low + growing - 1) // 2 + (rows - growing) * window


def attention_flops(
    pairs: float, heads: float, qk_dim: int, v_dim: int, backward: bool
) -> float:
    """FLOPs of ``heads`` (batch x query heads) heads with ``pairs`` each."""
    width = 3 * qk_dim + 2 * v_dim if backward else qk_dim + v_dim
    return 2.0 * pairs * heads * width


@lru_cache(maxsize=1 << 15)
def attention_time(
    device: DeviceSpec,
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    qk_dim: int,
    v_dim: int,
    dtype: str = "bf16",
    causal: bool = True,
    kernel: str = "flash",
    backward: bool = False,
    window: int = 0,
) -> OpTime:
    """Attention over (batch, q_heads, q_len, qk_dim) with (batch, kv_heads, kv_len).

    Grouped queries read K and V once per KV head. A short ``q_len`` (decode) is bound
    by K and V bytes, split over the SMs along kv. ``backward`` covers dQ, dK and dV,
    the recomputed scores included. Raises SpecError for sizes below 1, heads that do
    not divide, an unknown kernel, or flash on a GPU before Ampere.
    """
    sizes = (batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim)
    if min(sizes) < 1 or window < 0:
        raise SpecError("attention needs sizes >= 1 and window >= 0", (*sizes, window))
    if q_heads % kv_heads:
        raise SpecError("query heads must divide by KV heads", f"{q_heads}, {kv_heads}")
    if kernel not in KERNELS:
        raise SpecError("unknown attention kernel", kernel, f"Use one of {KERNELS}")
    if kernel == "flash" and device.arch in BEFORE_AMPERE:
        raise SpecError(
            "flash attention needs Ampere or later", device.name, "Use efficient"
        )
    if kernel == "math":
        pairs = attention_pairs(q_len, kv_len, causal, window)
        flops = attention_flops(pairs, batch * q_heads, qk_dim, v_dim, backward)
        return _math(device, sizes, dtype, backward, flops)
    c = attention_constants(device, dtype)
    slower = kernel == "efficient"
    return fused(device, c, sizes, dtype, causal, slower, backward, window)


def fused(
    device: DeviceSpec,
    c: AttentionConstants,
    sizes: Sizes,
    dtype: str,
    causal: bool,
    efficient: bool = False,
    backward: bool = False,
    window: int = 0,
) -> OpTime:
    """A flash or efficient kernel with given constants, not cached (used by fits)."""
    batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim = sizes
    pairs = attention_pairs(q_len, kv_len, causal, window)
    flops = attention_flops(pairs, batch * q_heads, qk_dim, v_dim, backward)
    seen = min(kv_len, q_len - 1 + window) if window else kv_len
    elem = dtype_bytes(dtype)
    q_bytes = batch * q_heads * q_len * (qk_dim + v_dim) * elem
    kv_bytes = batch * kv_heads * seen * (qk_dim + v_dim) * elem
    rate = c.efficient if efficient else 1.0
    if not backward and q_len * (q_heads // kv_heads) <= DECODE_ROWS:
        return _decode(device, c, sizes, dtype, seen, q_bytes + kv_bytes, flops)
    # backward reads q, k, v, o, do and writes dq, dk, dv
    nbytes = (2 * q_bytes + 2 * kv_bytes) if backward else q_bytes + kv_bytes
    return _tiled(device, c, sizes, dtype, pairs, nbytes, flops, rate, backward)


def kv_cache_write_time(
    device: DeviceSpec,
    batch: int,
    kv_heads: int,
    tokens: int,
    qk_dim: int,
    v_dim: int,
    dtype: str = "bf16",
) -> OpTime:
    """Copying new K and V into a paged cache: read and written once, scattered."""
    c = attention_constants(device, dtype)
    size = batch * kv_heads * tokens * (qk_dim + v_dim) * dtype_bytes(dtype)
    return cache_write(device, c, size)


def cache_write(device: DeviceSpec, c: AttentionConstants, size: float) -> OpTime:
    """``kv_cache_write_time`` for ``size`` bytes of K and V with given constants."""
    memory_s = 2 * size / (device.hbm_bytes_per_s * c.cache)
    total, peak = device.kernel_s + memory_s, device.peak("fp32")
    return op_time(total, 0.0, memory_s, device.kernel_s, 0.0, 2 * size, peak)


def padded_dim(dim: int) -> int:
    """The head dim that a flash kernel computes with."""
    return next((d for d in HEAD_DIMS if d >= dim), math.ceil(dim / 64) * 64)


def _tiled(
    device: DeviceSpec,
    c: AttentionConstants,
    sizes: Sizes,
    dtype: str,
    pairs: int,
    nbytes: float,
    flops: float,
    rate: float,
    backward: bool,
) -> OpTime:
    """t = floor + max(work / SMs, longest tile, bytes / HBM) + io bytes / HBM."""
    batch, q_heads, _, q_len, kv_len, qk_dim, v_dim = sizes
    peak = device.peak(dtype)
    per_sm = peak * rate * c.eff * (c.backward if backward else 1.0) / device.sm_count
    tiles = batch * q_heads * math.ceil(q_len / TILE_Q)
    # a tile computes whole rows of 128, whatever the mask or q_len leaves of them
    padded = math.ceil(q_len / TILE_Q) * TILE_Q / q_len
    mean_keys = pairs / q_len * padded
    dims = padded_dim(qk_dim), padded_dim(v_dim)
    width = attention_flops(1, 1, *dims, backward)
    tile_s = TILE_Q * width / per_sm
    work = tiles * (mean_keys / padded + c.ramp) * tile_s * padded / device.sm_count
    longest = (min(kv_len, 2 * mean_keys) + c.ramp) * tile_s
    compute_s = max(work, longest)
    memory_s = nbytes / device.hbm_bytes_per_s
    floor = device.kernel_s * c.floor * (2 if backward else 1)
    total = floor + max(compute_s, memory_s) + c.io * memory_s
    total = max(total, flops / peak, nbytes / device.hbm_bytes_per_s)
    return op_time(total, compute_s, memory_s, floor, flops, nbytes, peak)


def _decode(
    device: DeviceSpec,
    c: AttentionConstants,
    sizes: Sizes,
    dtype: str,
    seen: int,
    nbytes: float,
    flops: float,
) -> OpTime:
    """K and V streamed once: t = floor + bytes / min(HBM, active SMs x load rate)."""
    batch, q_heads, kv_heads, _, _, _, _ = sizes
    hbm, peak = device.hbm_bytes_per_s, device.peak(dtype)
    heads = batch * kv_heads
    splits = max(1, min(device.sm_count // heads, seen // SPLIT_KEYS))
    if q_heads == kv_heads and not c.split_mha:
        splits = 1
    active = min(1.0, heads * splits / device.sm_count)
    rate = hbm * min(c.mem, active * c.sm_load)
    memory_s = nbytes / rate
    combine = device.kernel_s * c.combine * splits / 64 if splits > 1 else 0.0
    floor = device.kernel_s * c.decode_floor + combine
    compute_s = flops / (peak * c.eff)
    total = max(floor + max(memory_s, compute_s), flops / peak, nbytes / hbm)
    return op_time(total, compute_s, memory_s, floor, flops, nbytes, peak)


def _math(
    device: DeviceSpec,
    sizes: Sizes,
    dtype: str,
    backward: bool,
    flops: float,
) -> OpTime:
    """Unfused: GEMMs over all pairs (a mask saves nothing), passes over scores."""
    batch, q_heads, _, q_len, kv_len, qk_dim, v_dim = sizes
    heads, elem = batch * q_heads, dtype_bytes(dtype)
    gemms = [gemm_time(device, q_len, kv_len, qk_dim, heads, dtype)]
    if backward:
        gemms = [
            gemm_time(device, q_len, kv_len, v_dim, heads, dtype),  # dP = dO V^T
            gemm_time(device, kv_len, v_dim, q_len, heads, dtype),  # dV = P^T dO
            gemm_time(device, q_len, qk_dim, kv_len, heads, dtype),  # dQ = dS K
            gemm_time(device, kv_len, qk_dim, q_len, heads, dtype),  # dK = dS^T Q
        ]
    else:
        gemms.append(gemm_time(device, q_len, v_dim, kv_len, heads, dtype))
    scores = heads * q_len * kv_len * elem
    passes = MATH_PASSES_BACKWARD if backward else MATH_PASSES_FORWARD
    softmax = [pointwise_time(device, scores, scores) for _ in range(passes // 2)]
    parts = [*gemms, *softmax]
    return op_time(
        sum(p.time_s for p in parts),
        sum(p.compute_s for p in gemms),
        sum(p.memory_s for p in parts),
        sum(p.launch_s for p in parts),
        flops,
        sum(p.bytes for p in parts),
        device.peak(dtype),
    )
