"""Measured prices of collectives as tables, for machines whose library does not follow a formula (gloo: knees at 1 to 4 and at 32
to 64 MiB). A table is of one operation among as many ranks on as many nodes, and says nothing of others.

It carries two prices: back to back, as benchmarks time it, and in a step, between pieces of compute, which is what the simulation
pays. They differ two to three times where communication takes the cores that compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from typing import Annotated

from pydantic import Field, model_validator

from topologies.documents.units import Bytes, BytesPerSecond, Seconds
from topologies.reading import Config

Positive = Annotated[Seconds, Field(gt=0)]


class Entry(Config):
    """The prices of one size of the full buffer S."""

    bytes: Bytes
    step: Positive  # between pieces of compute, waiting for the others included
    alone: Positive  # back to back


def _check_ascending(prices: Sequence[Entry] | Sequence[Timed], of: str) -> None:
    sizes = [entry.bytes for entry in prices]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"tables: {of}: bytes must ascend")


class CollectiveTable(Config):
    """Prices of `operation` among `ranks` ranks on `nodes` nodes, by size."""

    operation: str
    algorithm: str  # that the library runs: says which links carry how much
    ranks: int = Field(ge=2, le=2**20)
    nodes: int = Field(1, ge=1, le=2**20)
    prices: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> CollectiveTable:
        _check_ascending(self.prices, f"{self.operation} of {self.ranks} ranks")
        return self

    def covers(self, size: float) -> bool:
        """Whether `size` lies among the measured ones, as far as it matters: below them it is the latency that counts."""
        return size <= self.prices[-1].bytes

    def seconds(self, size: float, alone: bool = False) -> float:
        """Interpolated in the logarithms of bytes and seconds; below the smallest size its price, above the largest its rate."""
        return interpolated([(entry.bytes, entry.alone if alone else entry.step) for entry in self.prices], size)

    def working(self, size: float, more: float = 0.0) -> float:
        """Part of a collective's time in a step in which it moves data, or adds up for `more` seconds; measured back to back, no
        rank is late.
        """
        return min(1.0, (self.seconds(size, alone=True) + more) / (self.seconds(size) + more))


class Timed(Config):
    """Seconds of one size."""

    bytes: Bytes
    seconds: Positive


class OperatorTable(Config):
    """Prices of one operator on one device, by the bytes that it reads and writes."""

    prices: tuple[Timed, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> OperatorTable:
        _check_ascending(self.prices, "an operator")
        return self

    def seconds(self, size: float) -> float:
        """Interpolated as in `interpolated`."""
        return interpolated([(entry.bytes, entry.seconds) for entry in self.prices], size)


def interpolated(prices: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds of `size` bytes, in the logarithms of both between ascending (bytes, seconds); below the smallest size its price,
    above the largest its rate.
    """
    at = bisect_right(prices, size, key=lambda entry: entry[0])
    if at == 0:
        return prices[0][1]
    low, before = prices[at - 1]
    if at == len(prices):
        return before * (size / low if low else 1.0)
    high, after = prices[at]
    share = log(size / low) / log(high / low) if low else size / high
    return exp((1 - share) * log(before) + share * log(after))


class Wrapping(Config):
    """What PyTorch's own wrapper (DDP, FSDP2, DTensor) adds to a collective: host time, and copies in and out of its buffer."""

    fixed: Seconds
    rate: Annotated[BytesPerSecond, Field(gt=0)] = float("inf")  # bytes of the full buffer that it copies per second

    def seconds(self, size: float) -> float:
        """For a full buffer of `size` bytes."""
        return self.fixed + size / self.rate
