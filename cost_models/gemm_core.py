"""Tiles, waves and split-K: the analytic time of C[m,n] = A[m,k] B[k,n] x ``batch``.

One formula for numbers and arrays. For a tile (tm, tn) with split s over k:
  tiles = ceil(m/tm) ceil(n/tn) batch,  s = clamp(SMs // tiles, 1, k // k_split)
  waves = mix of tiles s / SMs (stream-K, many tile shapes) and its ceiling
  tile  = max(2 tm tn (k/s + k0) / (peak eff / SMs), operands of a tile / SM load rate,
               k/s steps of at least step_ns)
  t     = floor + norm_p(waves tile, bytes / (HBM mem)) + split-K reduction,
and the best tile is taken, as the library's heuristic does. ``k0`` is the prologue and
epilogue in units of k. The result is never below max(FLOPs/peak, bytes/HBM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import SpecError
from cost_models.records import DeviceSpec
from cost_models.roofline import dtype_bytes

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
#: Bytes of k that one step of the main loop takes (one shared-memory line).
STEP_BYTES = 128.0


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Fitted per GPU and dtype by ``benchmarks/fit/fit_gemm.py``.

    eff: reachable fraction of the dense peak (clocks under load included); k0: prologue
    and epilogue, in elements of k; waves: 1 = whole waves, 0 = no quantisation; mem:
    reachable fraction of HBM; sm_load: load rate of one SM over its share of HBM;
    step_ns: shortest step of the main loop (latency), per 128 bytes of k; floor:
    shortest kernel over the device's; k_split: least k of a slice; split: cost of a
    split-K reduction over
    its bytes; align32, align16, align4: added relative cost where the rows of A and B
    are not multiples of 32, 16, 4 bytes (16, 8, 2 elements of 16 bits); norm:
    exponent that joins compute and memory (large = perfect overlap).
    quant_floor, quant_row_ns (8-bit dtypes): the kernel that scales and casts the
    activations, over the shortest kernel, and nanoseconds per row of all SMs.
    """

    eff: float
    k0: float
    waves: float
    mem: float
    sm_load: float
    step_ns: float
    floor: float
    k_split: float
    split: float
    align32: float
    align16: float
    align4: float
    norm: float
    quant_floor: float = 0.0
    quant_row_ns: float = 0.0

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
    elem: float  # bytes of one element of A and B
    load: float  # bytes of one element on its way to an SM: less if packed
    constants: GemmConstants


def machine(device: DeviceSpec, dtype: str, constants: GemmConstants) -> Machine:
    """``device`` for GEMMs in ``dtype``; raises SpecError if it lacks the dtype."""
    return Machine(
        float(device.sm_count),
        device.peak(dtype),
        device.hbm_bytes_per_s,
        device.kernel_s,
        dtype_bytes(dtype),
        dtype_bytes(dtype),
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
    most = _larger(_smaller(on.sms // tiles, k // c.k_split), 0.0 * m + 1.0)
    ratio = tiles * most / on.sms
    whole = -(-ratio // 1.0)
    waves = _larger(ratio + c.waves * (whole - ratio), 0.0 * m + 1.0)
    depth = k / most
    arithmetic = 2.0 * tm * tn * (depth + c.k0) / (on.peak * c.eff / on.sms)
    operands = _smaller(m, 0.0 * m + tm) + _smaller(n, 0.0 * m + tn)
    load = operands * depth * on.load / (on.hbm * c.sm_load / on.sms)
    load = _larger(load, depth * on.load * (c.step_ns * 1e-9 / STEP_BYTES))
    reduction = (most > 1.0) * c.split * (on.kernel_s + 8.0 * most * m * n * b / on.hbm)
    return waves * _larger(arithmetic, load) + reduction


def mainloop_s(on: Machine, m: Num, n: Num, k: Num, batch: Num) -> Num:
    """Seconds of the best tile, alignment included, memory traffic not."""
    best = _tiled(on, TILES[0], m, n, k, batch)
    for tile in TILES[1:]:
        best = _smaller(best, _tiled(on, tile, m, n, k, batch))
    c = on.constants
    penalty = 0.0 * m + 1.0
    for nbytes, cost in ((32.0, c.align32), (16.0, c.align16), (4.0, c.align4)):
        step = max(1.0, nbytes / on.elem)
        penalty = penalty + cost * ((n % step > 0.0) | (k % step > 0.0))
    return best * penalty


def joined_s(on: Machine, compute_s: Num, nbytes: Num) -> Num:
    """Floor + p-norm of main loop and HBM traffic."""
    c = on.constants
    memory = nbytes / (on.hbm * c.mem)
    both = (compute_s**c.norm + memory**c.norm) ** (1.0 / c.norm)
    return cast("Num", on.kernel_s * c.floor + both)


def quantise_s(on: Machine, m: Num, k: Num) -> Num:
    """Seconds to scale and cast m rows of k 16-bit activations to 8 bits."""
    c = on.constants
    streamed = 3.0 * m * k / (on.hbm * c.mem)
    return on.kernel_s * c.quant_floor + m * (c.quant_row_ns * 1e-9) + streamed


def limit_s(on: Machine, flops: Num, nbytes: Num) -> Num:
    """The physical limit: no kernel is faster."""
    return _larger(flops / on.peak, nbytes / on.hbm)
