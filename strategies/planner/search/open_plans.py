"""The plans that a search has not decided yet: a queue, the least bound first, and the plans whose simulation is under way."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

Place = tuple[int, int]  # number of the site, number of the plan on it


class Entry(NamedTuple):
    """A plan in the queue. level: how often its bound was tightened."""

    bound: float
    site: int
    plan: int
    level: int

    @property
    def place(self) -> Place:
        """Site and plan."""
        return self.site, self.plan


class OpenPlans:
    """Entries leave the queue for good when their plan is ruled out or asked for."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.current: Entry | None = None  # the entry that is being looked at
        self.asked: set[Place] = set()  # plans whose simulation was asked for
        self.running: set[Place] = set()  # of these, plans whose simulation is under way
        self._waiting: dict[Place, list[Entry]] = {}  # entries that wait for a simulation

    def add(self, site: int, bounds: Iterable[tuple[int, float]]) -> None:
        """Plans of a site with their bounds."""
        self.heap += [Entry(bound, site, plan, 0) for plan, bound in bounds]
        heapq.heapify(self.heap)

    def push(self, entry: Entry) -> None:
        """Put an entry back."""
        heapq.heappush(self.heap, entry)

    def pop(self) -> Entry:
        """Take the entry with the least bound. It is `current` until `settle`."""
        self.current = self.heap[0]
        heapq.heappop(self.heap)
        return self.current

    def settle(self) -> None:
        """The current entry is ruled out, asked for, or in the queue again."""
        self.current = None

    @property
    def least(self) -> float:
        """The least bound in the queue."""
        return self.heap[0].bound if self.heap else float("inf")

    @property
    def bounds(self) -> list[float]:
        """Bounds of plans whose simulation was not asked for."""
        return [entry.bound for entry in self.heap if entry.place not in self.asked]

    @property
    def waiting(self) -> Iterator[float]:
        """Bounds of entries that are held back."""
        return (entry.bound for entry in chain.from_iterable(self._waiting.values()))

    def count(self, worst: float) -> int:
        """Entries with a bound below `worst`."""
        return sum(entry.bound < worst for entry in self.heap)

    def wait(self, entry: Entry, place: Place) -> None:
        """Hold an entry back until the simulation of `place` is over."""
        self._waiting.setdefault(place, []).append(entry)

    def release(self, place: Place) -> None:
        """A simulation is over: entries that waited for it are in the queue again."""
        self.running.discard(place)
        for entry in self._waiting.pop(place, ()):
            self.push(entry)

    def reopen(self, entry_of: Callable[[int, int], Entry]) -> None:
        """Simulations under way are given up: their plans, and all entries that waited for them, are in the queue again."""
        for place in sorted(self.running):
            self.push(entry_of(*place))
        self.asked -= self.running
        for entry in (*([self.current] if self.current else []), *chain.from_iterable(self._waiting.values())):
            self.push(entry)
        self._waiting.clear()
