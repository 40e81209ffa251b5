"""Steps of many microbatches from a few: once each further period of microbatches adds the same, the rest need not be played.

Three steps that differ by one period each are played. They are in a steady state if a longer one is a shorter one with a period
put in: on every lane the ops before it are at the same times, those after it later by one and the same time T, and so again from
the second to the third. Times are multiples of 2⁻⁴⁰ s and compared to the bit. The host of a lane launches what comes after the
cut later by T, too, or it is so far ahead, and does not fall back, that no op waits for its launch. Then nothing that decides
when an op starts changes with further periods. Otherwise the answer is None.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import ledger
from sim.pricing.block_costs import BlockCost
from sim.program import COMPUTE
from sim.timeline import Timeline

Floats = NDArray[np.float64]
Timelines = tuple[Timeline, Timeline, Timeline]


def extended(timelines: Timelines, periods: int) -> Timeline | None:
    """The timeline of a step that is `periods` longer than the last of three, or None where they are not in a steady state."""
    _, second, last = timelines
    if not _linear(timelines):
        return None
    events = last.events + periods * (last.events - second.events)
    return replace(last, events=events, before=second, periods=periods)


def _linear(timelines: Timelines) -> bool:
    """Whether everything that grows does so by the same from one to the next, and all hold the same."""
    if len({tuple(timeline.lanes) for timeline in timelines}) > 1 or timelines[0].resumptions:
        return False
    shift = timelines[2].step - timelines[1].step
    if not _even([timeline.step for timeline in timelines]) or not _even([float(timeline.events) for timeline in timelines]):
        return False
    pairs = pairwise(timelines)
    if not all(_period_put_in(*pair, lane, shift) for pair in pairs for lane in range(len(timelines[0].lanes))):
        return False
    works = [[(op.lane, op.op.stream, op.times) for op in timeline.distinct] for timeline in timelines]
    if len({len(each) for each in works}) > 1:
        return False
    for ops in zip(*works, strict=True):
        if len({op[:2] for op in ops}) > 1 or not _even([float(op[2]) for op in ops]):
            return False
    return all(_holds_the_same(timelines, lane) for lane in range(len(timelines[0].lanes)))


def _period_put_in(short: Timeline, long: Timeline, lane: int, shift: float) -> bool:
    """Whether a lane of a step is that of a shorter one with ops put in, after which everything is `shift` later."""
    old, new = _times(short, lane), _times(long, lane)
    count, more = len(old.start), len(new.start) - len(old.start)
    same = (old.start == new.start[:count]) & (old.end == new.end[:count])
    cut = max(0, min(count if same.all() else int(same.argmin()), count - more))  # a period at least comes after it
    after = slice(cut, count), slice(cut + more, count + more)
    moved = (new.start[after[1]] - old.start[after[0]] == shift) & (new.end[after[1]] - old.end[after[0]] == shift)
    late = new.launched[after[1]] - old.launched[after[0]]
    ahead = min(new.ahead[cut:].min(initial=0.0), old.ahead[cut:].min(initial=0.0)) >= 0
    hosted = (late == shift).all() or ((late <= shift).all() and ahead)
    return bool(more > 0 and moved.all() and hosted)


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


def _even(values: list[float]) -> bool:
    return values[2] - values[1] == values[1] - values[0]


def _holds_the_same(timelines: Timelines, lane: int) -> bool:
    """Whether a lane's memory has the same peaks in all, at times that move evenly."""
    books = [ledger(timeline, lane) for timeline in timelines]
    same = {(book.peak, book.reserved, book.when[1], tuple(book.at_peak.values())) for book in books}
    return len(same) == 1 and _even([book.when[0] for book in books])
