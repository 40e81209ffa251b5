"""A step of many microbatches told from few: once each further period of them adds the same, the rest need not be played.

Two steps that differ by one period are looked at. The longer one may follow from the shorter one (`sim.analysis.longer_step`).
Where both were played, they are in a steady state if the longer one is the shorter one with a period put in: on every lane the
ops before it are at the same times, those after it later by one and the same time T; and if the period that was put in repeats
the one before it, T later. Times are multiples of 2⁻⁴⁰ s and compared to the bit. Otherwise the answer is None.

The host of a lane launches what comes after the cut later by its own work on a period, H ≤ T. Where H = T launches move as all
else does. Where H < T no op begins or ends when its launch lets it: it would have moved by H only. Each further period puts
launches earlier by T − H beside the ops, so that none ever does, and nothing that decides when an op starts changes. A host
that ops hold up goes on when they are ready: there launches, too, have to move by T.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import peak
from sim.clock import TICKS
from sim.program import COMPUTE
from sim.timeline import Timeline

Floats = NDArray[np.float64]
FEW = 2  # microbatches that follow those before them at one distance, at least
NEARER = 2.0  # distances of neighbours approach each other at least by this factor


def repeats(timeline: Timeline, period: int) -> bool:
    """Whether the last microbatches of the first lane's first chunk follow those `period` before them at one distance: a step in
    which they do not is in no steady state.
    """
    starts = _starts(timeline)
    distance = starts[period:] - starts[:-period]
    return bool((distance[-max(period // 2, FEW) :] == distance[-1:]).all())


def settles_after(timeline: Timeline) -> int | None:
    """After how many further microbatches each follows the one before it at one distance, if distances go on approaching each
    other by the factor by which they last did: where collectives slow down kernels that decide when they start, what an uneven
    beginning leaves gets smaller with every microbatch, and is nothing on the grid of times in the end. None: they do not.
    """
    changes = np.abs(np.diff(_starts(timeline), 2))[-3:] * TICKS
    if len(changes) < 3 or (changes < 1).any() or (NEARER * changes[1:] > changes[:-1]).any():
        return None
    return int(math.log(changes[2]) / math.log(changes[1] / changes[2])) + 1 + FEW


def _starts(timeline: Timeline) -> Floats:
    """When the microbatches of the first lane's first chunk begin."""
    ops, begin = timeline.cohort(0).ops, dict[int, float]()
    for op, start in zip(ops, timeline.start[: len(ops)], strict=True):
        if op.stream == COMPUTE and op.microbatch >= 0 and op.chunk <= 0:
            begin.setdefault(op.microbatch, start)
    return np.array(list(begin.values()))


def extended(short: Timeline, long: Timeline, periods: int, follows: bool = False) -> Timeline | None:
    """The timeline of a step that is `periods` longer than `long`, which is one longer than `short`; None where they are not in a
    steady state. follows: the longer one was not played, it follows from the shorter one.
    """
    if short.lanes != long.lanes:
        return None
    shift = long.step - short.step
    for lane in range(len(long.lanes)):
        if not ((follows or _period_put_in(short, long, lane, shift)) and _holds_the_same(short, long, lane, shift)):
            return None
    works = [[(op.lane, op.op.stream) for op in timeline.distinct] for timeline in (short, long)]
    if works[0] != works[1]:
        return None
    result = replace(long, events=long.events + periods * (long.events - short.events), before=short, periods=periods)
    result.peaks = long.peaks
    return result


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
    tail = _later(old, slice(cut, count), new, slice(cut + more, count + more), shift)
    repeated = _later(new, slice(cut - more, cut), new, slice(cut, cut + more), shift)
    if long.resumptions:
        late = new.launched[cut:] - np.concatenate([new.launched[cut - more : cut], old.launched[cut:]])
        if (late != shift).any():
            return False
    works = [op.work for op in long.cohort(lane).ops[cut - more : cut + more]]
    return tail and repeated and works[:more] == works[more:]


def _later(before: _Times, ops: slice, after: _Times, others: slice, shift: float) -> bool:
    """Whether ops start and end `shift` later, and are launched no more than that later."""
    moved = (after.start[others] - before.start[ops] == shift) & (after.end[others] - before.end[ops] == shift)
    return bool(moved.all() and (after.launched[others] - before.launched[ops] <= shift).all())


class _Times(NamedTuple):
    """Of the ops of one lane: when they start and end and are launched."""

    start: Floats
    end: Floats
    launched: Floats


def _times(timeline: Timeline, lane: int) -> _Times:
    first = timeline.offset[lane]
    part = slice(first, first + len(timeline.cohort(lane).ops))
    return _Times(*(np.array(times[part]) for times in (timeline.start, timeline.end, timeline.launched)))


def _holds_the_same(short: Timeline, long: Timeline, lane: int, shift: float) -> bool:
    """Whether a lane's memory has the same peaks in both, before the period that was put in or after it."""
    before, after = peak(short, lane), peak(long, lane)
    return after._replace(time=before.time) == before and after.time - before.time in (0.0, shift)
