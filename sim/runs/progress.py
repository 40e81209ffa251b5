"""How far a run is, what of it is safe, and what a failure takes away again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.runs import ledger as causes
from sim.runs.ledger import Ledger
from sim.runs.segment import Pause, Position, Segment, blocked
from sim.runs.spec import Pace, RunSpec


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that are done but may be lost. step: seconds of one that count as productive; progress: of a whole step."""

    first: int
    last: int
    step: float
    progress: float


class Progress:
    """step: number of the optimizer steps that are done; whole: progress in whole steps, of which fewer replicas make less.

    durable: step of the newest complete checkpoint in each place; flushing: (place, step, when it will be complete).
    """

    def __init__(self, spec: RunSpec, ledger: Ledger) -> None:
        self.spec, self.ledger = spec, ledger
        saves, evaluations = [causes.SAVE] * len(spec.savings), [causes.EVALUATION] * bool(spec.evaluation_steps)
        stalls, reductions = [causes.LOADING] * bool(spec.stall), [causes.REDUCTION] * len(spec.reductions)
        self.causes = (*saves, *evaluations, *stalls, *reductions)  # of pauses
        self._segments: dict[float, Segment] = {}  # by seconds of a step
        self._volatile = any(saving.copies is not None for saving in spec.savings)
        self.step, self.whole = 0, 0.0
        self.stretches: list[Stretch] = []
        self.durable = [0] * len(spec.savings)
        self.flushing: list[tuple[int, int, float]] = []

    @property
    def remaining(self) -> float:
        """Whole steps' worth of progress that is left."""
        return self.spec.steps - self.whole

    def ahead(self, pace: Pace, slow: float) -> tuple[Segment, float, Position]:
        """What lies ahead, seconds of all the work that is left, and the position when it is done."""
        spec, step = self.spec, pace.step * slow
        segment = self._segment(step)
        steps = self.remaining / pace.progress
        # the first segment takes what the job's steps take, to the bit
        work = spec.work if not self.step and step == spec.step and pace.progress == 1.0 else steps * step
        last = self.step + math.ceil(steps) - 1  # after the last step of all nothing is saved or evaluated
        return segment, work, Position(last, work - (last - self.step) * step, segment.paused(last))

    def _segment(self, step: float) -> Segment:
        """Training from the present step on, with steps of `step` seconds."""
        known = self._segments.get(step)
        if known is None:
            spec = self.spec
            pauses = [Pause(saving.steps, blocked(saving, step)) for saving in spec.savings]
            pauses += [Pause(spec.evaluation_steps, spec.evaluation)] * bool(spec.evaluation_steps)
            pauses += [Pause(1, spec.stall)] * bool(spec.stall)
            pauses += [Pause(steps, seconds) for steps, seconds in spec.reductions]
            known = self._segments[step] = Segment(0, step, tuple(pauses))
        return known.at_step(self.step)

    def finish(self, segment: Segment, pace: Pace, work: float, finish: Position) -> None:
        """All work is done."""
        self._book(segment, pace, work, self.remaining, finish.paused)
        self.whole = self.spec.steps

    def _book(self, segment: Segment, pace: Pace, work: float, progress: float, paused: tuple[float, ...]) -> float:
        """Enter `work` seconds of steps that brought `progress`, and pauses; returns the seconds of whole steps it is worth."""
        useful = work if pace.progress == 1.0 and segment.step == self.spec.step else min(work, progress * self.spec.step)
        self.ledger.add(causes.PRODUCTIVE, useful)
        self.ledger.add(causes.REDUCED if pace.progress < 1.0 or pace.step > self.spec.step else causes.SLOW, work - useful)
        for number, seconds in enumerate(paused):
            self.ledger.add(self.causes[number], seconds)
        return useful

    def stop(self, segment: Segment, pace: Pace, elapsed: float, now: float) -> None:
        """Training has stopped before all work was done: the step under way is lost."""
        position = segment.at(elapsed)
        count = position.step - segment.first
        useful = self._book(segment, pace, count * segment.step, count * pace.progress, position.paused)
        self.ledger.add(causes.WASTED, position.seconds)
        self._settle(segment, elapsed, position, now)
        if count:
            self.whole += count * pace.progress
            self.stretches.append(Stretch(segment.first, position.step, useful / count, pace.progress))
        self.step = position.step

    def _settle(self, segment: Segment, elapsed: float, position: Position, now: float) -> None:
        """Which checkpoints are complete now, and which will be."""
        for place, step, when in self.flushing:
            if when <= now:
                self.durable[place] = max(self.durable[place], step)
        self.flushing = [(place, step, when) for place, step, when in self.flushing if when > now]
        for place, saving in enumerate(self.spec.savings):
            complete = segment.complete(elapsed, position, place, saving.flush)
            if complete is not None:
                self.durable[place] = max(self.durable[place], complete)
            newest = position.step // saving.steps * saving.steps
            if newest > max(segment.first, complete or 0):
                saved = segment.saved(newest, place)
                if saved <= elapsed:
                    self.flushing.append((place, newest, now - elapsed + saved + saving.flush))

    def forget(self, lost: int) -> None:
        """Checkpoints on nodes that are gone, and flushes that ended with the processes."""
        self.flushing.clear()
        for place, saving in enumerate(self.spec.savings if self._volatile else ()):
            if saving.copies is not None and lost >= saving.copies:
                self.durable[place] = 0

    def roll_back(self, lost: int, warned: bool, until: float) -> int | None:
        """Back to the newest checkpoint that has survived; returns its place, None where training begins anew.

        lost: nodes; warned: there was time for a last checkpoint; until: when the processes ended, and with them what they wrote.
        """
        spec = self.spec
        place: int | None
        for number, step, when in self.flushing:
            if when <= until:
                self.durable[number] = max(self.durable[number], step)
        self.forget(lost)
        if warned:
            safest = min(range(len(spec.savings)), key=lambda each: (spec.savings[each].copies is not None, each))
            self.durable[safest] = self.step
        best, place = 0, None
        for number, saving in enumerate(spec.savings):
            better = self.durable[number] > best or (
                place is not None and self.durable[number] == best and saving.restore < spec.savings[place].restore
            )
            if self.durable[number] and better:
                best, place = self.durable[number], number
        while self.stretches and self.stretches[-1].last > best:
            stretch = self.stretches.pop()
            lost_from = max(best, stretch.first)
            count = stretch.last - lost_from
            self.ledger.move(causes.PRODUCTIVE, causes.WASTED, count * stretch.step)
            self.whole -= count * stretch.progress
            if lost_from > stretch.first:
                self.stretches.append(Stretch(stretch.first, lost_from, stretch.step, stretch.progress))
        if not self._volatile:
            self.stretches.clear()  # nothing can be lost any more that is in a place which survives everything
        self.step = best
        self.durable = [min(step, best) for step in self.durable]
        return place
