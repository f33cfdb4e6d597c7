"""The roofline: a kernel takes the longer of its arithmetic and its memory traffic.

    t = max(flops / (peak x eff), bytes / (bandwidth x eff)) , at least one kernel

Host launch overhead is not part of it: a block is launch-bound as a whole, so the
caller adds it per software stack.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.hardware import DeviceSpec

#: Share of the datasheet's HBM bandwidth that a long streaming kernel reaches.
#: Babel-STREAM style copies on A100 and H100 reach 0.88 to 0.93 of it.
STREAM_EFFICIENCY = 0.90


@dataclass(frozen=True, slots=True)
class OpTime:
    """Device seconds of one kernel (or a few) and what binds it.

    ``utilization``: achieved FLOP/s over the dense peak of the dtype, 0 for kernels
    without matrix work. ``bound``: "compute", "memory" or "launch".
    """

    time_s: float
    compute_s: float
    memory_s: float
    launch_s: float
    flops: float
    bytes: float
    utilization: float
    bound: str


def finish(
    device: DeviceSpec,
    compute_s: float,
    memory_s: float,
    flops: float,
    nbytes: float,
    peak: float,
) -> OpTime:
    """The longest of arithmetic, traffic and the shortest kernel there is."""
    launch = device.kernel_s
    time = max(compute_s, memory_s, launch)
    bound = "compute" if compute_s >= memory_s else "memory"
    if time == launch and max(compute_s, memory_s) < launch:
        bound = "launch"
    share = flops / time / peak if peak and time else 0.0
    return OpTime(time, compute_s, memory_s, launch, flops, nbytes, share, bound)


def stream_s(device: DeviceSpec, nbytes: float) -> float:
    """Seconds to move ``nbytes`` through HBM; small transfers do not fill the pipe."""
    if nbytes <= 0:
        return 0.0
    ramp = 2e-6 * device.hbm_bytes_per_s  # bytes in flight before full speed
    rate = device.hbm_bytes_per_s * STREAM_EFFICIENCY * nbytes / (nbytes + ramp * 0.1)
    return nbytes / rate


def pointwise_time(
    device: DeviceSpec,
    read_bytes: float,
    write_bytes: float,
    flops: float = 0.0,
    dtype: str = "fp32",
) -> OpTime:
    """An elementwise, norm, softmax or copy kernel: ``flops`` run on CUDA cores."""
    peak = device.peak(dtype) if device.supports(dtype) else device.peak("fp32")
    nbytes = read_bytes + write_bytes
    compute = flops / (0.5 * peak)
    return finish(device, compute, stream_s(device, nbytes), flops, nbytes, peak)
