"""Scaled-dot-product attention: flash, memory-efficient or unfused.

Forward runs two products over (q, kv) and a softmax; backward five. A causal mask
halves the arithmetic of the fused kernels, a window bounds it. Fused kernels move only
Q, K, V and the output; the unfused one writes and reads the q x kv scores.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from cost_models.gemm import DTYPE_BYTES
from cost_models.hardware import DeviceSpec
from cost_models.roofline import OpTime, finish, stream_s

#: Share of the dense peak that the kernels reach on long sequences, by architecture:
#: (forward, backward). FlashAttention-2 paper (A100: 0.73, 0.63), FlashAttention-3
#: paper for Hopper (0.65, 0.55 with bf16); older ones run the efficient kernel.
FLASH_SHARE = {
    "ampere": (0.66, 0.55),
    "ada": (0.66, 0.55),
    "hopper": (0.60, 0.50),
    "blackwell": (0.60, 0.50),
}
EFFICIENT_SHARE = (0.35, 0.28)


@lru_cache(maxsize=1 << 16)
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
    """Device time of one attention call (all heads, forward or backward)."""
    pairs = float(q_len) * kv_len
    if causal and kernel != "math":
        pairs = _causal_pairs(q_len, kv_len)
    if window and window < kv_len:
        pairs = min(pairs, float(q_len) * window)
    products = 2.5 if backward else 1.0
    flops = 2.0 * batch * q_heads * pairs * (qk_dim + v_dim) * products
    width = DTYPE_BYTES[dtype]
    q_bytes = batch * q_heads * q_len * (qk_dim + v_dim) * width
    kv_bytes = batch * kv_heads * kv_len * (qk_dim + v_dim) * width
    nbytes = (q_bytes + kv_bytes) * (3.0 if backward else 1.0)
    peak = device.peak(dtype)
    if kernel == "math":
        scores = batch * q_heads * float(q_len) * kv_len * (width + 4)
        nbytes += scores * (6.0 if backward else 4.0)
        share = 0.6
    elif kernel == "efficient":
        share = EFFICIENT_SHARE[backward]
    else:
        share = FLASH_SHARE.get(device.arch, EFFICIENT_SHARE)[backward]
    blocks = batch * q_heads * ceil(q_len / 128)
    if q_len < 128:  # decode: keys are split over the SMs, tiles are mostly empty
        blocks = batch * kv_heads * ceil(kv_len / 256)
        share *= max(1, q_len * (q_heads // max(1, kv_heads))) / 128
    fill = min(1.0, blocks / device.sm_count)
    compute = flops / (peak * min(1.0, share) * max(fill, 1e-3))
    return finish(device, compute, stream_s(device, nbytes), flops, nbytes, peak)


def _causal_pairs(q_len: int, kv_len: int) -> float:
    """Query-key pairs under a causal mask; the diagonal blocks run whole."""
    if q_len == kv_len:
        return q_len * (kv_len + 128) / 2 if q_len > 128 else float(q_len) * kv_len
    if q_len < kv_len and kv_len % max(1, q_len) == 0 and q_len > 1:
        return float(q_len) * kv_len / 2  # a balanced share of a longer sequence
    return float(q_len) * kv_len
