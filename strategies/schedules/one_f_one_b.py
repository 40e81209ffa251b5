"""1F1B (PipeDream-Flush): at most ranks − rank microbatches in flight. Narayanan et al. 2021, arXiv:2104.04473, figure 4."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from strategies.schedules import schedule
from strategies.schedules.order import Action, passes


@schedule("1f1b")
def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Warm up with ranks − rank − 1 forwards, then alternate one forward and one backward, then drain."""
    warm_up = min(ranks - rank - 1, microbatches)
    turns = zip(passes("F", microbatches, first=warm_up), passes("B", microbatches), strict=False)
    drain = passes("B", microbatches, first=microbatches - warm_up)
    return chain(islice(passes("F", microbatches), warm_up), chain.from_iterable(turns), drain)
