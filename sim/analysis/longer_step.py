"""A step that is a period of microbatches longer than a played one, without playing it: where the played one repeats itself.

A moment is looked for at which the played step is in the state in which it was a period before: on every lane as many ops more
have started and ended as a period has, and what was under way shortly before either moment started, and ended, T earlier in the
one case than in the other. From that moment on the longer program does what the played one does T earlier, if what it has left to
do is the same: the two programs are compared op by op. Times are multiples of 2⁻⁴⁰ s and compared to the bit.

"Shortly before" is as long as anything under way has been: the rates of transfers under way depend on what else was on their
links since they started.

The host of a lane launches what comes after the moment later by its own work on a period, H ≤ T. Where H = T launches move as all
else does. Where H < T no op from then on may begin or end when its launch lets it: launches come earlier by T − H beside the ops,
so that none does, and nothing that decides when an op starts changes. A host that ops hold up goes on when they are ready: there
launches, too, have to move by T.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.analysis.repetition import Comparison, Insertion, waits
from sim.pricing.block_costs import BlockCost
from sim.program import Program
from sim.timeline import Inside, Resumption, Timeline

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def one_period_longer(short: Timeline, program: Program) -> Timeline | None:
    """The timeline of a program that is a period longer than the played one; None where that one comes into no steady state."""
    comparison, insertions = Comparison(), []
    for old, new in zip(short.program.cohorts, program.cohorts, strict=True):
        insertions.append(comparison.insertion(old.ops, new.ops))
        if insertions[-1].more <= 0:
            return None
    moment = _latest(short, program, insertions)
    if moment is None or not (moment.repeats() and moment.goes_on()):
        return None
    more = moment.events()
    return None if more is None else replace(moment.timeline(), events=short.events + more)


def _latest(short: Timeline, program: Program, insertions: list[Insertion]) -> _Moment | None:
    """The latest moment up to which the longer program does what the played one does; None: it comes too early."""
    lanes = [_Lane.of(short, number, insertions[lane.cohort]) for number, lane in enumerate(short.lanes)]
    time = min(_soonest(short, program, lanes, number) for number in range(len(lanes)))
    started = np.flatnonzero(lanes[0].start < time)
    last, more = (int(started[lanes[0].start[started].argmax()]) if len(started) else -1), lanes[0].insertion.more
    if last < more:
        return None
    shift = float(lanes[0].start[last] - lanes[0].start[last - more])
    return _Moment(short, program, lanes, time, shift) if 0 < shift <= time else None


def _soonest(short: Timeline, program: Program, lanes: list[_Lane], number: int) -> float:
    """The soonest that an op of a lane begins that one of the two programs does not have there."""
    lane, cohort = lanes[number], short.lanes[number].cohort
    before, place = lane.insertion.before, number - _first_lane(short, cohort)
    ended = {op.stream: end for op, end in zip(short.cohort(number).ops[:before], lane.end.tolist(), strict=False)}
    time = float(lane.start[before:].min(initial=np.inf))
    begun = set[str]()
    for op in program.cohorts[cohort].ops[before:]:
        if op.stream not in begun:
            begun.add(op.stream)
            others = [(lanes[_first_lane(short, ref.cohort) + place], ref.op) for ref in op.after]
            if all(awaited < other.insertion.before for other, awaited in others):  # else it waits for one that comes later still
                time = min(time, max([ended.get(op.stream, 0.0), *(float(other.end[awaited]) for other, awaited in others)]))
    return time


def _first_lane(timeline: Timeline, cohort: int) -> int:
    return next(number for number, lane in enumerate(timeline.lanes) if lane.cohort == cohort)


class _Lane(NamedTuple):
    """The ops of a lane in the played step: the number of the first, when they start, end and are launched."""

    first: int
    insertion: Insertion
    start: Floats
    end: Floats
    launched: Floats

    @classmethod
    def of(cls, timeline: Timeline, number: int, insertion: Insertion) -> _Lane:
        """A lane of the played step."""
        first = timeline.offset[number]
        part = slice(first, first + len(timeline.cohort(number).ops))
        return cls(first, insertion, *(np.array(times[part]) for times in (timeline.start, timeline.end, timeline.launched)))

    def is_period_later(self, flags: Flags, earlier: Flags) -> bool:
        """Whether the ops of `flags` are those of a whole period and, each a period later, those of `earlier`."""
        more = self.insertion.more
        return bool(flags[:more].all() and (flags[more:] == earlier[: len(flags) - more]).all() and not earlier[-more:].any())

    def held(self, timeline: Timeline) -> dict[int, Resumption]:
        """When its host went on, by the op of the lane that held it up."""
        if not timeline.resumptions:
            return {}
        every = range(len(self.start))
        return {op: timeline.resumptions[self.first + op] for op in every if self.first + op in timeline.resumptions}


class _Moment:
    """`time`: the played step is supposed to be in the state in which it was `shift` before."""

    def __init__(self, short: Timeline, program: Program, lanes: list[_Lane], time: float, shift: float) -> None:
        self.short, self.program, self.lanes, self.time, self.shift = short, program, lanes, time, shift
        self.hosts: list[float] = []  # by lane, how much later its host launches what comes a period later
        self.of_cohort: list[list[int]] = [[] for _ in program.cohorts]  # its lanes
        for number, lane in enumerate(short.lanes):
            self.of_cohort[lane.cohort].append(number)

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
        time, before, more = self.time, self.time - self.shift, lane.insertion.more
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
        last, held = int(np.flatnonzero(lane.start < self.time).max()), lane.held(self.short)
        late = float(lane.launched[last] - lane.launched[last - lane.insertion.more])
        if held:
            latest = max((op for op, resumption in held.items() if resumption.time < self.time), default=-1)
            earlier = held.get(latest - lane.insertion.more)
            late = held[latest].time - earlier.time if earlier is not None else np.inf
        self.hosts.append(late)
        return late == self.shift or (late < self.shift and not held and self._is_ahead(lane))

    def _is_ahead(self, lane: _Lane) -> bool:
        """Whether no op that has not ended a period before starts or ends when its launch lets it."""
        for op in np.flatnonzero(lane.end >= self.time - self.shift).tolist():
            cost, start, launched = self.short.cost[lane.first + op], lane.start[op], lane.launched[op]
            if launched + cost.critical > start + cost.busy if isinstance(cost, BlockCost) else launched >= start:
                return False
        return True

    # -- the same program --------------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether what the longer program has left to do now is what the played one had left `shift` before."""
        for cohort, numbers in enumerate(self.of_cohort):
            lanes, before = [self.lanes[number] for number in numbers], self.time - self.shift
            first = min(
                int((lane.start >= before).argmax()) if (lane.start >= before).any() else len(lane.start) for lane in lanes
            )
            if first < lanes[0].insertion.after or not self._waits_for_the_same(cohort, first):
                return False
        return True

    def _waits_for_the_same(self, cohort: int, first: int) -> bool:
        """Whether ops of a cohort from number `first` on wait for ops a period later, or for what has ended in both."""
        more = np.array([self.lanes[numbers[0]].insertion.more for numbers in self.of_cohort])
        old, new = waits(self.short.program, cohort, first), waits(self.program, cohort, first + more[cohort])
        if len(old.by) != len(new.by) or (old.by + more[cohort] != new.by).any() or (old.cohort != new.cohort).any():
            return False
        fixed = np.flatnonzero(new.op != old.op + more[old.cohort]).tolist()
        for place in range(len(self.of_cohort[cohort])):
            for each in fixed:
                end = self.lanes[self.of_cohort[old.cohort[each]][place]].end
                if end[old.op[each]] >= self.time - self.shift or not (end[new.op[each] : new.op[each] + 1] < self.time).any():
                    return False
        return True

    # -- the longer step ---------------------------------------------------------------------------------------------------

    def events(self) -> int | None:
        """How many events a period takes; None where that cannot be said: something contends for the first time in it."""
        if self.short.contended >= self.time:
            return sum(lane.insertion.more for lane in self.lanes)
        if self.short.contended > self.time - self.shift:
            return None
        scheduled = np.array(self.short.scheduled)
        return int(((scheduled >= self.time - self.shift) & (scheduled < self.time)).sum())

    def timeline(self) -> Timeline:
        """The timeline of the longer program."""
        short, number = self.short, 0
        columns: list[list[Any]] = [[], [], [], [], []]
        offset = list[int]()
        inside, owed, resumptions = dict[int, Inside](), dict[int, dict[str, float]](), dict[int, Resumption]()
        for lane, host in zip(self.lanes, self.hosts, strict=True):
            more, number = lane.insertion.more, len(columns[0])
            offset.append(number)
            later = np.concatenate([lane.end >= self.time, np.ones(more, bool)])  # does what was done a period before
            source = np.arange(len(later)) - more * later
            for column, times, shift in zip(columns, lane[2:], (self.shift, self.shift, host), strict=False):
                column += (times[source] + shift * later).tolist()
            at = (lane.first + source).tolist()
            columns[3] += [short.stretch[op] for op in at]
            columns[4] += [short.cost[op] for op in at]
            for op, (known, moved) in enumerate(zip(at, later.tolist(), strict=True), number):
                if known in short.inside:
                    block = short.inside[known]
                    inside[op] = block.later(self.shift, host) if moved else block
                if known in short.owed:
                    owed[op] = short.owed[known]
                if known in short.resumptions:
                    before, busy, time = short.resumptions[known]
                    before += number - lane.first + more * moved if before >= 0 else 0
                    resumptions[op] = Resumption(before, busy, time + self.shift * moved)
        start, end, launched, stretch, cost = columns
        return replace(
            short,
            program=self.program,
            offset=offset,
            start=start,
            end=end,
            launched=launched,
            stretch=stretch,
            cost=cost,
            inside=inside,
            owed=owed,
            resumptions=resumptions,
        )
