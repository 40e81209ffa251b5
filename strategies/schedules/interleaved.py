"""Interleaved 1F1B: every rank has v chunks, which shortens the bubble to (p − 1)/(v·m) of the ideal time.

Narayanan et al. 2021, arXiv:2104.04473, section 2.2. Microbatches go in rounds of `ranks` (fewer when there are fewer): a round
passes chunk 0, then chunk 1, …; backward passes take the chunks in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.order import Action
from topologies.reading import UserError


def passes(ranks: int, microbatches: int, chunks: int, backward: bool) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward or backward pass of a rank, in order."""
    rounds = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, rounds)
    if rest:
        raise UserError(f"plan: an interleaved schedule needs a multiple of pp={ranks} microbatches, and has {microbatches}")
    order = range(chunks - 1, -1, -1) if backward else range(chunks)
    return [(turn * size + i, chunk) for turn in range(rounds) for chunk in order for i in range(size)]


@schedule("interleaved", chunks=None)
def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Warm up, one forward and one backward in turns, drain."""
    forward, backward = (passes(ranks, microbatches, chunks, back) for back in (False, True))
    size = microbatches // max(1, microbatches // ranks)
    warm_up = min((chunks - 1) * size + 2 * (ranks - 1 - rank), len(forward))
    for microbatch, chunk in forward[:warm_up]:
        yield Action("F", microbatch, chunk)
    for front, back in zip(forward[warm_up:], backward, strict=False):
        yield Action("F", *front)
        yield Action("B", *back)
    for back in backward[len(forward) - warm_up :]:
        yield Action("B", *back)
