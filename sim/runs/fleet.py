"""The nodes of a run: those that train, those that wait, those in repair; which of them are bad."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from simpy import Environment, Event, Resource

from sim.runs.spec import Repair, RunSpec
from topologies.documents.durations import BUFFER, buffered


class Fleet:
    """Nodes by number. Active ones are kept by kind, good and bad: nodes of a kind fail alike, and any of them is as likely."""

    def __init__(self, spec: RunSpec, generator: np.random.Generator) -> None:
        self.spec = spec
        free = spec.pool or 0
        total = spec.nodes + spec.spares + free + spec.reserve
        self.uniform = buffered(lambda: generator.random(BUFFER))
        self.bad = [False] * total
        for node in generator.permutation(total)[: int(total * spec.bad)].tolist():
            self.bad[node] = True
        self.kinds: tuple[list[int], list[int]] = ([], [])  # good, bad
        self.place = [-1] * total
        for node in range(spec.nodes):
            self.join(node)
        after = iter(range(spec.nodes, total))
        self.standbys = [next(after) for _ in range(spec.spares)]
        self.free = [next(after) for _ in range(free)]
        self.reserve = list(after)

    @property
    def active(self) -> int:
        """How many nodes train."""
        return len(self.kinds[0]) + len(self.kinds[1])

    def join(self, node: int) -> None:
        """A node trains from now on."""
        kind = self.kinds[self.bad[node]]
        self.place[node] = len(kind)
        kind.append(node)

    def leave(self, node: int) -> None:
        """A node does not train any more."""
        kind, place = self.kinds[self.bad[node]], self.place[node]
        kind[place] = last = kind[-1]
        self.place[last] = place
        kind.pop()
        self.place[node] = -1

    def victim(self) -> int:
        """An active node, bad ones `bad_factor` times as likely."""
        good, bad = self.kinds
        weight = len(bad) * self.spec.bad_factor
        drawn = self.uniform() * (len(good) + weight)
        if drawn < weight:
            return bad[min(len(bad) - 1, int(drawn / self.spec.bad_factor))]
        return good[min(len(good) - 1, int(drawn - weight))]

    def neighbours(self, node: int, count: int) -> list[int]:
        """`node` and other active nodes, `count` together: those with the next numbers, as behind a leaf switch."""
        chosen, number = [node], node + 1
        size = len(self.place)
        while len(chosen) < min(count, self.active):
            if self.place[number % size] >= 0 and number % size != node:
                chosen.append(number % size)
            number += 1
        return chosen

    def new(self) -> int:
        """A node of an unlimited pool."""
        self.bad.append(self.uniform() < self.spec.bad)
        self.place.append(-1)
        return len(self.bad) - 1


class RepairShop:
    """Nodes in repair, and what happens when they come back. back: called with each repaired node."""

    def __init__(
        self,
        env: Environment,
        repair: Repair,
        fleet: Fleet,
        generators: tuple[np.random.Generator, np.random.Generator],
        back: Callable[[int], None],
    ) -> None:
        self.env, self.repair, self.fleet, self.back = env, repair, fleet, back
        times, outcomes = generators
        self.automatic, self.manual = repair.automatic.sampler(times), repair.manual.sampler(times)
        self.uniform = buffered(lambda: outcomes.random(BUFFER))
        self.technicians = Resource(env, repair.technicians) if repair.technicians is not None else None

    def send(self, node: int) -> None:
        """A node is repaired from now on, or waits for a technician."""
        if self.technicians is not None:
            self.env.process(self._mend(node, self.technicians))
            return
        seconds, cures = self._work()  # one event, and no process: half of what a failure costs is its repair
        self.env.timeout(seconds).callbacks.append(lambda _: self._done(node, cures))

    def _mend(self, node: int, technicians: Resource) -> Generator[Event, Any, None]:
        with technicians.request() as turn:
            yield turn
            seconds, cures = self._work()
            yield self.env.timeout(seconds)
        self._done(node, cures)

    def _work(self) -> tuple[float, float]:
        """How long a repair takes, and with what probability it cures a bad node."""
        repair, seconds = self.repair, self.automatic()
        if repair.escalates and self.uniform() < repair.escalates:
            return seconds + self.manual(), repair.cures_manually
        return seconds, repair.cures

    def _done(self, node: int, cures: float) -> None:
        if self.fleet.bad[node] and self.uniform() < cures:
            self.fleet.bad[node] = False
        self.back(node)
