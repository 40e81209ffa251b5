"""Measured prices of collectives as tables, for machines whose library does not follow a formula (gloo: knees at 1 to 4 and at 32
to 64 MiB). A table is of one operation among as many ranks on as many nodes, and says nothing of others.

It carries two prices: back to back, as benchmarks time it, and in a step, between pieces of compute, which is what the simulation
pays. They differ two to three times where communication takes the cores that compute.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log
from typing import Annotated

from pydantic import Field, model_validator

from topologies.reading import Config
from topologies.units import Bytes, BytesPerSecond, Seconds

Positive = Annotated[Seconds, Field(gt=0)]


class Entry(Config):
    """The prices of one size of the full buffer S."""

    bytes: Bytes
    step: Positive  # between pieces of compute, waiting for the others included
    alone: Positive  # back to back


class CollectiveTable(Config):
    """Prices of `operation` among `ranks` ranks on `nodes` nodes, by size."""

    operation: str
    algorithm: str  # that the library runs: says which links carry how much
    ranks: int = Field(ge=2)
    nodes: int = Field(1, ge=1)
    prices: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> CollectiveTable:
        sizes = [entry.bytes for entry in self.prices]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"tables: {self.operation} of {self.ranks} ranks: bytes must ascend")
        return self

    def covers(self, size: float) -> bool:
        """Whether `size` lies among the measured ones, as far as it matters: below them it is the latency that counts."""
        return size <= self.prices[-1].bytes

    def seconds(self, size: float, alone: bool = False) -> float:
        """Interpolated in the logarithms of bytes and seconds; below the smallest size its price, above the largest its rate."""
        times = [entry.alone if alone else entry.step for entry in self.prices]
        at = bisect_right(self.prices, size, key=lambda entry: entry.bytes)
        if at == 0:
            return times[0]
        if at == len(times):
            last = self.prices[-1].bytes
            return times[-1] * (size / last if last else 1.0)
        low, high = self.prices[at - 1].bytes, self.prices[at].bytes
        share = log(size / low) / log(high / low) if low else (size - low) / (high - low)
        return exp((1 - share) * log(times[at - 1]) + share * log(times[at]))


class Wrapping(Config):
    """What PyTorch's own wrapper (DDP, FSDP2, DTensor) adds to a collective: host time, and copies in and out of its buffer."""

    fixed: Seconds
    rate: Annotated[BytesPerSecond, Field(gt=0)] = float("inf")  # bytes of the full buffer that it copies per second

    def seconds(self, size: float) -> float:
        """For a full buffer of `size` bytes."""
        return self.fixed + size / self.rate
