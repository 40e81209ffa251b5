"""Quantities with units, parsed at the door: inside the code there are only bytes, seconds, FLOP/s and bytes per second.

`"400 Gb/s"` is 50e9 bytes per second, `"80 GiB"` is 85899345920 bytes, `"1.2 us"` is 1.2e-6 seconds. A bare number where a
unit is needed is an error, because GB/s against GiB/s against Gb/s is this field's recurring bug. Bandwidths are per direction.
Prefixes are SI (k, M, G = powers of 1000) and IEC (Ki, Mi, Gi = powers of 1024).

A quantity is nothing or lies between what is slower or smaller, and what is faster or larger, than any hardware that trains: 1 B
to 1 EB; 1 kB/s to 1 EB/s (a wafer's memories reach 20 PB/s); at most 10⁶ s; 1 MFLOP/s to 1 ZFLOP/s. Beyond, it is a mistake.
"""

from __future__ import annotations

from string import ascii_letters
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field
from quantiphy import Quantity

# unit spelt by the user -> factor to the unit used inside
_BYTES = {"B": 1.0, "b": 0.125, "byte": 1.0, "bytes": 1.0, "bit": 0.125, "bits": 0.125}
_RATES = {f"{unit}{per}": factor for unit, factor in _BYTES.items() for per in ("/s", "ps")}
_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0}
_LONG = {"minute": 60.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0, "week": 604800.0, "year": 3.15576e7}
_LONG |= {f"{name}s": factor for name, factor in _LONG.items() if len(name) > 1}
_WORDS = ("min", "h", *_LONG)
_FLOPS = {"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0, "flop/s": 1.0, "flops": 1.0}


LONGEST = 64  # letters of a quantity


class _Kind(NamedTuple):
    """A quantity: its units, an example, and its least (besides 0) and largest value."""

    units: dict[str, float]
    example: str
    least: float
    most: float
    unit: str


_SIZE = _Kind(_BYTES, "80 GiB", 1.0, 1e18, "B")
_RATE = _Kind(_RATES, "400 Gb/s", 1e3, 1e18, "B/s")
_TIME = _Kind(_SECONDS, "1.2 us", 0.0, 1e6, "s")
_DURATION = _Kind(_SECONDS | _LONG, "100 days", 0.0, 1e11, "s")
_WORK = _Kind(_FLOPS, "312 TFLOP/s", 1e6, 1e21, "FLOP/s")
_POWER = _Kind({"W": 1.0}, "500 kW", 0.1, 1e12, "W")


def _parse(text: object, kind: _Kind) -> float:
    units, example = kind.units, kind.example
    if not isinstance(text, str):
        raise ValueError(f"needs a unit, such as '{example}'")
    refused = ValueError(f"is not a quantity with a unit, such as '{example}'")
    if "," in text or len(text) > LONGEST:  # 400,0 Gb/s would be read as 4000 Gb/s
        raise refused
    number = text.strip().rstrip(ascii_letters)
    word = text.strip().removeprefix(number)
    try:
        # words that begin like a prefix are no units with one: "10 min" would be ten thousandths of an inch
        quantity = Quantity(float(number), units=word) if word in _WORDS else Quantity(text, binary=True)
    except ValueError:  # also quantiphy's InvalidNumber
        raise refused from None
    if not quantity.units:
        raise ValueError(f"needs a unit, such as '{example}'")
    if quantity.units not in units:
        raise refused
    value = float(quantity) * units[quantity.units]
    if 0 < value < 0.1 and kind.unit != "s":  # 400 mb/s is milli
        raise refused
    if not 0 <= value < float("inf"):
        raise ValueError("must be finite and not negative")
    if value and not kind.least <= value <= kind.most:
        raise ValueError(f"must be from {show(kind.least, kind.unit)} to {show(kind.most, kind.unit)}: there is no such hardware")
    return value


def size(text: object) -> float:
    """Bytes in `"80 GiB"`, `"25 MB"`."""
    return _parse(text, _SIZE)


def rate(text: object) -> float:
    """Bytes per second, one direction, in `"400 Gb/s"`, `"450 GB/s"`."""
    return _parse(text, _RATE)


def seconds(text: object) -> float:
    """Seconds in `"1.2 us"`, `"3 ms"`."""
    return _parse(text, _TIME)


def duration(text: object) -> float:
    """Seconds of what may take years: `"20 min"`, `"100 days"`, a mean time between failures."""
    return _parse(text, _DURATION)


def flops(text: object) -> float:
    """Floating-point operations per second in `"312 TFLOP/s"`."""
    return _parse(text, _WORK)


_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def count(text: str) -> float:
    """A number of things as people write it: `15e12`, `15T`, `300B`. Raises ValueError."""
    digits = text.strip().rstrip("".join(_COUNTS))
    scale = text.strip()[len(digits) :].strip()
    try:
        return float(digits) * _COUNTS[scale]
    except (ValueError, KeyError):
        raise ValueError("is no number such as 15e12, 15T or 300B") from None


Bytes = Annotated[float, BeforeValidator(size)]
BytesPerSecond = Annotated[float, BeforeValidator(rate)]
Seconds = Annotated[float, BeforeValidator(seconds)]
FlopsPerSecond = Annotated[float, BeforeValidator(flops)]


def show(value: float, unit: str, digits: int = 4, zeros: bool = False) -> str:
    """A quantity for people: `show(0.01234, "s") == "12.34 ms"`; bytes use SI prefixes, as GB = 1e9 bytes everywhere.

    zeros: as many digits also where the last are zeros, as in a column of measured numbers.
    """
    text = str(Quantity(value, unit).render(prec=digits - 1, strip_zeros=not (zeros and value)))
    return text.replace("us", "µs") if unit == "s" else text


def watts(text: object) -> float:
    """Watts in `"700 W"`, `"20 MW"`."""
    return _parse(text, _POWER)


def elements(value: object) -> object:
    """5e8, which is a text to YAML, as a whole number; anything else as it is."""
    try:
        return int(float(value)) if isinstance(value, str) and len(value) < LONGEST and float(value).is_integer() else value
    except ValueError:
        return value


ELEMENTS = 10**15  # a hundred times the parameters of the largest models
Elements = Annotated[int, Field(gt=0, le=ELEMENTS), BeforeValidator(elements)]
ElementsOrZero = Annotated[int, Field(ge=0, le=ELEMENTS), BeforeValidator(elements)]
