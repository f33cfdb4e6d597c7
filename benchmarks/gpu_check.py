"""The cost model against one machine's GPU, in minutes.

``python -m benchmarks.gpu_check -o profile.json`` measures matrix products, attention,
convolutions and copies beside the model's prices. Without a GPU it says so and exits
with 2. Needs torch only, no solver.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from cost_models.attention import attention_time
from cost_models.conv import conv_time
from cost_models.errors import SpecError
from cost_models.gemm import gemm_time
from cost_models.hardware import DeviceSpec, load_device
from cost_models.roofline import pointwise_time

NO_GPU = 2
GEMMS = ((4096, 4096, 4096), (8192, 8192, 8192), (2048, 12288, 3072), (16, 8192, 8192),
         (4096, 1024, 4096), (1, 4096, 4096))  # fmt: skip
ATTENTIONS = ((4, 32, 2048, 128), (1, 32, 8192, 128), (16, 16, 512, 64))
CONVS = ((64, 64, 56, 3, 1), (64, 256, 28, 1, 1), (64, 128, 56, 3, 2))
COPIES = (2**24, 2**28)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``ratio`` is measured over predicted."""

    kind: str
    shape: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def find_device(name: str) -> DeviceSpec:
    """The spec of the GPU that CUDA calls ``name``; SpecError if there is none."""
    words = name.replace("NVIDIA", "").replace("-", " ").split()
    for text in ("-".join(words), " ".join(words), *words):
        try:
            return load_device(text)
        except SpecError:
            continue
    return load_device(name)


def measure(run: Callable[[], object], budget_s: float = 0.5) -> float:
    """Median seconds of one call on the device, by events, after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.monotonic() + budget_s
    while len(times) < 5 or (time.monotonic() < end and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def gemms(device: DeviceSpec) -> Iterator[Row]:
    """bf16 products [m, k] x [k, n]."""
    for m, n, k in GEMMS:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        seconds = measure(lambda a=a, b=b: F.linear(a, b))
        yield Row("gemm", f"{m}x{n}x{k}", seconds, gemm_time(device, m, n, k).time_s)


def attentions(device: DeviceSpec) -> Iterator[Row]:
    """Causal bf16 attention, forward."""
    for batch, heads, length, width in ATTENTIONS:
        shape = (batch, heads, length, width)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        seconds = measure(
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )
        )
        price = attention_time(
            device, batch, heads, heads, length, length, width, width
        )
        yield Row("attention", f"{shape}", seconds, price.time_s)


def convolutions(device: DeviceSpec) -> Iterator[Row]:
    """fp16 channels-last convolutions, forward."""
    for n, c, size, kernel, stride in CONVS:
        x = torch.randn(n, c, size, size, device="cuda", dtype=torch.float16)
        w = torch.randn(c, c, kernel, kernel, device="cuda", dtype=torch.float16)
        x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
        pad = kernel // 2
        seconds = measure(lambda x=x, w=w, s=stride, p=pad: F.conv2d(x, w, None, s, p))
        out = (size + 2 * pad - kernel) // stride + 1
        price = conv_time(
            device, n, c, c, (size, size), (out, out), (kernel, kernel),
            (stride, stride),
        )  # fmt: skip
        yield Row("conv", f"{n}x{c}x{size} k{kernel} s{stride}", seconds, price.time_s)


def copies(device: DeviceSpec) -> Iterator[Row]:
    """Copies inside device memory."""
    for nbytes in COPIES:
        x = torch.empty(nbytes, device="cuda", dtype=torch.uint8)
        y = torch.empty_like(x)
        seconds = measure(lambda x=x, y=y: y.copy_(x))
        price = pointwise_time(device, nbytes, nbytes)
        yield Row("copy", f"{nbytes} bytes", seconds, price.time_s)


def check() -> dict[str, object]:
    """All measurements of this machine's first GPU, with the median ratio by kind."""
    name = torch.cuda.get_device_name(0)
    device = find_device(name)
    rows: list[Row] = []
    for part in (gemms, attentions, convolutions, copies):
        for row in part(device):
            rows.append(row)
            print(
                f"{row.kind:<10} {row.shape:<28} {row.measured_s * 1e6:>10.1f} us  "
                f"predicted {row.predicted_s * 1e6:>10.1f} us  x{row.ratio:.2f}",
                file=sys.stderr,
            )
    kinds = dict.fromkeys(r.kind for r in rows)
    return {
        "device": device.name,
        "cuda_name": name,
        "torch": torch.__version__,
        "ratios": {k: median(r.ratio for r in rows if r.kind == k) for k in kinds},
        "rows": [asdict(r) | {"ratio": r.ratio} for r in rows],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here too")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return NO_GPU
    text = json.dumps(check(), indent=2, sort_keys=True)
    if given.output is not None:
        given.output.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
