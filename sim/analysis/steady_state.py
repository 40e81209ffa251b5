"""A step of many microbatches told from few: once each further period of them adds the same, the rest need not be played.

A moment is looked for at which the played step is in the state in which it was a period before: on every lane as many ops more
have started and ended as a period has, and what was under way shortly before either moment started, and ended, T earlier in the
one case than in the other. From that moment on a step of a period more does what the played one does T earlier, if what it has
left to do is the same. Programs repeat themselves from microbatch to microbatch (`sim.analysis.repetition`), and that of a longer
step only does so longer; of the order of passes `strategies.predict` knows it. Times are multiples of 2⁻⁴⁰ s and compared to the
bit.

"Shortly before" is as long as anything under way has been: the rates of transfers under way depend on what else was on their
links since they started.

The host of a lane launches what comes after the moment later by its own work on a period, H ≤ T. Where H = T launches move as all
else does. Where H < T no op from then on may begin or end when its launch lets it: launches come earlier by T − H beside the ops,
so that none does, and nothing that decides when an op starts changes. A host that ops hold up goes on when they are ready: there
launches, too, have to move by T. Where it is held up for the first time after the moment (for the norm of a step's gradients),
that is so of what it launches from then on, if it came there before they were ready.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import holds_the_same
from sim.analysis.repetition import PassesOfPeriod, Repetitions
from sim.clock import TICKS
from sim.op_columns import RepeatedCohort
from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.program import COMPUTE
from sim.timeline import Period, Resumption, Timeline

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
FEW = 2  # microbatches that follow those before them at one distance, at least
NEARER = 2.0  # distances of neighbours approach each other at least by this factor


def repeats(timeline: Timeline, period: int) -> bool:
    """Whether the last microbatches of the first lane's first chunk follow those `period` before them at one distance: a step in
    which they do not is in no steady state.
    """
    distance = _last_distances(timeline, period)
    return bool((distance == distance[-1:]).all())


def is_apart(timeline: Timeline, period: int) -> bool:
    """Whether the last microbatches of each lane of the first rank follow those `period` before them at one distance, not at the
    same on all lanes: replicas that an effect makes unlike wait for each other at the end of a step only, and are never in one
    steady state.
    """
    distances, lanes = set[float](), [number for number, lane in enumerate(timeline.lanes) if not lane.cohort]
    for lane in lanes if len(lanes) > 1 else ():
        distance = _last_distances(timeline, period, lane)
        if (distance != distance[-1:]).any():
            return False
        distances |= set(distance.tolist())
    return len(distances) > 1


def _last_distances(timeline: Timeline, period: int, lane: int = 0) -> Floats:
    """At which the last microbatches of a lane's first chunk follow those `period` before them."""
    starts = _starts(timeline, lane)
    return (starts[period:] - starts[:-period])[-max(period // 2, FEW) :]


def settles_after(timeline: Timeline) -> int | None:
    """After how many further microbatches each follows the one before it at one distance, if distances go on approaching each
    other by the factor by which they last did: where collectives slow down kernels that decide when they start, what an uneven
    beginning leaves gets smaller with every microbatch, and is nothing on the grid of times in the end. None: they do not.
    """
    changes = np.abs(np.diff(_starts(timeline), 2))[-3:] * TICKS
    if len(changes) < 3 or (changes < 1).any() or (NEARER * changes[1:] > changes[:-1]).any():
        return None
    return int(math.log(changes[2]) / math.log(changes[1] / changes[2])) + 1 + FEW


def _starts(timeline: Timeline, lane: int = 0) -> Floats:
    """When the microbatches of a lane's first chunk begin."""
    cohort, begin, first = timeline.cohort(lane), dict[int, float](), timeline.offset[lane]
    if isinstance(cohort, RepeatedCohort):
        return timeline.starts[first + cohort.columns.first_of_microbatches()]
    for op, start in zip(cohort.ops, timeline.start[first : first + cohort.count], strict=True):
        if op.stream == COMPUTE and op.microbatch >= 0 and op.chunk <= 0:
            begin.setdefault(op.microbatch, start)
    return np.array(list(begin.values()))


def last_period(timeline: Timeline, passes: Sequence[PassesOfPeriod]) -> Period | None:
    """The last period of a step in a steady state; None where it is in none. passes: of the period, on each pipeline rank."""
    repetitions = Repetitions.of(timeline.program, passes)
    moment = None if repetitions is None else _latest(_Columns(timeline, repetitions))
    if moment is None or not (moment.repeats() and moment.goes_on()):
        return None
    begin, end = moment.time - moment.shift, moment.time
    if not holds_the_same(timeline, begin, end):
        return None
    events = moment.events()
    return None if events is None else Period(end, moment.shift, events)


class _Columns:
    """The ops of all lanes of the played step, and by lane how they repeat themselves. more: by op, by how many ops the one is
    earlier that is a period before; first, last: those of the first and the last period of their lane; later: numbers of all but
    the first.
    """

    def __init__(self, timeline: Timeline, repetitions: Repetitions) -> None:
        self.timeline, self.repetitions = timeline, repetitions
        self.start, self.end, self.launched = timeline.starts, timeline.ends, np.array(timeline.launched)
        self.repetition = [repetitions.every[lane.cohort] for lane in timeline.lanes]
        sizes = [timeline.cohort(number).count for number in range(len(timeline.lanes))]
        self.more = np.repeat([each.more for each in self.repetition], sizes)
        place = np.arange(len(self.more)) - np.repeat(timeline.offset, sizes)
        self.first, self.last = place < self.more, place >= np.repeat(sizes, sizes) - self.more
        self.later = np.flatnonzero(~self.first)
        self.of_cohort: list[list[int]] = [[] for _ in timeline.program.cohorts]  # its lanes
        for number, lane in enumerate(timeline.lanes):
            self.of_cohort[lane.cohort].append(number)

    def part(self, lane: int) -> slice:
        """The ops of a lane."""
        first = self.timeline.offset[lane]
        return slice(first, first + self.timeline.cohort(lane).count)

    def is_period_later(self, flags: Flags, earlier: Flags) -> bool:
        """Whether the ops of `flags` are, on each lane, those of a whole period and, each a period later, those of `earlier`."""
        before = self.later - self.more[self.later]
        return bool(flags[self.first].all() and (flags[self.later] == earlier[before]).all() and not earlier[self.last].any())

    def soonest(self, number: int) -> float:
        """The soonest that an op of a lane begins that the played step or one of a period more does not have there."""
        cohort, offset = self.timeline.lanes[number].cohort, self.timeline.offset
        own, (more, _, end) = self.timeline.cohort(number), self.repetition[number]
        place, ends = number - self.of_cohort[cohort][0], self.timeline.end
        soonest = float(self.start[self.part(number)][end:].min(initial=np.inf))
        for numbers in op_index(own).streams.values():
            first = bisect_left(numbers, end - more)  # what the longer one has there does it `more` ops later
            if first == len(numbers):
                continue
            index, last = int(numbers[first]), bisect_left(numbers, end)
            time = ends[offset[number] + int(numbers[last - 1])] if last else 0.0
            waits = self.repetitions.waits(cohort, index) if index < end else None
            for awaited, op, moves in waits or [(*each, False) for each in own.waits(index)]:
                other = self.of_cohort[awaited][0] + place
                op += self.repetition[other].more if moves else 0
                # else that one comes later still
                time = max(time, ends[offset[other] + op] if op < self.repetition[other].end else np.inf)
            soonest = min(soonest, time)
        return soonest


def _latest(columns: _Columns) -> _Moment | None:
    """The latest moment up to which a step of a period more does what the played one does; None: it comes too early."""
    time = min(map(columns.soonest, range(len(columns.repetition))))
    start, more = columns.start[columns.part(0)], columns.repetition[0].more
    started = np.flatnonzero(start < time)
    last = int(started[start[started].argmax()]) if len(started) else -1
    if last < more:
        return None
    shift = float(start[last] - start[last - more])
    return _Moment(columns, time, shift) if 0 < shift <= time else None


class _Moment:
    """`time`: the played step is supposed to be in the state in which it was `shift` before."""

    def __init__(self, columns: _Columns, time: float, shift: float) -> None:
        self.columns, self.timeline, self.repetitions = columns, columns.timeline, columns.repetitions
        self.time, self.shift = time, shift

    # -- the same state --------------------------------------------------------------------------------------------------

    def repeats(self) -> bool:
        """Whether everything under way, and all that has started and ended, is as it was `shift` before."""
        return self._is_as_before(max(self._age(self.time), self._age(self.time - self.shift))) and self._is_launched()

    def _age(self, time: float) -> float:
        """For how long the oldest op that is under way at `time` has been."""
        start = self.columns.start
        return max(0.0, time - float(start[(start < time) & (self.columns.end >= time)].min(initial=np.inf)))

    def _is_as_before(self, age: float) -> bool:
        columns, time, before = self.columns, self.time, self.time - self.shift
        start, end = columns.start, columns.end
        started, ended = start < time, end < time
        if not columns.is_period_later(started, start < before) or not columns.is_period_later(ended, end < before):
            return False
        now = np.flatnonzero(started & (end >= time - age))
        then = np.flatnonzero((start < before) & (end >= before - age))
        if len(now) != len(then) or (now != then + columns.more[then]).any() or (start[now] - start[then] != self.shift).any():
            return False
        return not (end[now] - end[then] != self.shift)[ended[now]].any()

    def _is_launched(self) -> bool:
        """Whether the host of each lane goes on as all else does, or is ahead of it from now on."""
        columns = self.columns
        begun = columns.start < self.time
        for lane, repetition in enumerate(columns.repetition):
            part, held = columns.part(lane), self._held(lane)
            last = part.start + int(np.flatnonzero(begun[part])[-1])
            late = float(columns.launched[last] - columns.launched[last - repetition.more])
            before = [op for op, resumption in held.items() if resumption.time < self.time]
            if before:
                earlier = held.get(before[-1] - repetition.more)
                late = held[before[-1]].time - earlier.time if earlier is not None else np.inf
            if late != self.shift and (late > self.shift or before or not self._is_ahead(lane, held)):
                return False
        return True

    def _held(self, lane: int) -> dict[int, Resumption]:
        """When the host of a lane went on, by the op that held it up."""
        resumptions, part = self.timeline.resumptions, self.columns.part(lane)
        return {op: resumptions[op] for op in range(part.start, part.stop) if op in resumptions} if resumptions else {}

    def _is_ahead(self, lane: int, held: dict[int, Resumption]) -> bool:
        """Whether no op of a lane that has not ended a period before starts or ends when its launch lets it, until one holds up
        its host, which is there before.
        """
        index, columns, first = op_index(self.timeline.cohort(lane)), self.columns, self.timeline.offset[lane]
        op, resumption = next(iter(held.items()), (len(columns.start), None))
        if resumption is not None and resumption.time <= resumption.busy:
            return False
        costs = [self.timeline.cost[first + number] for number, _, _ in index.works]
        later = np.array([cost.critical - cost.busy if isinstance(cost, BlockCost) else 0.0 for cost in costs])[index.work]
        is_block = np.array([isinstance(cost, BlockCost) for cost in costs])[index.work]
        start, launched = columns.start[first + index.ops], columns.launched[first + index.ops]
        late = np.where(is_block, launched + later > start, launched >= start)
        left = (columns.end[first + index.ops] >= self.time - self.shift) & (first + index.ops < op)
        return not (late & left).any()

    # -- the same program --------------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether a longer step has left to do now what the played one had left `shift` before."""
        left = self.columns.start >= self.time - self.shift
        for cohort, numbers in enumerate(self.columns.of_cohort):
            more, begin, end = self.repetitions.every[cohort]
            later = [np.flatnonzero(left[self.columns.part(number)]) for number in numbers]
            first = min((int(each[0]) for each in later if len(each)), default=end)
            if first + more < begin or not self._waits_for_the_same(
                cohort, range(max(begin, min(first + more, end - more)), end)
            ):
                return False
        return True

    def _waits_for_the_same(self, cohort: int, ops: range) -> bool:
        """Whether ops wait for what those before them wait for, a period later, or for what has ended in both."""
        before, offset = self.time - self.shift, self.timeline.offset
        stays = self.repetitions.stays(cohort, ops)
        return stays is not None and not any(
            self.timeline.end[offset[lane] + op] >= before for awaited, op in stays for lane in self.columns.of_cohort[awaited]
        )

    def events(self) -> int | None:
        """How many events a period takes; None where that cannot be said: something contends for the first time in it."""
        if self.timeline.contended >= self.time:
            return sum(repetition.more for repetition in self.columns.repetition)
        if self.timeline.contended > self.time - self.shift:
            return None
        scheduled = np.array(self.timeline.scheduled)
        return int(((scheduled >= self.time - self.shift) & (scheduled < self.time)).sum())
