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

    __slots__ = ("_busy", "_held_up", "pauses")

    def __init__(self, pauses: Sequence[Pause] = (), start: float = 0.0) -> None:
        self.pauses = _joined(pauses)
        self._busy = start  # seconds of work since the latest resumption
        self._held_up: HeldLaunches | None = None

    def launch(self, task: Task, ahead: float = 0.0, behind: float = 0.0, holds: bool = False) -> None:
        """Launch `task` next. ahead, behind: seconds of the host before it is launched and after that.

        holds: the host first waits for what the task waits for.
        """
        if holds:
            task.holds = self._held_up = HeldLaunches(self, self._held_up, self._busy)
            self._busy = 0.0
        self._busy += ahead
        task.launched = self._busy
        if self._held_up is not None:
            self._held_up.add(task)
        elif self.pauses:
            task.launched = self.through(0.0, self._busy)
        self._busy += behind

    def work(self, seconds: float) -> None:
        """Do something else before the next launch."""
        self._busy += seconds

    def resume_at(self, time: float) -> HeldLaunches:
        """The host was held up until `time`."""
        self._held_up, self._busy = HeldLaunches(self, self._held_up, self._busy), 0.0
        self._held_up.over, self._held_up.time = True, time
        return self._held_up

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
    """What a host waits for before it goes on, and launches `tasks`. before: what held it up before; busy: its seconds of work
    since then; time: when it goes on, once that is `over`.
    """

    __slots__ = ("before", "busy", "host", "over", "tasks", "time")

    def __init__(self, host: Host, before: HeldLaunches | None, busy: float) -> None:
        self.host, self.before, self.busy = host, before, busy
        self.tasks: list[Task] = []
        self.over, self.time = False, 0.0

    def add(self, task: Task) -> None:
        """A task is launched `task.launched` seconds of work after the host goes on."""
        if self.over:
            task.launched = self.host.through(self.time, task.launched)
        else:
            self.tasks.append(task)

    def resume(self, now: float) -> None:
        """The host has seen the end of what held it up."""
        begun = self.before.time if self.before is not None else 0.0
        self.over, self.time = True, max(now, self.host.through(begun, self.busy))
        for task in self.tasks:
            self.add(task)
