"""When what fails: the next failure of a job's nodes, whatever the distributions of its parts.

Parts with exponential lives are one: together they fail at the sum of their rates, and which one it was is drawn then. The time
to the next failure is drawn as a unit of hazard, which passes faster the more nodes, and the more bad ones, are exposed; so
alternatives that are compared meet the same failures as far as that is possible. Other distributions have a life for each node,
which goes on only while it is exposed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from simpy import Environment, Event

from sim.engine.task import cancel
from sim.runs.fleet import Fleet
from sim.runs.spec import Component, RunSpec
from topologies.documents.durations import BUFFER, buffered


class Failure(NamedTuple):
    """A component of `nodes` has failed. replaces: they cannot go on; hangs: only a timeout tells."""

    component: Component
    nodes: tuple[int, ...]
    replaces: bool
    hangs: bool


class Streams(NamedTuple):
    """Random numbers of failures: times, which component and how, lives of nodes."""

    times: np.random.Generator
    kinds: np.random.Generator
    lives: np.random.Generator


class Failures:
    """Calls `strike` with each failure, while it is resumed. factor: by which everything fails more often."""

    def __init__(
        self, env: Environment, spec: RunSpec, fleet: Fleet, streams: Streams, factor: float, strike: Callable[[Failure], None]
    ) -> None:
        self.env, self.spec, self.fleet, self.strike, self.factor = env, spec, fleet, strike, factor
        constant = [component for component in spec.components if component.life.kind == "exponential"]
        self._of_nodes = [component for component in constant if component.unit == "node"]
        self._others = [component for component in constant if component.unit != "node"]
        self._node_rates = list(accumulate(factor / component.life.mean for component in self._of_nodes))
        self._other_rates = list(accumulate(factor * self._units(component) / component.life.mean for component in self._others))
        self.node_rate = self._node_rates[-1] if self._node_rates else 0.0
        self.other_rate = self._other_rates[-1] if self._other_rates else 0.0
        self._exponential = buffered(lambda: streams.times.standard_exponential(BUFFER))
        self._uniform = buffered(lambda: streams.kinds.random(BUFFER))
        self._lives = streams.lives
        self._hazard = self._exponential()  # left until the next failure
        self._exposure = self._since = self._rate = 0.0
        self._event: Event | None = None
        self._ageing = [component for component in spec.components if component.life.kind != "exponential"]
        self._born = [0] * spec.nodes  # how often each node has joined: lives of earlier times mean nothing any more
        self._due: list[tuple[float, int, int, int]] = []  # (exposure, component, unit, born)
        for number, component in enumerate(self._ageing):
            units = spec.nodes if component.unit == "node" else self._units(component)
            lives = component.life.draw(streams.lives, units) / factor
            self._due += [(self._scaled(component, unit, life), number, unit, 0) for unit, life in enumerate(lives.tolist())]
        heapify(self._due)

    def _units(self, component: Component) -> int:
        """How many of a component a job has, where it is none of a node."""
        return 1 if component.unit == "job" else -(-self.spec.nodes // component.nodes)

    def _scaled(self, component: Component, unit: int, life: float) -> float:
        return life / self.spec.bad_factor if component.unit == "node" and self.fleet.bad[unit] else life

    def resume(self) -> None:
        """Nodes are exposed from now on; nothing if they are already."""
        if self._event is not None or not self.spec.components:
            return
        good, bad = self.fleet.kinds
        self._rate = self.node_rate * (len(good) + self.spec.bad_factor * len(bad)) + self.other_rate
        self._since = self.env.now
        wait = self._hazard / self._rate if self._rate else float("inf")
        while self._due and self._stale(*self._due[0]):
            heappop(self._due)
        if self._due:
            wait = min(wait, self._due[0][0] - self._exposure)
        if wait < float("inf"):
            self._event = self.env.timeout(max(0.0, wait))
            self._event.callbacks.append(self._struck)

    def pause(self) -> None:
        """Nodes are not exposed, or about to change."""
        if self._event is None:
            return
        cancel(self._event)
        self._event = None
        elapsed = self.env.now - self._since
        self._exposure += elapsed
        self._hazard = max(0.0, self._hazard - elapsed * self._rate)

    def joined(self, node: int) -> None:
        """A node trains from now on: its parts have lives of their own."""
        if not self._ageing:
            return
        self._born += [0] * (node + 1 - len(self._born))
        self._born[node] += 1
        for number, component in enumerate(self._ageing):
            if component.unit == "node":
                self._renew(number, node, self._exposure)

    def _renew(self, number: int, unit: int, since: float) -> None:
        component = self._ageing[number]
        life = self._scaled(component, unit, component.life.draw(self._lives, 1)[0] / self.factor)
        heappush(self._due, (since + life, number, unit, self._born[unit] if component.unit == "node" else 0))

    def _stale(self, _: float, number: int, unit: int, born: int) -> bool:
        """Whether the node has left since, or left and joined again."""
        return self._ageing[number].unit == "node" and (self.fleet.place[unit] < 0 or self._born[unit] != born)

    def _struck(self, _: Event) -> None:
        due = self._due[0][0] - self._exposure if self._due else float("inf")
        ageing = due <= self._hazard / self._rate if self._rate else True
        self.pause()
        if ageing:
            failure = self._aged()
        else:
            self._hazard = self._exponential()
            failure = self._memoryless()
        self.strike(failure)

    def _memoryless(self) -> Failure:
        drawn = self._uniform() * self._rate
        if drawn < self.other_rate:
            component = self._others[min(len(self._others) - 1, bisect(self._other_rates, drawn))]
        elif len(self._of_nodes) == 1:
            component = self._of_nodes[0]
        else:
            part = (drawn - self.other_rate) % self.node_rate
            component = self._of_nodes[min(len(self._of_nodes) - 1, bisect(self._node_rates, part))]
        return self._failure(component, None)

    def _aged(self) -> Failure:
        time, number, unit, _ = heappop(self._due)
        component = self._ageing[number]
        self._renew(number, unit, max(time, self._exposure))
        return self._failure(component, unit if component.unit == "node" else None)

    def _failure(self, component: Component, node: int | None) -> Failure:
        """A failure of a node (None: of any)."""
        nodes: tuple[int, ...] = ()
        if self.fleet.active:
            first = self.fleet.victim() if node is None else node
            nodes = (first,) if component.nodes == 1 else tuple(self.fleet.neighbours(first, component.nodes))
        replaces = component.replace >= 1 or (component.replace > 0 and self._uniform() < component.replace)
        return Failure(component, nodes, replaces, component.hang > 0 and self._uniform() < component.hang)
