"""A training run as SimPy processes: start-up, training, failures, detection, diagnosis, replacement, restart, lost work, end.

Training is one event per uninterrupted stretch, whatever the number of steps and checkpoints in it (`sim.runs.segment`); nodes in
repair are processes; failures interrupt whatever the job is doing.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from simpy import Event, Interrupt

from sim.runs import ledger as causes
from sim.runs.failures import Failure
from sim.runs.phases import DeadlineError, Interruptible, Phases
from sim.runs.record import Span, in_vain
from sim.runs.spec import Pace


@dataclass(frozen=True)
class Outcome:
    """A run that is over. seconds: from its beginning; steps: whole steps' worth of progress; GPU-seconds by cause; failures by
    component. interrupted: times that training stopped; waited: times that no node was free.
    """

    seconds: float
    steps: float
    gpu_seconds: dict[str, float]
    failures: dict[str, int]
    interruptions: int
    replaced: int
    waited: int
    timeline: tuple[Span, ...] = ()
    step_factor: float = 1.0  # by which its steps were longer than said

    @property
    def held(self) -> float:
        """GPU-seconds of all causes, spares included."""
        return sum(self.gpu_seconds.values())

    @property
    def goodput(self) -> float:
        """The part of all GPU-seconds that advanced training."""
        return self.gpu_seconds[causes.PRODUCTIVE] / self.held if self.held else 1.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive time over wall-clock time, whatever the spares (arXiv 2410.21680)."""
        job = self.held - self.gpu_seconds[causes.SPARES]
        return self.gpu_seconds[causes.PRODUCTIVE] / job if job else 1.0


class Run(Phases):
    """One run. seed: of this replication; equal seeds give equal runs. record: keep what happened when."""

    def outcome(self) -> Outcome:
        """Play the run to its end."""
        self._hold()
        self.process = self.env.process(self._life())
        self.env.run(self.process)
        self.failures.pause()
        self._hold()
        return Outcome(
            self.env.now,
            self.progress.whole,
            dict(self.ledger.entries),
            self.counts,
            self.interruptions,
            self.replaced,
            self.waited,
            tuple(self.record or ()),
        )

    def _life(self) -> Generator[Event, Any, None]:
        try:
            if self.spec.idle_failures:
                self.failures.resume()
            failure = yield from self._start(None)
            while True:
                while failure is not None:
                    failure = yield from self._recover(failure)
                if self.progress.remaining <= 0:
                    return
                failure = yield from self._train()
        except DeadlineError:
            return

    @property
    def pace(self) -> Pace:
        """The present seconds of a step and what it brings, without slow nodes."""
        spec, elastic = self.spec, self.spec.elastic
        if not self.missing or elastic is None:
            return Pace(spec.step, 1.0)
        return elastic.paces[self._replicas_lost(self.missing) - 1]

    def _replicas_lost(self, missing: int) -> int:
        assert self.spec.elastic is not None
        return max(1, -int(-missing // self.spec.elastic.nodes))

    def _train(self) -> Interruptible:
        """Train until something happens; returns the failure, or None."""
        pace = self.pace
        segment, work, finish = self.progress.ahead(pace, max(self.slow.values(), default=1.0))
        self.failures.resume()
        start, failure, finished = self.env.now, None, True
        end = start + (work + sum(finish.paused))
        while True:
            until = min(end, self.spec.deadline)
            try:
                yield self.env.timeout(until - self.env.now)
                break
            except Interrupt as interrupt:
                failure, finished = interrupt.cause, False
                if failure is not None:
                    break
                end = min(end, start + segment.left(segment.last_before(self.env.now - start) + 1))
        if not self.spec.idle_failures:
            self.failures.pause()
        self._log(start, causes.PRODUCTIVE, segment)
        finished = finished and end <= self.spec.deadline
        if finished:
            self.progress.finish(segment, pace, work, finish)
        else:
            self.progress.stop(segment, pace, self.env.now - start, self.env.now)
            self._mark()
        if failure is None and self.env.now >= self.spec.deadline and not finished:
            raise DeadlineError
        if failure is None and self.joining:
            failure = yield from self._grow()
        return failure

    def _recover(self, failure: Failure) -> Interruptible:
        """From a failure to the first step after it; returns the next failure where one comes before, or None."""
        spec, elastic = self.spec, self.spec.elastic
        self.interruptions += 1
        struck = self.env.now
        if spec.idle_failures:
            self.failures.resume()
        warned = bool(failure.component.notice) and any(saving.blocking <= failure.component.notice for saving in spec.savings)
        if warned:
            again = yield from self._phase(min(saving.blocking for saving in spec.savings), causes.SAVE)
        else:
            seconds = spec.timeout if failure.hangs else spec.heartbeat
            again = yield from self._phase(seconds, causes.DETECTION)
        again = again or (yield from self._phase(self._diagnosis(), causes.DIAGNOSIS))
        written = struck + spec.timeout if failure.hangs else struck
        wrong = spec.misdiagnosis > 0 and failure.replaces and self._uniform() < spec.misdiagnosis
        out: tuple[int, ...] = ()
        if failure.replaces and self.fleet.active:
            out = failure.nodes if not wrong else (self.fleet.victim(),)
        out = tuple(node for node in out if self.fleet.place[node] >= 0)
        self._remove(out)
        if elastic is not None and out and self._may_shrink():
            self.missing += len(out)
            self.missing -= self._fill(self.missing)
            if self.missing and (spec.pool is None or self.fleet.free):
                self.env.timeout(spec.allocation).callbacks.append(lambda _: self._regrow())
            place = self._roll_back(len(out), warned, written) if elastic.rollback else None
            self.progress.forget(len(out))
            again = again or (yield from self._phase(elastic.reconfigure, causes.INITIALIZATION))
            if again is None and place is not None:
                again = yield from self._phase(spec.savings[place].restore, causes.RESTORE)
            return again or (failure if wrong else None)
        place = self._roll_back(len(out), warned, written)
        if again is not None:
            self.missing += len(out)
            return again
        again = yield from self._replace(len(out))
        if again is None:
            again = yield from self._start(place, here=not out)
        return again or (failure if wrong else None)

    def _roll_back(self, lost: int, warned: bool, written: float) -> int | None:
        """Back to the newest checkpoint that has survived; returns its place."""
        place = self.progress.roll_back(lost, warned, written)
        self._mark()
        return place

    def _mark(self) -> None:
        """Note what was in vain of the training on record."""
        if self.record is not None:
            in_vain(self.record, self.progress.step)

    def _may_shrink(self) -> bool:
        """Whether the job may go on with the nodes that it has now."""
        elastic = self.spec.elastic
        assert elastic is not None
        lacking = self.spec.nodes - self.fleet.active - len(self.fleet.standbys)
        return lacking <= 0 or self._replicas_lost(lacking) <= len(elastic.paces)

    def _remove(self, nodes: tuple[int, ...]) -> None:
        if not nodes:
            return
        self.failures.pause()
        for node in nodes:
            self.fleet.leave(node)
            self.shop.send(node)
        self.replaced += len(nodes)
        if self.spec.idle_failures:
            self.failures.resume()

    def _fill(self, count: int) -> int:
        """Let up to `count` standbys join; returns how many did."""
        fleet, joined = self.fleet, 0
        if count and fleet.standbys:
            self.failures.pause()
            while joined < count and fleet.standbys:
                self._join(fleet.standbys.pop(0))
                joined += 1
            self._hold()
            if self.spec.idle_failures:
                self.failures.resume()
        return joined

    def _join(self, node: int) -> None:
        self.fleet.join(node)
        self.failures.joined(node)

    def _replace(self, count: int) -> Interruptible:
        """Put nodes in the places of those that left: standbys at once, then free nodes, then others' or repaired ones."""
        spec, fleet = self.spec, self.fleet
        lacking = count + self.missing
        self.missing = 0
        lacking -= self._fill(lacking)
        allocated = False
        while lacking:
            if not allocated and spec.allocation and (spec.pool is None or fleet.free):
                allocated, again = True, (yield from self._phase(spec.allocation, causes.REPLACEMENT))
            elif spec.pool is None or fleet.free:
                allocated, again = True, None
                lacking -= self._allocate(lacking)
            elif fleet.standbys:
                again = None
                lacking -= self._fill(lacking)
            elif fleet.reserve:
                again = yield from self._phase(spec.preemption, causes.REPLACEMENT)
                if again is None:
                    fleet.free.append(fleet.reserve.pop(0))
                    allocated = True
            else:
                again = yield from self._wait()
            if again is not None:
                self.missing = lacking
                return again
        return None

    def _allocate(self, count: int) -> int:
        """Free nodes join, and become standbys where some lack; returns how many joined."""
        fleet, joined = self.fleet, 0
        self.failures.pause()
        while joined < count and (self.spec.pool is None or fleet.free):
            self._join(fleet.free.pop(0) if fleet.free else fleet.new())
            joined += 1
        while len(fleet.standbys) < self.spec.spares and (self.spec.pool is None or fleet.free):
            fleet.standbys.append(fleet.free.pop(0) if fleet.free else fleet.new())
        self._hold()
        if self.spec.idle_failures:
            self.failures.resume()
        return joined

    def _grow(self) -> Interruptible:
        """Take in nodes that are there again, between two steps."""
        assert self.spec.elastic is not None
        self.joining = False
        fleet = self.fleet
        joined = self._fill(self.missing)
        if joined < self.missing and (fleet.free or self.spec.pool is None):
            joined += self._allocate(self.missing - joined)
        self.missing -= joined
        return (yield from self._phase(self.spec.elastic.reconfigure, causes.INITIALIZATION)) if joined else None
