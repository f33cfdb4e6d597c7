"""Time of convolutions as implicit GEMMs: the im2col matrix is never written to memory.

With P output positions per sample, R = prod(kernel) and per group ci' = ci / groups,
co' = co / groups, the three products over (m, n, k), ``groups`` times:
  forward          (N P, co', ci' R)        y = x * w
  backward_input   (N P_in, ci', co' R / prod(stride))   dx: the same FLOPs as forward
  backward_weight  (co', ci' R, N P)        dw
FLOPs 2 N P co ci' R each. A transposed convolution's forward is the input gradient of the
convolution that it transposes, and the reverse. Bytes: input, weights and output once.
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


@dataclass(frozen=True, slots=True)
class ConvConstants:
    """Fitted per GPU and dtype by ``benchmarks/fit/fit_conv.py``.

    forward, backward_input, backward_weight: time over the GEMM of the same shape;
    direct: rate of direct (depthwise) kernels over CUDA-core FP32 peak.
    """

    forward: float
    backward_input: float
    backward_weight: float
    direct: float


@lru_cache(maxsize=256)
def _constants(device: DeviceSpec, dtype: str) -> ConvConstants:
    surface, _ = find_surface("conv", device, dtype)
    return ConvConstants(**dict(surface.constants))


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
    elem = dtype_bytes(dtype)
    taps, p_in, p_out = math.prod(kernel), math.prod(in_size), math.prod(out_size)
    gi, go = ci // groups, co // groups
    x_bytes, y_bytes = n * ci * p_in * elem, n * co * p_out * elem
    nbytes = x_bytes + y_bytes + co * gi * taps * elem
    flops = 2.0 * n * p_out * co * gi * taps
    c = _constants(device, dtype)
    if min(gi, go) < DIRECT_CHANNELS and groups > 1:
        return _direct(device, c, dtype, flops, nbytes)
    if direction == "forward":
        m, width, k, factor = n * p_out, go, gi * taps, c.forward
    elif direction == "backward_input":
        m, width, factor = n * p_in, gi, c.backward_input
        k = max(1.0, go * taps * p_out / p_in)  # strided: fewer taps per position
    else:
        m, width, k, factor = go, gi * taps, n * p_out, c.backward_weight
    gemm = priced(device, m, width, k, groups, dtype, nbytes)
    convert = 0.0
    if not channels_last and device.arch not in ("pascal",) and dtype != "fp32":
        convert = pointwise_time(device, x_bytes + y_bytes, x_bytes + y_bytes).time_s
    body = gemm.time_s - gemm.launch_s
    limit = max(flops / device.peak(dtype), nbytes / device.hbm_bytes_per_s)
    total = max(gemm.launch_s + body * factor, limit) + convert
    return op_time(
        total,
        gemm.compute_s * factor,
        gemm.memory_s + convert,
        gemm.launch_s,
        flops,
        nbytes,
        device.peak(dtype),
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


def _direct(
    device: DeviceSpec, c: ConvConstants, dtype: str, flops: float, nbytes: float
) -> OpTime:
    """Depthwise and thin groups: CUDA cores, mostly bound by bytes."""
    peak = device.peak("fp32")
    compute_s = flops / (peak * c.direct)
    memory_s = nbytes / (device.hbm_bytes_per_s * STREAM_EFFICIENCY)
    total = device.kernel_s + max(compute_s, memory_s)
    return op_time(
        total,
        compute_s,
        memory_s,
        device.kernel_s,
        flops,
        nbytes,
        max(peak, device.peak(dtype)),
    )
