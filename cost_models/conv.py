"""Convolutions as implicit GEMM: the patches are never written to memory.

Forward over n images: M = n x out positions, N = co / groups, K = ci / groups x kernel
positions, ``groups`` times; the gradients permute the roles. Depthwise convolutions
have K of a few elements and run on CUDA cores, bound by memory.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from cost_models.gemm import DTYPE_BYTES, gemm_time
from cost_models.hardware import DeviceSpec
from cost_models.roofline import OpTime, finish, stream_s


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
    """Device time of one direction: forward, backward_input or backward_weight."""
    positions = n * prod(in_size if transposed else out_size)
    taps = prod(kernel)
    inner, outer = ci // groups, co // groups
    if transposed:
        inner, outer = outer, inner
    width = DTYPE_BYTES[dtype]
    nbytes = (
        n * ci * prod(in_size) + n * co * prod(out_size) + co * ci // groups * taps
    ) * width
    flops = 2.0 * positions * outer * inner * taps * groups
    peak = device.peak(dtype)
    if inner * outer < 64:
        cores = 2 * device.peak("fp32") * 0.25
        return finish(
            device, flops / cores, 1.3 * stream_s(device, nbytes), flops, nbytes, peak
        )
    if direction == "forward":
        shape = (positions, outer, inner * taps)
    elif direction == "backward_input":
        shape = (n * prod(in_size if not transposed else out_size), inner, outer * taps)
    else:
        shape = (outer, inner * taps, positions)
    product = gemm_time(device, *shape, groups, dtype)
    compute = product.compute_s
    if direction == "backward_input":  # strided positions do not all contribute
        compute *= flops / max(flops, product.flops)
    compute = max(compute / (0.85 if channels_last else 0.7), flops / peak)
    return finish(device, compute, stream_s(device, nbytes), flops, nbytes, peak)
