"""1F1B (PipeDream-Flush): at most ranks − rank microbatches in flight. Narayanan et al. 2021, arXiv:2104.04473, figure 4."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from strategies.schedules import schedule
from strategies.schedules.order import Action, passes


@schedule("1f1b")
def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Warm up with ranks − rank − 1 forwards, then alternate one forward and one backward, then drain."""
    warm_up = min(ranks - rank - 1, microbatches)
    forward, backward = passes("F", microbatches), passes("B", microbatches)
    turns = chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    return chain(forward[:warm_up], turns, backward[microbatches - warm_up :])
