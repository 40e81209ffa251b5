"""What a run does while it does not train: phases that failures cut short, waiting for nodes, starting anew."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from simpy import Environment, Event, Interrupt, Process

from sim.runs import ledger as causes
from sim.runs.failures import Failure, Failures, Streams
from sim.runs.fleet import Fleet, RepairShop
from sim.runs.ledger import Ledger
from sim.runs.progress import Progress
from sim.runs.record import Span
from sim.runs.segment import Segment
from sim.runs.spec import RunSpec
from topologies.documents.durations import BUFFER, buffered

Interruptible = Generator[Event, Any, Failure | None]  # a phase, which returns the failure that ended it early
STREAMS = 9  # of random numbers, one for each thing that is drawn


class DeadlineError(Exception):
    """The time of the run is over."""


class Phases:
    """The state of a run, and what interrupts it."""

    def __init__(self, spec: RunSpec, seed: np.random.SeedSequence, record: bool = False) -> None:
        # children by their key, not by `spawn`, which would remember how often it was asked
        children = [np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, number)) for number in range(STREAMS)]
        draws = [np.random.Generator(np.random.PCG64(child)) for child in children]
        self.spec, self.env = spec, Environment()
        self.fleet = Fleet(spec, draws[0])
        factor = float(np.exp(draws[1].standard_normal() * spec.rate_spread))
        self._slowly = float(np.exp(draws[1].standard_normal() * spec.initialization_spread))
        self.failures = Failures(self.env, spec, self.fleet, Streams(*draws[2:5]), factor, self._strike)
        self.shop = RepairShop(self.env, spec.repair, self.fleet, (draws[5], draws[6]), self._back)
        self._uniform = buffered(lambda: draws[7].random(BUFFER))
        self._diagnosis = spec.diagnosis.sampler(draws[8])
        self._initialization = spec.initialization.sampler(draws[8])
        self._restart = spec.restart.sampler(draws[8]) if spec.restart is not None else self._initialization
        self._slow_times = {each.name: each.lasts.sampler(draws[8]) for each in spec.components if each.slow}
        self.ledger = Ledger(spec.gpus)
        self.counts = {component.name: 0 for component in spec.components}
        self.interruptions = self.replaced = self.waited = 0
        self.progress = Progress(spec, self.ledger)
        self.slow: dict[int, float] = {}  # factors by which slow nodes make steps longer
        self.missing = 0  # nodes that the job trains without
        self.joining = False  # nodes are there again: the job grows after the present step
        self._returned: Event | None = None
        self.record: list[Span] | None = [] if record else None
        self.process: Process | None = None

    def _strike(self, failure: Failure) -> None:
        self.counts[failure.component.name] += 1
        assert self.process is not None
        if failure.component.slow:
            self._slow_down(failure)
        else:
            self.process.interrupt(failure)

    def _slow_down(self, failure: Failure) -> None:
        """A node is slow from the next step on, for a while; the slowest sets the pace."""
        key = len(self.counts) + sum(self.counts.values())
        self.slow[key] = failure.component.slow
        end = self.env.timeout(self._slow_times[failure.component.name]())
        end.callbacks.append(lambda _: self._speed_up(key))
        self._nudge()

    def _speed_up(self, key: int) -> None:
        del self.slow[key]
        self._nudge()

    def _nudge(self) -> None:
        """The pace has changed, or a node is there again."""
        assert self.process is not None
        if self.spec.idle_failures:
            self.failures.resume()
        if self.process.is_alive:
            self.process.interrupt(None)

    def _back(self, node: int) -> None:
        """A node is repaired."""
        fleet = self.fleet
        if len(fleet.standbys) < self.spec.spares:
            fleet.standbys.append(node)
            self._hold()
        elif self.spec.pool is not None:
            fleet.free.append(node)
        if self._returned is not None:
            returned, self._returned = self._returned, None
            returned.succeed()
        else:
            self._regrow()

    def _regrow(self) -> None:
        """A node is there for an elastic job that lacks some: it joins after the present step."""
        if self.missing and self.spec.elastic is not None:
            self.joining = True
            self._nudge()

    def _hold(self) -> None:
        self.ledger.hold(self.env.now, len(self.fleet.standbys) * self.spec.gpus_per_node)

    def _phase(self, seconds: float, cause: str) -> Interruptible:
        """Spend time on something that is no training; returns the failure that cut it short, or None."""
        end = self.env.now + seconds
        while True:
            start, until = self.env.now, min(end, self.spec.deadline)
            if until <= start:
                if end > self.spec.deadline:
                    raise DeadlineError
                return None
            failure: Failure | None = None
            try:
                yield self.env.timeout(until - start)
            except Interrupt as interrupt:
                failure = interrupt.cause
            self._log(start, cause)
            self.ledger.add(cause, self.env.now - start)
            if failure is not None:
                return failure

    def _log(self, start: float, cause: str, segment: Segment | None = None) -> None:
        if self.record is not None and self.env.now > start:
            self.record.append(Span(start, self.env.now, cause, segment, start, self.progress.causes if segment else ()))

    def _wait(self) -> Interruptible:
        """Wait until a node is repaired; returns the failure that came meanwhile, or None."""
        self.waited += 1
        start, self._returned = self.env.now, self.env.event()
        returned, failure = self._returned, None
        over = self.env.timeout(max(0.0, self.spec.deadline - start)) if self.spec.deadline < float("inf") else self.env.event()
        try:
            yield returned | over
        except Interrupt as interrupt:
            failure = interrupt.cause
        self._log(start, causes.REPLACEMENT)
        self.ledger.add(causes.REPLACEMENT, self.env.now - start)
        if self.env.now >= self.spec.deadline:
            raise DeadlineError
        return failure

    def _start(self, restored: int | None, here: bool = False) -> Interruptible:
        """Initialise everything and read the checkpoint in a place (None: there is none); here: every node stayed."""
        failure = yield from self._phase(
            self._slowly * (self._restart() if here else self._initialization()), causes.INITIALIZATION
        )
        if failure is None and restored is not None:
            failure = yield from self._phase(self.spec.savings[restored].restore, causes.RESTORE)
        if failure is None and self.spec.first_batch:
            failure = yield from self._phase(self.spec.first_batch, causes.LOADING)
        return failure
