"""Bytes, bandwidths and times: text in, SI numbers out, and back.

``B`` is a byte and ``b`` is a bit; ``K M G T P`` are powers of 1000 and ``Ki Mi Gi Ti
Pi`` powers of 1024 (IEC 80000-13). So ``80GB`` is 80e9 bytes, ``80GiB`` is 85899345920
bytes, ``1Gib`` is 134217728 bytes, ``400Gb/s`` is 50e9 bytes/s.
"""

from __future__ import annotations

import math
import re

from cost_models.errors import SpecError

GB = 1e9
GIB = 2**30
US = 1e-6

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_NUMBER = r"(\d{1,18}(?:\.\d{1,12})?|\.\d{1,12})(?:[eE]([+-]?\d{1,2}))?"
_UNIT = r"([kmgtpKMGTP]?)(i?)(bytes?|bits?|[bB])"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*(?:{_UNIT})?\s*", re.ASCII)
_RATE = re.compile(
    rf"\s*{_NUMBER}\s*{_UNIT}\s*(?:/\s*s(?:ec(?:ond)?)?|ps)\s*", re.ASCII
)


def _value(number: str, exponent: str | None) -> float:
    return float(number) * 10.0 ** int(exponent or "0")


def _bytes_per_unit(prefix: str, binary: str, unit: str, text: str) -> float:
    prefix = prefix.lower()
    if binary and not prefix:
        raise SpecError("the unit has 'i' and no prefix", text, "Write GiB, MiB, KiB")
    scale = _BINARY[prefix] if binary else _DECIMAL[prefix]
    bits = unit == "b" or unit.startswith("bit")
    return scale / 8 if bits else float(scale)


def parse_bytes(text: str | int | float) -> int:
    """Whole bytes from ``80GB``, ``80GiB``, ``1Gib`` (bits) or a plain number.

    Raises SpecError for anything else, for negative and for infinite sizes."""
    if isinstance(text, (int, float)):
        if isinstance(text, bool) or not math.isfinite(text) or text < 0:
            raise SpecError("not a size in bytes", text, "Give a number >= 0")
        return round(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise SpecError("not a size", repr(text), "Write it like 80GB, 80GiB or 512MiB")
    number, exponent, prefix, binary, unit = match.groups()
    scale = 1.0 if unit is None else _bytes_per_unit(prefix, binary, unit, text)
    return round(_value(number, exponent) * scale)


def parse_bandwidth(text: str | int | float) -> float:
    """Bytes per second from ``400Gb/s``, ``100Gbps``, ``400GB/s`` or a plain number.

    ``b`` is bits and ``B`` is bytes; ``ps`` and ``/s`` are the same. Raises SpecError
    for anything else, and for a bandwidth that is not positive."""
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        match = _RATE.fullmatch(text)
        if match is None:
            raise SpecError(
                "not a bandwidth",
                repr(text),
                "Write bits as 400Gb/s or 100Gbps, bytes as 50GB/s",
            )
        number, exponent, prefix, binary, unit = match.groups()
        scale = _bytes_per_unit(prefix, binary, unit, text)
        value = _value(number, exponent) * scale
    if isinstance(text, bool) or not math.isfinite(value) or value <= 0:
        raise SpecError("a bandwidth must be positive", repr(text))
    return value


def fmt_bytes(size_bytes: float) -> str:
    """Capacity for people, in binary units: ``79.15 GiB``, ``512 B``."""
    for name, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {name}"
    return f"{size_bytes:.0f} B"


def fmt_bandwidth(bytes_per_s: float) -> str:
    """Bandwidth for people, in decimal bytes: ``25 GB/s``."""
    for name, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(bytes_per_s) >= scale:
            return f"{bytes_per_s / scale:.4g} {name}"
    return f"{bytes_per_s:.4g} B/s"


def fmt_flops(flops_per_s: float) -> str:
    """A compute rate for people: ``312 TFLOP/s``."""
    for name, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if abs(flops_per_s) >= scale:
            return f"{flops_per_s / scale:.4g} {name}"
    return f"{flops_per_s:.4g} FLOP/s"


def fmt_time(seconds: float) -> str:
    """Time for people: ``12.3 us``, ``4.56 ms``, ``2.00 s``, ``3 h 20 min``."""
    size = abs(seconds)
    if size >= 3600:
        hours, rest = divmod(round(size / 60), 60)
        return f"{'-' if seconds < 0 else ''}{hours} h {rest} min"
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    if size >= 1e-6 or size == 0:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e9:.1f} ns"
