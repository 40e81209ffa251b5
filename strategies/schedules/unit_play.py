"""A pipeline schedule with passes of given lengths and transfers that take no time, played by SimPy: a process per rank.

What a class draws: the bubble and the microbatches in flight of a schedule alone. Networks, hosts and kernels come in where a job
is simulated (`strategies.lowering`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from simpy import Environment, Event

from strategies.schedules import actions, schedules
from strategies.schedules.order import Action, Schedule


class Pass(NamedTuple):
    """A pass of a microbatch through a chunk of a rank; kind as in `Action`; start and end in units of a forward pass."""

    rank: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class UnitPlay:
    """A schedule that was played."""

    name: str
    ranks: int
    microbatches: int
    chunks: int
    passes: tuple[Pass, ...]

    @property
    def length(self) -> float:
        """Time from the first pass to the end of the last."""
        return max(each.end for each in self.passes)

    @property
    def bubble(self) -> float:
        """The part of the time in which ranks have nothing to do, mean over ranks."""
        busy = sum(each.end - each.start for each in self.passes)
        return 1 - busy / (self.ranks * self.length)

    @property
    def overhead(self) -> float:
        """Idle time relative to the time that ranks compute: how Narayanan et al. 2021 give bubbles."""
        return self.bubble / (1 - self.bubble)

    @property
    def gaps(self) -> float:
        """As `bubble`, without what a rank waits before its first pass and after its last, where other steps may be."""
        spans = [[each for each in self.passes if each.rank == rank] for rank in range(self.ranks)]
        own = sum(max(each.end for each in span) - min(each.start for each in span) for span in spans)
        return 1 - sum(each.end - each.start for each in self.passes) / own

    def held(self, rank: int) -> float:
        """Microbatches whose activations a rank holds at most, in units of all its chunks."""
        changes: list[tuple[float, int, float]] = []
        for each in self.passes:
            if each.rank == rank and each.kind in "FBW":  # of a split backward pass, the weights' part ends it
                changes.append((each.start, 1, 1.0) if each.kind == "F" else (each.end, 0, -1.0))
        most = now = 0.0
        for _, _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most / self.chunks


def unit_play(name: str, ranks: int, microbatches: int, chunks: int | None = None, backward: float = 2.0) -> UnitPlay:
    """Play a schedule whose stages have equal work. A forward pass through all chunks of a rank takes 1, a backward pass
    `backward`, half of it for the gradients of inputs. Raises UserError for sizes that the schedule cannot have.
    """
    schedule = schedules[name]
    chunks = chunks or schedule.chunks or 2
    orders = [actions(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    return UnitPlay(name, ranks, microbatches, chunks, tuple(_Playing(schedule, ranks, chunks, backward).run(orders)))


class _Playing:
    def __init__(self, schedule: Schedule, ranks: int, chunks: int, backward: float) -> None:
        self.schedule, self.ranks, self.chunks = schedule, ranks, chunks
        parts = chunks // schedule.copies
        self.lengths = {"F": 1 / parts, "B": backward / parts, "I": backward / 2 / parts, "W": backward / 2 / parts}
        self.stages = ranks * parts  # of one copy of the model
        self.env = Environment()
        self.done: dict[tuple[str, int, int], Event] = {}  # way, stage, microbatch
        self.passes: list[Pass] = []

    def run(self, orders: list[tuple[Action, ...]]) -> list[Pass]:
        """All passes, in the order in which they end."""
        for rank, order in enumerate(orders):
            self.env.process(self._rank(rank, order))
        self.env.run()
        return self.passes

    def _rank(self, rank: int, order: tuple[Action, ...]) -> Generator[Event]:
        """Pass by pass; two that overlap begin when both can."""
        for place, action in enumerate(order):
            together = order[place : place + 2] if action.beside else order[place : place + 1]
            for each in together:
                yield from self._wait(rank, each)
            start = self.env.now
            yield self.env.timeout(self.lengths[action.kind])
            self.passes.append(Pass(rank, action.kind, action.microbatch, action.chunk, start, self.env.now))
            if action.kind != "W":
                stage = self.schedule.stage(rank, self.ranks, action.chunk)
                self._event("F" if action.kind == "F" else "B", stage, action.microbatch).succeed()

    def _wait(self, rank: int, action: Action) -> Generator[Event]:
        """A forward pass waits for the stage before, a backward pass for the stage after; the last for its forward pass."""
        stage = self.schedule.stage(rank, self.ranks, action.chunk)
        if action.kind == "F" and stage % self.stages:
            yield self._event("F", stage - 1, action.microbatch)
        elif action.kind in "BI":
            last = (stage + 1) % self.stages == 0
            yield self._event("F", stage, action.microbatch) if last else self._event("B", stage + 1, action.microbatch)

    def _event(self, way: str, stage: int, microbatch: int) -> Event:
        return self.done.setdefault((way, stage, microbatch), self.env.event())
