"""GPipe: all microbatches forward, then all backward; every stage holds all of them. Huang et al. 2019, arXiv:1811.06965."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from strategies.schedules import schedule
from strategies.schedules.order import Action, passes


@schedule("gpipe")
def gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """All forwards, then all backwards, both in order."""
    return chain(passes("F", microbatches), passes("B", microbatches))


@schedule("looped-bfs", chunks=None)
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """GPipe over several chunks per rank, breadth first: all microbatches through a chunk before the next chunk.

    Lamy-Poirier 2023, arXiv:2211.05953; backward in the reverse order.
    """
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield Action("F", microbatch, chunk)
    for chunk in reversed(range(chunks)):
        for microbatch in reversed(range(microbatches)):
            yield Action("B", microbatch, chunk)
