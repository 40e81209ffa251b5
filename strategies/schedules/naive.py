"""Naive model parallelism: one microbatch goes all the way forward and back before the next starts; one stage works at a time."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.order import Action


@schedule("naive")
def naive(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Forward and backward of each microbatch in turn."""
    for microbatch in range(microbatches):
        yield Action("F", microbatch)
        yield Action("B", microbatch)
