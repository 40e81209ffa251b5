"""Quantities as people write and read them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from topologies.documents.units import duration, flops, rate, seconds, show, size, watts


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (size, "80 GiB", 80 * 2.0**30),
        (size, "25MB", 25e6),
        (size, " 1_000 kb ", 125e3),
        (size, "1e9 bytes", 1e9),
        (rate, "400 Gb/s", 50e9),
        (rate, "450\u00a0GB/s", 450e9),
        (rate, "1.5 TBps", 1.5e12),
        (seconds, "1.2 us", 1.2e-6),
        (seconds, "1.2µs", 1.2e-6),
        (seconds, ".5 ms", 0.5e-3),
        (seconds, "5. s", 5.0),
        (duration, "10 min", 600.0),
        (duration, "10min", 600.0),
        (duration, "2 h", 7200.0),
        (duration, "3 days", 259200.0),
        (duration, "1 year", 3.15576e7),
        (flops, "312 TFLOP/s", 312e12),
        (flops, "1 PFLOPS", 1e15),
        (watts, "500 kW", 5e5),
        (watts, "0 W", 0.0),
    ],
)
def test_what_people_write(parse: Callable[[object], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (size, 80, "needs a unit"),
        (size, "80", "needs a unit"),
        (size, "80 G", "needs a unit"),
        (size, "80 Gi", "needs a unit"),
        (size, "80 GX", "is not a quantity"),
        (size, "80 gB", "is not a quantity"),
        (size, "80 GiiB", "is not a quantity"),
        (size, "80 G B", "is not a quantity"),
        (size, "1e9 GB", "is not a quantity"),
        (size, "1__0e GB", "is not a quantity"),
        (size, "_1 GB", "is not a quantity"),
        (size, "1_ GB", "is not a quantity"),
        (size, ". GB", "is not a quantity"),
        (size, "nan GB", "is not a quantity"),
        (size, "1" * 64 + " B", "is not a quantity"),
        (size, "-1 GB", "must be finite and not negative"),
        (size, "1e999 B", "must be finite and not negative"),
        (size, "2 EB", "must be from 1 B to 1e18 B"),
        (rate, "400,0 Gb/s", "is not a quantity"),
        (rate, "400 mb/s", "is not a quantity"),
        (rate, "400 GB", "is not a quantity"),
        (seconds, "5 m", "needs a unit"),
    ],
)
def test_what_is_no_quantity(parse: Callable[[object], float], text: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.01234, "s", "12.34 ms"),
        (0.0123456, "s", "12.35 ms"),
        (0.9999999, "s", "1 s"),
        (1.2e-6, "s", "1.2 µs"),
        (2.5e-5, "W", "25 uW"),
        (0.0, "s", "0 s"),
        (-0.0, "s", "0 s"),
        (-1500.0, "B", "-1.5 kB"),
        (50e9, "B/s", "50 GB/s"),
        (123456.0, "B", "123.5 kB"),
        (1e15, "FLOP/s", "1e15 FLOP/s"),
        (1e-20, "s", "10e-21 s"),
        (math.inf, "s", "inf s"),
        (64000.0, "", "64k"),
        (1.0, "", "1"),
        (1e15, "", "1e15"),
    ],
)
def test_what_people_read(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_zeros_and_digits() -> None:
    assert show(1.5, "s", zeros=True) == "1.500 s"
    assert show(150.0, "s", digits=3, zeros=True) == "150 s"
    assert show(15.0, "s", digits=1) == "20 s"
    assert show(0.0, "s", zeros=True) == "0 s"
