from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import SpecError
from cost_models.units import (
    GIB,
    fmt_bandwidth,
    fmt_bytes,
    fmt_flops,
    fmt_time,
    parse_bandwidth,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80_000_000_000),
        ("80GiB", 85_899_345_920),
        ("1Gib", 134_217_728),
        ("1Gb", 125_000_000),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("2 KiB", 2048),
        ("1kB", 1000),
        ("4096", 4096),
        ("16 bytes", 16),
        (2**31, 2**31),
        (0, 0),
    ],
)
def test_sizes_know_bits_from_bytes_and_powers_of_ten_from_two(
    text: str | int, size: int
) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gb/s", 50e9),
        ("400GB/s", 400e9),
        ("100Gbps", 12.5e9),
        ("10 Gbit/s", 1.25e9),
        ("1GiB/s", float(GIB)),
        ("2.5GT/s", None),
        (25e9, 25e9),
    ],
)
def test_bandwidths(text: str | float, rate: float | None) -> None:
    if rate is None:
        with pytest.raises(SpecError, match="not a bandwidth"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["", "GB", "80 G", "-1GB", "80iB", "1e999GB", "80XB"])
def test_a_size_that_is_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(SpecError):
        parse_bytes(text)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True])
def test_numbers_that_are_no_size(value: float) -> None:
    with pytest.raises(SpecError):
        parse_bytes(value)


@pytest.mark.parametrize("value", [0, -3.0, float("inf"), "0Gb/s", "400Gb", "fast"])
def test_what_is_no_bandwidth(value: float | str) -> None:
    with pytest.raises(SpecError):
        parse_bandwidth(value)


def test_formats_carry_their_unit() -> None:
    assert fmt_bytes(85_899_345_920) == "80.00 GiB"
    assert fmt_bytes(512) == "512 B"
    assert fmt_bandwidth(25e9) == "25 GB/s"
    assert fmt_bandwidth(12) == "12 B/s"
    assert fmt_flops(312e12) == "312 TFLOP/s"
    assert fmt_flops(10) == "10 FLOP/s"
    assert fmt_time(12.34e-6) == "12.3 us"
    assert fmt_time(4.56e-3) == "4.56 ms"
    assert fmt_time(2) == "2.00 s"
    assert fmt_time(12_000) == "3 h 20 min"
    assert fmt_time(5e-9) == "5.0 ns"


@given(st.text(max_size=40))
def test_any_text_is_a_size_or_a_spec_error(text: str) -> None:
    for parse in (parse_bytes, parse_bandwidth):
        try:
            value = parse(text)
        except SpecError:
            continue
        assert value >= 0


@given(st.integers(0, 10**6), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_binary_sizes_are_exact(count: int, unit: str) -> None:
    power = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert parse_bytes(f"{count}{unit}") == count * power
