"""A step of many microbatches told from few: once each further period of them adds the same, the rest need not be played.

Two steps that differ by one period are played. They are in a steady state if the longer one is the shorter one with a period put
in: on every lane the ops before it are at the same times, those after it later by one and the same time T; and if the period that
was put in repeats the one before it, T later. Times are multiples of 2⁻⁴⁰ s and compared to the bit. The host of a lane launches
what comes after the cut later by T, too, or it is so far ahead, and does not fall back, that no op waits for its launch. Then
nothing that decides when an op starts changes with further periods. Otherwise the answer is None.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import ledger
from sim.pricing.block_costs import BlockCost
from sim.program import COMPUTE
from sim.timeline import Timeline

Floats = NDArray[np.float64]


def extended(short: Timeline, long: Timeline, periods: int) -> Timeline | None:
    """The timeline of a step that is `periods` longer than `long`, which is one longer than `short`; None where they are not in a
    steady state.
    """
    if short.lanes != long.lanes or short.resumptions:
        return None
    shift = long.step - short.step
    for lane in range(len(long.lanes)):
        if not (_period_put_in(short, long, lane, shift) and _holds_the_same(short, long, lane, shift)):
            return None
    works = [[(op.lane, op.op.stream) for op in timeline.distinct] for timeline in (short, long)]
    if works[0] != works[1]:
        return None
    return replace(long, events=long.events + periods * (long.events - short.events), before=short, periods=periods)


def _period_put_in(short: Timeline, long: Timeline, lane: int, shift: float) -> bool:
    """Whether a lane of a step is that of a shorter one with ops put in, which repeat those before them, and after which
    everything is `shift` later.
    """
    old, new = _times(short, lane), _times(long, lane)
    count, more = len(old.start), len(new.start) - len(old.start)
    same = (old.start == new.start[:count]) & (old.end == new.end[:count])
    cut = max(0, min(count if same.all() else int(same.argmin()), count - more))  # a period at least comes after it
    if more <= 0 or cut < more:
        return False
    ahead = min(new.ahead[cut - more :].min(initial=0.0), old.ahead[cut:].min(initial=0.0)) >= 0
    tail = _later(old, slice(cut, count), new, slice(cut + more, count + more), shift, ahead)
    repeated = _later(new, slice(cut - more, cut), new, slice(cut, cut + more), shift, ahead)
    works = [op.work for op in long.cohort(lane).ops[cut - more : cut + more]]
    return tail and repeated and works[:more] == works[more:]


def _later(before: _Times, ops: slice, after: _Times, others: slice, shift: float, ahead: bool) -> bool:
    """Whether ops start and end `shift` later, and are launched so much later, or no more where hosts are ahead."""
    moved = (after.start[others] - before.start[ops] == shift) & (after.end[others] - before.end[ops] == shift)
    late = after.launched[others] - before.launched[ops]
    return bool(moved.all() and ((late == shift).all() or ((late <= shift).all() and ahead)))


class _Times(NamedTuple):
    """Ops of one lane: when they start and end and are launched; ahead: seconds between their launch, for a block that of the
    kernel that may come too late, and the end of the kernels before.
    """

    start: Floats
    end: Floats
    launched: Floats
    ahead: Floats


def _times(timeline: Timeline, lane: int) -> _Times:
    first, ops = timeline.offset[lane], timeline.cohort(lane).ops
    part = slice(first, first + len(ops))
    start, end, launched = (np.array(times[part]) for times in (timeline.start, timeline.end, timeline.launched))
    costs = timeline.cost[part]
    late = np.array([cost.critical - cost.busy if isinstance(cost, BlockCost) else 0.0 for cost in costs])
    compute = np.array([op.stream == COMPUTE for op in ops])
    idle = np.concatenate([[0.0], np.maximum.accumulate(np.where(compute, end, 0.0))[:-1]])  # since when, before each op
    return _Times(start, end, launched, np.where([isinstance(cost, BlockCost) for cost in costs], start, idle) - launched - late)


def _holds_the_same(short: Timeline, long: Timeline, lane: int, shift: float) -> bool:
    """Whether a lane's memory has the same peaks in both, before the period that was put in or after it."""
    books = [ledger(timeline, lane) for timeline in (short, long)]
    same = {(book.peak, book.reserved, book.when[1], tuple(book.at_peak.values())) for book in books}
    return len(same) == 1 and books[1].when[0] - books[0].when[0] in (0.0, shift)
