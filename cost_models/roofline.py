"""The roofline: an op takes the longer of its arithmetic and its memory traffic.

t = kernel + max(FLOPs / (peak x eff), bytes / (HBM x eff)). Every op function of this
package returns an ``OpTime`` and leaves out the host's launch cost, which depends on
the software stack (``cost_models.stacks``) and hides behind the device when that is
busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import SpecError
from cost_models.records import DeviceSpec

#: Fraction of the datasheet HBM rate that a streaming kernel reaches (read + write
#: STREAM-like copies on V100..H100 are reported between 0.85 and 0.93).
STREAM_EFFICIENCY = 0.88

#: Bytes per element by the dtype names of ``DeviceSpec.peak_flops``.
DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "dp4a": 1,
    "fp4": 0.5,
    "int4": 0.5,
}


@dataclass(frozen=True, slots=True)
class OpTime:
    """One kernel's price. ``utilization`` is FLOPs / time / dense peak, in 0..1;
    ``bound`` names what takes the time: compute, memory or launch."""

    time_s: float
    compute_s: float
    memory_s: float
    launch_s: float  # shortest time of a kernel on the device, not the host's launch
    flops: float
    bytes: float
    utilization: float
    bound: str


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element; raises SpecError for an unknown name."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise SpecError(
            "unknown dtype", dtype, f"Use one of {', '.join(DTYPE_BYTES)}"
        ) from None


def bound_of(compute_s: float, memory_s: float, launch_s: float) -> str:
    """The longest of the three, by name."""
    longest = max(compute_s, memory_s, launch_s)
    if longest == launch_s:
        return "launch"
    return "compute" if longest == compute_s else "memory"


def op_time(
    time_s: float,
    compute_s: float,
    memory_s: float,
    launch_s: float,
    flops: float,
    nbytes: float,
    peak: float,
) -> OpTime:
    """An ``OpTime`` with utilisation and bound derived."""
    return OpTime(
        time_s,
        compute_s,
        memory_s,
        launch_s,
        flops,
        nbytes,
        flops / (time_s * peak) if time_s > 0 else 0.0,
        bound_of(compute_s, memory_s, launch_s),
    )


def pointwise_time(
    device: DeviceSpec,
    read_bytes: float,
    write_bytes: float,
    flops: float = 0.0,
    dtype: str = "fp32",
) -> OpTime:
    """A pointwise, normalisation or reduction kernel that streams its operands once.

    t = kernel + max(bytes / (0.88 HBM), FLOPs / peak of the CUDA cores). Small kernels
    are dominated by ``kernel_s``, so the reached bandwidth grows with size. Left out:
    operands that a previous kernel left in L2. No bytes: no kernel, no time.
    ``dtype`` is that of the operands; the arithmetic runs in FP32.
    """
    if min(read_bytes, write_bytes, flops) < 0:
        raise SpecError("negative work", f"{read_bytes}, {write_bytes}, {flops}")
    dtype_bytes(dtype)
    nbytes = read_bytes + write_bytes
    peak = device.peak("fp32")
    if nbytes == 0 and flops == 0:
        return OpTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "memory")
    memory_s = nbytes / (device.hbm_bytes_per_s * STREAM_EFFICIENCY)
    compute_s = flops / peak
    total = device.kernel_s + max(memory_s, compute_s)
    return op_time(total, compute_s, memory_s, device.kernel_s, flops, nbytes, peak)
