"""Matrix products: tiles over the SMs, waves, K depth, alignment and HBM traffic.

For C[m, n] = A[m, k] B[k, n], ``batch`` times, each candidate tile (tm, tn) gives
``ceil(m / tm) ceil(n / tn) batch`` thread blocks, run in waves over the SMs (split
along K where there are too few). The fastest tile wins; the result is never faster
than FLOPs / peak or bytes / HBM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

import numpy as np
import numpy.typing as npt

from cost_models.hardware import DeviceSpec
from cost_models.roofline import OpTime, finish, stream_s

DTYPE_BYTES = {
    "fp64": 8.0,
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp4": 0.5,
}

#: (rows, columns, share of an SM's peak that the tile's inner loop reaches).
TILES = (
    (256, 128, 0.93),
    (128, 256, 0.93),
    (128, 128, 0.88),
    (128, 64, 0.72),
    (64, 128, 0.72),
    (64, 64, 0.55),
    (32, 64, 0.30),
    (16, 64, 0.16),
)

#: Elements of K that the pipeline's fill and the epilogue cost.
K_FILL = 128


@lru_cache(maxsize=1 << 17)
def gemm_time(
    device: DeviceSpec,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    dtype: str = "bf16",
    layout: str = "NT",
    out_bytes: int = 2,
) -> OpTime:
    """Device time of ``batch`` products of (m x k) and (k x n); raises SpecError where
    the device has no units for ``dtype``."""
    peak = device.peak(dtype)
    width = DTYPE_BYTES[dtype]
    flops = 2.0 * m * n * k * batch
    nbytes = batch * ((m * k + k * n) * width + m * n * out_bytes)
    per_sm = peak / device.sm_count
    best = float("inf")
    for rows, columns, share in TILES:
        blocks = ceil(m / rows) * ceil(n / columns) * batch
        split = 1
        while blocks * split * 2 <= device.sm_count and k / (split * 2) >= 256:
            split *= 2
        depth = k / split
        waves = _waves(blocks * split, device.sm_count)
        one = 2.0 * rows * columns * (depth + K_FILL) / (per_sm * share)
        extra = m * n * batch * 4.0 * split / device.hbm_bytes_per_s if split > 1 else 0
        best = min(best, waves * one + extra)
    compute = best / _alignment(m, n, k, width)
    compute = max(compute, flops / peak)
    return finish(device, compute, stream_s(device, nbytes), flops, nbytes, peak)


def _waves(blocks: int, sms: int) -> float:
    """Waves of thread blocks; a long tail is partly filled by two blocks per SM."""
    whole = blocks / sms
    if whole <= 1:
        return 1.0
    return 0.5 * (whole + ceil(whole))


def _alignment(m: int, n: int, k: int, width: float) -> float:
    """Share kept when the contiguous dims are not multiples of 16 bytes."""
    unit = max(1, int(16 / width))
    worst = 1.0
    for extent in (n, k):
        if extent % unit:
            worst = min(worst, 0.5 if extent % 2 else 0.75)
    return worst


def gemm_times(
    device: DeviceSpec,
    m: Sequence[int],
    n: Sequence[int],
    k: Sequence[int],
    batch: Sequence[int] | None = None,
    dtype: str = "bf16",
) -> npt.NDArray[np.float64]:
    """:func:`gemm_time` seconds for many shapes."""
    batches = batch if batch is not None else [1] * len(m)
    return np.array(
        [
            gemm_time(device, *shape, dtype).time_s
            for shape in zip(m, n, k, batches, strict=True)
        ]
    )


def weight_only_gemm_time(
    device: DeviceSpec,
    m: int,
    n: int,
    k: int,
    weight_bits: int,
    group: int = 128,
    dtype: str = "bf16",
) -> OpTime:
    """A product whose weights are stored in ``weight_bits`` with one 16-bit scale per
    ``group`` elements of K, expanded to ``dtype`` on the fly."""
    dense = gemm_time(device, m, n, k, 1, dtype)
    weights = n * k * (weight_bits / 8 + 2 / group)
    nbytes = weights + (m * k + m * n) * DTYPE_BYTES[dtype]
    # expanding costs about two integer operations an element on the CUDA cores
    expand = 2.0 * n * k * ceil(m / 128) / device.peak("fp32")
    return finish(
        device,
        dense.compute_s + expand,
        stream_s(device, nbytes),
        dense.flops,
        nbytes,
        device.peak(dtype),
    )
