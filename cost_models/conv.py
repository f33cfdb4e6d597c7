"""Time of convolutions as implicit GEMMs: the im2col matrix is never written to memory.

With P output positions per sample, R = prod(kernel) and per group ci' = ci / groups,
co' = co / groups, the three products over (m, n, k), ``groups`` times:
  forward          (N P, co', ci' R)        y = x * w
  backward_input   (N P_in, ci', co' R / prod(stride))   dx: the same FLOPs as forward
  backward_weight  (co', ci' R, N P)        dw
FLOPs 2 N P co ci' R each. A transposed convolution's forward is the input gradient of
the convolution that it transposes, and the reverse. Bytes: input, weights and output
once. FP32 3x3 convolutions may use Winograd, which needs 2.25 times fewer products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cost_models.errors import SpecError
from cost_models.gemm import priced
from cost_models.records import DeviceSpec
from cost_models.roofline import (
    STREAM_EFFICIENCY,
    OpTime,
    dtype_bytes,
    op_time,
    pointwise_time,
)
from cost_models.surfaces import find_surface

DIRECTIONS = ("forward", "backward_input", "backward_weight")

#: Channels per group below which libraries leave the tensor cores for a direct kernel.
DIRECT_CHANNELS = 4
#: Rate of direct (depthwise) kernels over the FP32 peak of the CUDA cores; they are
#: mostly bound by bytes.
DIRECT_EFFICIENCY = 0.25
#: Channels that one tensor-core step takes in FP16: fewer are padded.
CHANNEL_STEP = 8
#: Multiplications that Winograd F(2x2, 3x3) saves: 36 products become 16.
WINOGRAD_GAIN = 2.25

#: What the correction sees, per direction: a quadratic surface over the log2 sizes of
#: the GEMM and its ratio of memory to arithmetic time, apart for unit-stride 3x3 (where
#: Winograd applies), strided and 1x1 kernels; ``thin``: log2 of channel padding.
FEATURES = (
    "base",
    "square",
    "strided",
    "point",
    "point_strided",
    "taps",
    "thin",
    "thin2",
    "rows",
    "width",
    "depth",
    "square_rows",
    "square_width",
    "square_depth",
    "strided_rows",
    "strided_width",
    "strided_depth",
    "intensity",
    "rows2",
    "width2",
    "depth2",
    "rows_width",
    "rows_depth",
    "width_depth",
)

Weights = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ConvConstants:
    """Log of time over the GEMM of the same shape, linear in ``FEATURES``; fitted per
    GPU and dtype by ``benchmarks/fit/fit_conv.py``, one tuple per direction."""

    forward: Weights
    backward_input: Weights
    backward_weight: Weights


def conv_constants(device: DeviceSpec, dtype: str) -> ConvConstants:
    """The weights for ``dtype`` on ``device`` or its nearest relative."""
    surface, _ = find_surface("conv", device, dtype)
    values = dict(surface.constants)
    return ConvConstants(
        *(tuple(values[f"{d}_{f}"] for f in FEATURES) for d in DIRECTIONS)
    )


_constants = lru_cache(maxsize=256)(conv_constants)


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution as one of its three implicit GEMMs."""

    m: float
    n: float
    k: float
    groups: int
    flops: float
    nbytes: float
    taps: int
    padding: float  # channels of a tensor-core step over input channels, at least 1
    square: bool  # 3 x 3 (x 3), stride 1
    strided: bool
    winograd: bool


def implicit_gemm(
    n: int,
    ci: int,
    co: int,
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    groups: int,
    dtype: str,
    direction: str,
) -> Shape:
    """GEMM sizes and traffic of one direction."""
    elem = dtype_bytes(dtype)
    taps, p_in, p_out = math.prod(kernel), math.prod(in_size), math.prod(out_size)
    gi, go = ci // groups, co // groups
    touched = min(p_in, p_out * taps)  # strides beyond the kernel skip input
    x_bytes = n * ci * (p_in if direction == "backward_input" else touched) * elem
    nbytes = x_bytes + n * co * p_out * elem + co * gi * taps * elem
    if direction == "forward":
        m, width, k = float(n * p_out), float(go), float(gi * taps)
    elif direction == "backward_input":
        # strided: fewer taps meet each position
        m, width = float(n * p_in), float(gi)
        k = max(1.0, go * taps * p_out / p_in)
    else:
        m, width, k = float(go), float(gi * taps), float(n * p_out)
    square = set(kernel) == {3} and set(stride) == {1}
    return Shape(
        m,
        width,
        k,
        groups,
        2.0 * n * p_out * co * gi * taps,
        nbytes,
        taps,
        max(1.0, CHANNEL_STEP / gi),
        square,
        max(stride) > 1,
        square and len(kernel) == 2 and dtype == "fp32",
    )


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def features(device: DeviceSpec, dtype: str, on: Shape) -> Weights:
    """``FEATURES`` of a shape; sizes relative to 2^12 x 2^7 x 2^10, in fitted range."""
    m = _clip(math.log2(on.m) - 12.0, -6.0, 6.0)
    n = _clip(math.log2(on.n) - 7.0, -4.0, 5.0)
    k = _clip(math.log2(on.k) - 10.0, -5.0, 9.0)
    compute_s = on.flops / device.peak(dtype)
    ratio = on.nbytes / device.hbm_bytes_per_s / compute_s
    square, strided, point = float(on.square), float(on.strided), float(on.taps == 1)
    thin = math.log2(on.padding)
    return (
        1.0,
        square,
        strided,
        point,
        strided * point,
        _clip(math.log2(on.taps), 0.0, 7.0),
        thin,
        thin * thin,
        m,
        n,
        k,
        square * m,
        square * n,
        square * k,
        strided * m,
        strided * n,
        strided * k,
        _clip(math.log2(ratio), -6.0, 4.0),
        m * m / 4,
        n * n / 4,
        k * k / 4,
        m * n / 4,
        m * k / 4,
        n * k / 4,
    )


@lru_cache(maxsize=1 << 15)
def conv_time(
    device: DeviceSpec,
    n: int,
    ci: int,
    co: int,
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    groups: int = 1,
    dtype: str = "fp16",
    direction: str = "forward",
    channels_last: bool = True,
    transposed: bool = False,
) -> OpTime:
    """A convolution of (n, ci, *in_size) to (n, co, *out_size).

    Sizes are per spatial dim and may be 1, 2 or 3 long. Without ``channels_last``,
    tensor-core kernels convert input and output, which is added. Raises SpecError for
    sizes below 1, channels that do not divide by ``groups`` or an unknown direction.
    """
    _check(n, ci, co, in_size, out_size, kernel, stride, groups, direction)
    if transposed:  # price the convolution that it transposes
        ci, co, in_size, out_size = co, ci, out_size, in_size
        swap = {"forward": "backward_input", "backward_input": "forward"}
        direction = swap.get(direction, direction)
    shape = implicit_gemm(
        n, ci, co, in_size, out_size, kernel, stride, groups, dtype, direction
    )
    if groups > 1 and min(ci, co) // groups < DIRECT_CHANNELS:
        return _direct(device, dtype, shape)
    weights = getattr(_constants(device, dtype), direction)
    op = corrected(device, dtype, shape, weights)
    if channels_last or dtype == "fp32":
        return op
    moved = n * (ci * math.prod(in_size) + co * math.prod(out_size))
    size = moved * dtype_bytes(dtype)
    convert = pointwise_time(device, size, size).time_s
    return op_time(
        op.time_s + convert,
        op.compute_s,
        op.memory_s + convert,
        op.launch_s,
        op.flops,
        op.bytes + 2 * size,
        device.peak(dtype),
    )


def corrected(device: DeviceSpec, dtype: str, on: Shape, weights: Weights) -> OpTime:
    """The GEMM's time beyond its floor, scaled; never below the physical limit (direct
    FLOPs, or Winograd's where it applies)."""
    gemm = priced(device, on.m, on.n, on.k, on.groups, dtype, on.nbytes)
    seen = features(device, dtype, on)
    logs = sum(w * f for w, f in zip(weights, seen, strict=True))
    factor = math.exp(_clip(logs, -1.5, 3.2))
    peak = device.peak(dtype)
    flops_s = on.flops / peak / (WINOGRAD_GAIN if on.winograd else 1.0)
    limit = max(flops_s, on.nbytes / device.hbm_bytes_per_s)
    total = max(gemm.launch_s + (gemm.time_s - gemm.launch_s) * factor, limit)
    return op_time(
        total,
        gemm.compute_s * factor,
        gemm.memory_s,
        gemm.launch_s,
        on.flops,
        on.nbytes,
        peak * (WINOGRAD_GAIN if on.winograd else 1.0),
    )


def _check(
    n: int,
    ci: int,
    co: int,
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    groups: int,
    direction: str,
) -> None:
    if direction not in DIRECTIONS:
        raise SpecError("unknown direction", direction, f"Use one of {DIRECTIONS}")
    dims = {len(x) for x in (in_size, out_size, kernel, stride)}
    if len(dims) != 1:
        raise SpecError("spatial sizes of different lengths", sorted(dims))
    if min(n, ci, co, groups, *in_size, *out_size, *kernel, *stride) < 1:
        raise SpecError(
            "a convolution needs sizes >= 1", (n, ci, co, in_size, out_size)
        )
    if ci % groups or co % groups:
        raise SpecError("channels must divide by groups", f"{ci}, {co} by {groups}")


def _direct(device: DeviceSpec, dtype: str, on: Shape) -> OpTime:
    """Depthwise and thin groups: CUDA cores, mostly bound by bytes."""
    peak = device.peak("fp32")
    compute_s = on.flops / (peak * DIRECT_EFFICIENCY)
    memory_s = on.nbytes / (device.hbm_bytes_per_s * STREAM_EFFICIENCY)
    total = device.kernel_s + max(compute_s, memory_s)
    top = max(peak, device.peak(dtype))
    return op_time(
        total, compute_s, memory_s, device.kernel_s, on.flops, on.nbytes, top
    )
