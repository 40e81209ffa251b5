"""PipeDream: 1F1B that never drains. A stage goes on to the next microbatches after an update, so passes are of several versions.

Each microbatch goes back with the version of the parameters that it went forward with: versions are kept (weight stashing).
The step is `microbatches` of the steady state, which every stage works through without waiting for the pipeline to fill or drain:
four steps are played in a row, and the third is reported; on each stage it begins when its compute stream ends the second.
Where a stage limits the pace, every such step is alike; where transfers between stages do, steps differ by a few percent.
Losses of accuracy by staleness are not modelled; copies that make a version are free (the update writes to another place).
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.one_f_one_b import one_f_one_b
from strategies.schedules.order import Action

NOTE = "the step is one of a steady state: the pipeline is neither filled nor drained"


@schedule("pipedream", versions=lambda rank, ranks: ranks - rank, every_microbatch=True, notes=(f"pipedream: {NOTE}",))
def pipedream(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """An update after every microbatch; rank r keeps ranks − r versions. Narayanan et al. 2019, doi:10.1145/3341301.3359646."""
    return one_f_one_b(rank, ranks, microbatches, chunks)


@schedule("pipedream-2bw", versions=lambda rank, ranks: min(2, ranks), notes=(f"pipedream-2bw: {NOTE}",))
def pipedream_2bw(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Gradients of a step's microbatches, at least as many as ranks, are summed before an update; two versions suffice.

    Narayanan et al. 2021, arXiv:2006.09503, section 3.1 (double-buffered weight updates).
    """
    return one_f_one_b(rank, ranks, microbatches, chunks)
