"""The CPU thread that launches a device's work: in program order, and ahead of the device as far as nothing holds it up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from math import inf

from sim.engine.task import Task

Pause = tuple[float, float]  # when the thread loses its core, and for how many seconds


class Host:
    """Launches tasks one after the other; it waits for nothing but what tasks that hold it up wait for.

    pauses: when other processes take its core (host preemption); start: when it begins.
    """

    __slots__ = ("_busy", "_resumption", "pauses")

    def __init__(self, pauses: Sequence[Pause] = (), start: float = 0.0) -> None:
        self.pauses = _joined(pauses)
        self._busy = start  # seconds of work since the latest resumption
        self._resumption: HeldLaunches | None = None

    def launch(self, task: Task, ahead: float = 0.0, behind: float = 0.0, holds: bool = False) -> None:
        """Launch `task` next. ahead, behind: seconds of the host before it is launched and after that.

        holds: the host first waits for what the task waits for.
        """
        if holds:
            task.holds = self._resumption = HeldLaunches(self, self._resumption, self._busy)
            self._busy = 0.0
        self._busy += ahead
        task.launched = self._busy
        if self._resumption is not None:
            self._resumption.tasks.append(task)
        elif self.pauses:
            task.launched = self.through(0.0, self._busy)
        self._busy += behind

    def through(self, begin: float, busy: float) -> float:
        """When the host is done that has `busy` seconds to do from `begin` on."""
        end = begin + busy
        if self.pauses:
            first = max(0, bisect_right(self.pauses, (begin, inf)) - 1)  # pauses do not overlap
            for start, seconds in islice(self.pauses, first, None):
                if end <= start:
                    break
                end += max(0.0, start + seconds - max(begin, start))
        return end

    def more(self, launched: float, seconds: float) -> float:
        """How much longer than `seconds` the host takes from `launched` on, because it loses its core."""
        return self.through(launched, seconds) - launched - seconds if self.pauses else 0.0


def _joined(pauses: Sequence[Pause]) -> tuple[Pause, ...]:
    """Pauses in order, those that overlap as one."""
    result: list[Pause] = []
    for start, seconds in sorted(pauses):
        if result and start <= sum(result[-1]):
            result[-1] = result[-1][0], max(sum(result[-1]), start + seconds) - result[-1][0]
        else:
            result.append((start, seconds))
    return tuple(result)


class HeldLaunches:
    """The host goes on after it was held up, and launches `tasks`. before: the resumption before; busy: seconds since then."""

    __slots__ = ("before", "busy", "host", "tasks", "time")

    def __init__(self, host: Host, before: HeldLaunches | None, busy: float) -> None:
        self.host, self.before, self.busy = host, before, busy
        self.tasks: list[Task] = []
        self.time = 0.0

    def resume(self, now: float) -> None:
        """The host has seen the end of what held it up."""
        begun = self.before.time if self.before is not None else 0.0
        self.time = max(now, self.host.through(begun, self.busy))
        for task in self.tasks:
            task.launched = self.host.through(self.time, task.launched)
