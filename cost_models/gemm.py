"""Time of matrix products on one device: C[b,m,n] = sum_k A[b,m,k] B[b,k,n].

The analytic part (tiles, waves, split-K, memory) is in ``gemm_core``; the constants and
a smooth correction over (log2 m, log2 n, log2 k) are fitted per GPU and dtype and read
from ``utilization/gemm.json``. Prices are of average kernel times with operands in HBM.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_models.errors import SpecError
from cost_models.gemm_core import (
    GemmConstants,
    Machine,
    joined_s,
    limit_s,
    machine,
    mainloop_s,
    quantise_s,
)
from cost_models.records import DeviceSpec
from cost_models.roofline import OpTime, dtype_bytes, op_time
from cost_models.surfaces import ALIKE, Surface, find_surface, interpolate, surfaces

LAYOUTS = ("NN", "NT", "TN", "TT")

#: CUDA-core operations to unpack one integer weight to 16 bits: shift or mask,
#: conversion and scale with zero point (counted from published dequantisation kernels).
DEQUANT_OPS = 4.0


@lru_cache(maxsize=256)
def _on(device: DeviceSpec, dtype: str) -> tuple[Machine, Surface]:
    surface, _ = find_surface("gemm", device, dtype)
    constants = GemmConstants(**dict(surface.constants))
    return machine(device, dtype, constants), surface


def measured(device: DeviceSpec, dtype: str) -> bool:
    """Whether the GPU itself was measured in ``dtype``; if not, prices come from a
    relative's constants or from the datasheet fallback."""
    return find_surface("gemm", device, dtype)[1]


def sustained_ratio(device: DeviceSpec, dtype: str) -> float:
    """GEMM time under minutes of full load over the short bursts that ``gemm_time``
    prices: power-limited clocks. Fitted where both were measured on the GPU (B200);
    1.0 elsewhere, which says that it is not known, not that clocks hold."""
    names = (dtype, ALIKE.get(dtype, dtype))
    table = surfaces("sustained")
    found = (table.get((device.family, name)) for name in names)
    return next((dict(s.constants)["ratio"] for s in found if s), 1.0)


def _check(m: float, n: float, k: float, batch: float) -> None:
    if min(m, n, k, batch) < 1:
        raise SpecError("a GEMM needs sizes >= 1", f"m={m} n={n} k={k} batch={batch}")


@lru_cache(maxsize=1 << 17)
def gemm_time(
    device: DeviceSpec,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    dtype: str = "bf16",
    layout: str = "NT",
    out_bytes: float = 2,
) -> OpTime:
    """A dense GEMM; ``out_bytes`` per element of C.

    FLOPs 2mnk batch; bytes A + B + C once. ``layout`` is the transposition of (A, B) as
    stored; libraries reach the same rate in all four, so it only is checked. Raises
    SpecError for a dtype that the device does not compute in or sizes below 1.
    """
    _check(m, n, k, batch)
    if layout not in LAYOUTS:
        raise SpecError("unknown GEMM layout", layout, f"Use one of {LAYOUTS}")
    elem = dtype_bytes(dtype)
    nbytes = batch * ((m * k + k * n) * elem + m * n * out_bytes)
    return priced(device, m, n, k, batch, dtype, nbytes)


def priced(
    device: DeviceSpec,
    m: float,
    n: float,
    k: float,
    batch: float,
    dtype: str,
    nbytes: float,
    load_bytes: float = 0.0,
) -> OpTime:
    """A GEMM whose HBM traffic is ``nbytes``: implicit GEMMs move less than A, B, C.

    ``load_bytes``: of one operand element on its way to an SM, if not the dtype's."""
    on, surface = _on(device, dtype)
    if load_bytes:
        on = replace(on, load=load_bytes)
    m, n, k, batch = float(m), float(n), float(k), float(batch)
    flops = 2.0 * m * n * k * batch
    compute = mainloop_s(on, m, n, k, batch)
    total = joined_s(on, compute, nbytes)
    if surface.grid:
        at = (math.log2(m * batch), math.log2(n), math.log2(k))
        total *= math.exp(interpolate(surface.knots, surface.grid, at))
    total = max(total, limit_s(on, flops, nbytes))
    memory = nbytes / on.hbm
    floor = on.kernel_s * on.constants.floor
    return op_time(total, compute, memory, floor, flops, nbytes, on.peak)


def gemm_times(
    device: DeviceSpec,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    batch: ArrayLike = 1,
    dtype: str = "bf16",
    out_bytes: float = 2,
) -> NDArray[np.float64]:
    """``gemm_time(...).time_s`` for arrays of shapes that broadcast together."""
    arrays = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
    )
    am, an, ak, ab = cast("list[NDArray[np.float64]]", arrays)
    if am.size == 0:
        return np.zeros(am.shape)
    _check(*(float(x.min()) for x in (am, an, ak, ab)))
    on, surface = _on(device, dtype)
    nbytes = ab * ((am * ak + ak * an) * dtype_bytes(dtype) + am * an * out_bytes)
    total = joined_s(on, mainloop_s(on, am, an, ak, ab), nbytes)
    if surface.grid:
        points = np.log2(np.stack([(am * ab).ravel(), an.ravel(), ak.ravel()], axis=1))
        rows = cast("list[list[float]]", points.tolist())
        logs = [
            interpolate(surface.knots, surface.grid, (r[0], r[1], r[2])) for r in rows
        ]
        total = total * np.exp(np.reshape(np.array(logs), am.shape))
    return np.maximum(total, limit_s(on, 2.0 * am * an * ak * ab, nbytes))


def quantise_time(device: DeviceSpec, m: int, k: int, dtype: str = "fp8") -> OpTime:
    """The kernel that scales (per row) and casts m x k activations to ``dtype``.

    t = floor + m x row cost + bytes / HBM, fitted with the 8-bit GEMMs, whose measured
    rows include it. Fused into the previous kernel it costs nothing: the caller knows.
    """
    _check(m, 1, k, 1)
    on, _ = _on(device, dtype)
    total, nbytes = quantise_s(on, float(m), float(k)), 3.0 * m * k
    total = max(total, nbytes / on.hbm)
    launch = on.kernel_s * on.constants.quant_floor
    return op_time(total, 0.0, nbytes / on.hbm, launch, 0.0, nbytes, on.peak)


@lru_cache(maxsize=1 << 15)
def weight_only_gemm_time(
    device: DeviceSpec,
    m: int,
    n: int,
    k: int,
    weight_bits: int = 4,
    group: int = 128,
    dtype: str = "bf16",
) -> OpTime:
    """y[m,n] = x[m,k] W[k,n], W stored in ``weight_bits`` and unpacked in the kernel.

    Bytes: x and y in ``dtype``, W in ``weight_bits`` / 8 plus a 16-bit scale and a
    zero point of ``weight_bits`` per ``group`` of k. Arithmetic runs in ``dtype``: at
    small m the weight bytes bound it (up to 16 / bits faster than 16-bit weights), at
    large m the tensor cores do, and unpacking (4 operations per weight on the CUDA
    cores, once per tile row of 128 in m) is added because both share issue slots.
    """
    _check(m, n, k, 1)
    if weight_bits not in (2, 3, 4, 8) or group < 1:
        raise SpecError("weight-only GEMM", f"{weight_bits} bits in groups of {group}")
    groups = math.ceil(k / group)
    weights = n * (k * weight_bits / 8 + groups * (2 + weight_bits / 8))
    nbytes = weights + (m * k + m * n) * dtype_bytes(dtype)
    # of each 2 (tm + tn) k operand bytes, the tn rows of W are packed
    packed = weights / (n * k)
    share = min(m, 128) / (min(m, 128) + 128)
    load = share * dtype_bytes(dtype) + (1 - share) * packed
    dense = priced(device, m, n, k, 1, dtype, nbytes, load)
    unpack = DEQUANT_OPS * n * k * math.ceil(m / 128) / device.peak("fp32")
    memory_s = dense.memory_s
    hidden = max(0.0, memory_s - dense.compute_s)  # unpacking hides under the loads
    total = dense.time_s + max(0.0, unpack - hidden)
    return op_time(
        total,
        dense.compute_s + unpack,
        memory_s,
        dense.launch_s,
        dense.flops,
        nbytes,
        device.peak(dtype),
    )
