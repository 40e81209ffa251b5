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
launches, too, have to move by T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import holds_the_same
from sim.analysis.repetition import PassesOfPeriod, Repetition, Repetitions
from sim.clock import TICKS
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


def last_period(timeline: Timeline, passes: Sequence[PassesOfPeriod]) -> Period | None:
    """The last period of a step in a steady state; None where it is in none. passes: of the period, on each pipeline rank."""
    repetitions = Repetitions.of(timeline.program, passes)
    moment = None if repetitions is None else _latest(timeline, repetitions)
    if moment is None or not (moment.repeats() and moment.goes_on()):
        return None
    begin, end = moment.time - moment.shift, moment.time
    if not holds_the_same(timeline, begin, end):
        return None
    events = moment.events()
    return None if events is None else Period(end, moment.shift, events)


def _latest(timeline: Timeline, repetitions: Repetitions) -> _Moment | None:
    """The latest moment up to which a step of a period more does what the played one does; None: it comes too early."""
    lanes = [_Lane.of(timeline, number, repetitions.every[lane.cohort]) for number, lane in enumerate(timeline.lanes)]
    of_cohort: list[list[int]] = [[] for _ in timeline.program.cohorts]  # its lanes
    for number, lane in enumerate(timeline.lanes):
        of_cohort[lane.cohort].append(number)
    time = min(_soonest(timeline, repetitions, lanes, of_cohort, number) for number in range(len(lanes)))
    started = np.flatnonzero(lanes[0].start < time)
    last, more = (int(started[lanes[0].start[started].argmax()]) if len(started) else -1), lanes[0].repetition.more
    if last < more:
        return None
    shift = float(lanes[0].start[last] - lanes[0].start[last - more])
    return _Moment(timeline, repetitions, lanes, of_cohort, time, shift) if 0 < shift <= time else None


def _soonest(timeline: Timeline, repetitions: Repetitions, lanes: list[_Lane], of_cohort: list[list[int]], number: int) -> float:
    """The soonest that an op of a lane begins that the played step or one of a period more does not have there."""
    lane, cohort = lanes[number], timeline.lanes[number].cohort
    ops, (more, _, end) = timeline.cohort(number).ops, lane.repetition
    place = number - of_cohort[cohort][0]
    ended = {op.stream: time for op, time in zip(ops[:end], lane.end.tolist(), strict=False)}
    soonest = float(lane.start[end:].min(initial=np.inf))
    begun = set[str]()
    for index in range(end - more, len(ops)):  # what the longer one has there does it `more` ops later
        if ops[index].stream in begun:
            continue
        begun.add(ops[index].stream)
        time = ended.get(ops[index].stream, 0.0)
        waits = repetitions.waits(cohort, index) if index < end else None
        for awaited, op, moves in waits or [(*each, False) for each in ops[index].after]:
            other = lanes[of_cohort[awaited][0] + place]
            op += other.repetition.more if moves else 0
            time = max(time, other.end[op] if op < other.repetition.end else np.inf)  # else that one comes later still
        soonest = min(soonest, float(time))
    return soonest


class _Lane(NamedTuple):
    """The ops of a lane in the played step: the number of the first, when they start, end and are launched."""

    first: int
    repetition: Repetition
    start: Floats
    end: Floats
    launched: Floats

    @classmethod
    def of(cls, timeline: Timeline, number: int, repetition: Repetition) -> _Lane:
        """A lane of the played step."""
        first = timeline.offset[number]
        part = slice(first, first + len(timeline.cohort(number).ops))
        return cls(first, repetition, *(np.array(times[part]) for times in (timeline.start, timeline.end, timeline.launched)))

    def is_period_later(self, flags: Flags, earlier: Flags) -> bool:
        """Whether the ops of `flags` are those of a whole period and, each a period later, those of `earlier`."""
        more = self.repetition.more
        return bool(flags[:more].all() and (flags[more:] == earlier[: len(flags) - more]).all() and not earlier[-more:].any())

    def held(self, timeline: Timeline) -> dict[int, Resumption]:
        """When its host went on, by the op of the lane that held it up."""
        if not timeline.resumptions:
            return {}
        every = range(len(self.start))
        return {op: timeline.resumptions[self.first + op] for op in every if self.first + op in timeline.resumptions}


class _Moment:
    """`time`: the played step is supposed to be in the state in which it was `shift` before. of_cohort: lanes of each cohort."""

    def __init__(
        self,
        timeline: Timeline,
        repetitions: Repetitions,
        lanes: list[_Lane],
        of_cohort: list[list[int]],
        time: float,
        shift: float,
    ) -> None:
        self.timeline, self.repetitions, self.lanes, self.of_cohort = timeline, repetitions, lanes, of_cohort
        self.time, self.shift = time, shift

    # -- the same state --------------------------------------------------------------------------------------------------

    def repeats(self) -> bool:
        """Whether everything under way, and all that has started and ended, is as it was `shift` before."""
        age = max(self._age(self.time), self._age(self.time - self.shift))
        return all(self._is_as_before(lane, age) and self._is_launched(lane) for lane in self.lanes)

    def _age(self, time: float) -> float:
        """For how long the oldest op that is under way at `time` has been."""
        starts = [lane.start[(lane.start < time) & (lane.end >= time)] for lane in self.lanes]
        return max((time - float(each.min()) for each in starts if len(each)), default=0.0)

    def _is_as_before(self, lane: _Lane, age: float) -> bool:
        time, before, more = self.time, self.time - self.shift, lane.repetition.more
        started, ended = lane.start < time, lane.end < time
        if not lane.is_period_later(started, lane.start < before) or not lane.is_period_later(ended, lane.end < before):
            return False
        now = np.flatnonzero(started & (lane.end >= time - age))
        then = np.flatnonzero((lane.start < before) & (lane.end >= before - age))
        if len(now) != len(then) or (now != then + more).any() or (lane.start[now] - lane.start[then] != self.shift).any():
            return False
        return not (lane.end[now] - lane.end[then] != self.shift)[ended[now]].any()

    def _is_launched(self, lane: _Lane) -> bool:
        """Whether the host of a lane goes on as all else does, or is ahead of it from now on."""
        last, held = int(np.flatnonzero(lane.start < self.time).max()), lane.held(self.timeline)
        late = float(lane.launched[last] - lane.launched[last - lane.repetition.more])
        if held:
            latest = max((op for op, resumption in held.items() if resumption.time < self.time), default=-1)
            earlier = held.get(latest - lane.repetition.more)
            late = held[latest].time - earlier.time if earlier is not None else np.inf
        return late == self.shift or (late < self.shift and not held and self._is_ahead(lane))

    def _is_ahead(self, lane: _Lane) -> bool:
        """Whether no op that has not ended a period before starts or ends when its launch lets it."""
        for op in np.flatnonzero(lane.end >= self.time - self.shift).tolist():
            cost, start, launched = self.timeline.cost[lane.first + op], lane.start[op], lane.launched[op]
            if launched + cost.critical > start + cost.busy if isinstance(cost, BlockCost) else launched >= start:
                return False
        return True

    # -- the same program --------------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether a longer step has left to do now what the played one had left `shift` before."""
        for cohort, numbers in enumerate(self.of_cohort):
            more, begin, end = self.repetitions.every[cohort]
            before = self.time - self.shift
            later = [np.flatnonzero(self.lanes[number].start >= before) for number in numbers]
            first = min((int(each[0]) for each in later if len(each)), default=end)
            if first + more < begin or not self._waits_for_the_same(
                cohort, range(max(begin, min(first + more, end - more)), end)
            ):
                return False
        return True

    def _waits_for_the_same(self, cohort: int, ops: range) -> bool:
        """Whether ops wait for what those before them wait for, a period later, or for what has ended in both."""
        for number in ops:
            waits = self.repetitions.waits(cohort, number)
            if waits is None:
                return False
            for awaited, op, moves in waits:
                if not moves and any(self.lanes[lane].end[op] >= self.time - self.shift for lane in self.of_cohort[awaited]):
                    return False
        return True

    def events(self) -> int | None:
        """How many events a period takes; None where that cannot be said: something contends for the first time in it."""
        if self.timeline.contended >= self.time:
            return sum(lane.repetition.more for lane in self.lanes)
        if self.timeline.contended > self.time - self.shift:
            return None
        scheduled = np.array(self.timeline.scheduled)
        return int(((scheduled >= self.time - self.shift) & (scheduled < self.time)).sum())
