"""Tiles, waves and split-K: the analytic time of C[m,n] = A[m,k] B[k,n], ``batch`` times.

One formula for numbers and arrays. For a tile (tm, tn) with split s over k:
  tiles = ceil(m/tm) ceil(n/tn) batch,  s = clamp(SMs // tiles, 1, k // K_SPLIT)
  waves = mix of tiles s / SMs (stream-K, many tile shapes) and its ceiling
  tile  = max(2 tm tn (k/s + k0) / (peak eff / SMs), operands of a tile / SM load rate)
  t     = floor + norm_p(waves tile, bytes / (HBM mem)) + split-K reduction,
and the best tile is taken, as the library's heuristic does. ``k0`` is the prologue and
epilogue in units of k. The result is never below max(FLOPs/peak, bytes/HBM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import SpecError
from cost_models.records import DeviceSpec

Num = TypeVar("Num", float, NDArray[np.float64])

#: Tile shapes of tensor-core GEMM libraries (CUTLASS defaults, both orientations).
TILES: tuple[tuple[int, int], ...] = (
    (256, 128),
    (128, 256),
    (128, 128),
    (64, 128),
    (128, 64),
    (64, 64),
    (32, 64),
    (64, 32),
    (16, 64),
    (64, 16),
)
#: Least k that a slice of a split-K kernel works on.
K_SPLIT = 256.0


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Fitted per GPU and dtype by ``benchmarks/fit/fit_gemm.py``.

    eff: reachable fraction of the dense peak (clocks under load included); k0: prologue
    and epilogue, in elements of k; waves: 1 = whole waves, 0 = no quantisation; mem:
    reachable fraction of HBM; sm_load: load rate of one SM over its share of HBM;
    floor: shortest kernel over the device's; split: cost of a split-K reduction over
    its bytes; align8, align2: relative cost of dims not divisible by 8 and by 2;
    norm: exponent that joins compute and memory (large = perfect overlap).
    """

    eff: float
    k0: float
    waves: float
    mem: float
    sm_load: float
    floor: float
    split: float
    align8: float
    align2: float
    norm: float

    def __post_init__(self) -> None:
        if not (0 < self.eff <= 1 and 0 < self.mem <= 1 and self.norm >= 1):
            raise SpecError("GEMM constants out of range", self)


@dataclass(frozen=True, slots=True)
class Machine:
    """A device seen by one dtype: the numbers that the formula needs."""

    sms: float
    peak: float  # FLOP/s
    hbm: float  # bytes/s
    kernel_s: float
    constants: GemmConstants


def machine(device: DeviceSpec, dtype: str, constants: GemmConstants) -> Machine:
    """``device`` for GEMMs in ``dtype``; raises SpecError if it lacks the dtype."""
    return Machine(
        float(device.sm_count),
        device.peak(dtype),
        device.hbm_bytes_per_s,
        device.kernel_s,
        constants,
    )


def _larger(a: Num, b: Num) -> Num:
    return 0.5 * (a + b + abs(a - b))


def _smaller(a: Num, b: Num) -> Num:
    return 0.5 * (a + b - abs(a - b))


def _ceil(a: Num, b: float) -> Num:
    return -(-a // b)


def _tiled(on: Machine, tile: tuple[int, int], m: Num, n: Num, k: Num, b: Num) -> Num:
    """Seconds of the main loop and the split-K reduction with one tile shape, without
    memory traffic; ``b`` is the batch."""
    c, (tm, tn) = on.constants, tile
    tiles = _ceil(m, tm) * _ceil(n, tn) * b
    most = _larger(_smaller(on.sms // tiles, k // K_SPLIT), 0.0 * m + 1.0)
    ratio = tiles * most / on.sms
    whole = -(-ratio // 1.0)
    waves = _larger(ratio + c.waves * (whole - ratio), 0.0 * m + 1.0)
    depth = k / most
    arithmetic = 2.0 * tm * tn * (depth + c.k0) / (on.peak * c.eff / on.sms)
    operands = _smaller(m, 0.0 * m + tm) + _smaller(n, 0.0 * m + tn)
    load = operands * depth * 2.0 / (on.hbm * c.sm_load / on.sms)
    reduction = (most > 1.0) * c.split * (on.kernel_s + 8.0 * most * m * n * b / on.hbm)
    return waves * _larger(arithmetic, load) + reduction


def mainloop_s(on: Machine, m: Num, n: Num, k: Num, batch: Num) -> Num:
    """Seconds of the best tile, alignment included, memory traffic not."""
    best = _tiled(on, TILES[0], m, n, k, batch)
    for tile in TILES[1:]:
        best = _smaller(best, _tiled(on, tile, m, n, k, batch))
    c = on.constants
    odd8 = (n % 8.0 > 0.0) | (k % 8.0 > 0.0)
    odd2 = (n % 2.0 > 0.0) | (k % 2.0 > 0.0)
    return best * (1.0 + odd8 * c.align8 + odd2 * c.align2)


def joined_s(on: Machine, compute_s: Num, nbytes: Num) -> Num:
    """Floor + p-norm of main loop and HBM traffic."""
    c = on.constants
    memory = nbytes / (on.hbm * c.mem)
    both: Num = (compute_s**c.norm + memory**c.norm) ** (1.0 / c.norm)
    return on.kernel_s * c.floor + both


def limit_s(on: Machine, flops: Num, nbytes: Num) -> Num:
    """The physical limit: no kernel is faster."""
    return _larger(flops / on.peak, nbytes / on.hbm)
