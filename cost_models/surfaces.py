"""Fitted constants of kernels, by GPU family and dtype: ``utilization/*.json``.

Each file holds entries written by ``benchmarks/fit`` with their source and error. An
entry is found by the GPU's family and dtype; where a GPU was never measured, by the
nearest measured relative (``RELATIVES``), and last by the pooled ``datasheet`` entry;
``find_surface`` says whether the surface belongs to the GPU itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

from cost_models.errors import SpecError
from cost_models.records import DeviceSpec

#: Measured relatives of an architecture, nearest first; same tensor-core generation.
RELATIVES: dict[str, tuple[str, ...]] = {
    "maxwell": ("V100", "T4"),
    "pascal": ("V100", "T4"),
    "volta": ("V100",),
    "turing": ("T4", "V100"),
    "ampere": ("A100", "A40"),
    "ada": ("L40S", "A40"),
    "hopper": ("H100",),
    "blackwell": ("B200", "H100"),
    "cdna2": ("MI250X",),
    "cdna3": ("MI250X",),
}

#: Dtypes that run through the same kernels.
ALIKE: dict[str, str] = {"bf16": "fp16", "int8": "fp8", "tf32": "fp16", "fp4": "fp8"}


@dataclass(frozen=True, slots=True)
class Surface:
    """Fitted ``constants`` and, where data is dense, a correction ``grid``: log of
    measured over analytic time at the ``knots`` (log2 of each dimension)."""

    kind: str
    family: str
    dtype: str
    constants: tuple[tuple[str, float], ...]
    knots: tuple[tuple[float, ...], ...]
    grid: tuple[float, ...]
    source: str
    error: tuple[tuple[str, float], ...]


@lru_cache(maxsize=8)
def surfaces(kind: str) -> Mapping[tuple[str, str], Surface]:
    """All entries of ``utilization/<kind>.json`` by (family, dtype)."""
    file = resources.files("cost_models") / "utilization" / f"{kind}.json"
    found: dict[tuple[str, str], Surface] = {}
    for raw in cast("list[dict[str, Any]]", json.loads(file.read_text("utf-8"))):
        key = (str(raw["family"]), str(raw["dtype"]))
        if not raw.get("source"):
            raise SpecError("a fitted surface without its source", key)
        found[key] = Surface(
            kind,
            *key,
            tuple((str(n), float(v)) for n, v in raw["constants"].items()),
            tuple(tuple(float(x) for x in axis) for axis in raw.get("knots", [])),
            tuple(float(x) for x in raw.get("grid", [])),
            str(raw["source"]),
            tuple((str(n), float(v)) for n, v in raw.get("error", {}).items()),
        )
    return found


def find_surface(kind: str, device: DeviceSpec, dtype: str) -> tuple[Surface, bool]:
    """The surface for ``dtype`` on ``device`` and whether it was measured on it."""
    table = surfaces(kind)
    names = dict.fromkeys((dtype, ALIKE.get(dtype, dtype)))
    own = (f"{device.family}-{device.form}", device.family)
    for family in own:
        for name in names:
            if (family, name) in table:
                return table[family, name], True
    for family in RELATIVES.get(device.arch, ()):
        for name in names:
            if (family, name) in table:
                return table[family, name], False
    for name in (*names, "fp16"):
        if ("datasheet", name) in table:
            return table["datasheet", name], False
    raise SpecError(f"no fitted {kind} constants for", f"{device.name} {dtype}")


def interpolate(
    knots: tuple[tuple[float, ...], ...], grid: tuple[float, ...], at: tuple[float, ...]
) -> float:
    """Multilinear interpolation on a row-major ``grid``, clamped at the borders."""
    index, corners = 0, ((0, 1.0),)
    strides: list[int] = []
    stride = 1
    for axis in reversed(knots):
        strides.append(stride)
        stride *= len(axis)
    for axis, x, step in zip(knots, at, reversed(strides), strict=True):
        low = 0
        last = len(axis) - 2
        while low < last and axis[low + 1] <= x:
            low += 1
        span = axis[low + 1] - axis[low]
        w = min(1.0, max(0.0, (x - axis[low]) / span))
        index += low * step
        corners = tuple(
            (offset + move, weight * part)
            for offset, weight in corners
            for move, part in ((0, 1.0 - w), (step, w))
            if part
        )
    return sum(grid[index + offset] * weight for offset, weight in corners)
