"""The CPU thread that launches a device's work: in program order, and ahead of the device as far as nothing holds it up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from sim.engine.task import Task
from topologies.reading import UserError

Pause = tuple[float, float]  # when the thread loses its core, and for how many seconds
MOST = 10_000  # pauses that overlap, one with the next


class Pauses:
    """When a thread has no core: pauses in order, those that overlap as one. They may go on for ever, and are worked out as far
    as they are asked for. coming: by their beginning.
    """

    def __init__(self, coming: Iterable[Pause]) -> None:
        self._coming = iter(coming)
        self._known: list[Pause] = []
        self._next = next(self._coming, None)

    def __bool__(self) -> bool:
        return bool(self._known) or self._next is not None

    def __iter__(self) -> Iterator[Pause]:
        return self.since(-inf)

    def since(self, time: float) -> Iterator[Pause]:
        """Those that are not over at `time`, and perhaps the one before."""
        while self._next is not None and self._next[0] <= time:
            self._join(self._next)
        place = max(0, bisect_right(self._known, (time, inf)) - 1)
        while place < len(self._known) or self._next is not None:
            if place == len(self._known) and self._next is not None:
                self._join(self._next)
            yield self._known[place]
            place += 1

    def _join(self, pause: Pause) -> None:
        """Know one more, with all that overlap it."""
        start, seconds = pause
        for _ in range(MOST):
            self._next = next(self._coming, None)
            if self._next is None or self._next[0] > start + seconds:
                self._known.append((start, seconds))
                return
            seconds = max(start + seconds, sum(self._next)) - start
        raise UserError(f"effects: from {start:.3g} s on preemptions leave a thread no core: let them last less long")


class Host:
    """Launches tasks one after the other; it waits for nothing but what tasks that hold it up wait for.

    pauses: when other processes take its core (host preemption); start: when it begins.
    """

    __slots__ = ("_busy", "_held_up", "pauses")

    def __init__(self, pauses: Pauses | Sequence[Pause] = (), start: float = 0.0) -> None:
        self.pauses: Pauses | tuple[()] = pauses if isinstance(pauses, Pauses) else Pauses(sorted(pauses)) if pauses else ()
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
            for start, seconds in self.pauses.since(begin):
                if end <= start:
                    break
                end += max(0.0, start + seconds - max(begin, start))
        return end

    def more(self, launched: float, seconds: float) -> float:
        """How much longer than `seconds` the host takes from `launched` on, because it loses its core."""
        return self.through(launched, seconds) - launched - seconds if self.pauses else 0.0


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
        """A task is launched `task.launched` seconds of work after the host goes on, and begins no sooner than that is."""
        if self.over:
            task.launched = self.host.through(self.time, task.launched)
        else:
            self.tasks.append(task)
            task.waiting += task.holds is not self

    def resume(self, now: float) -> None:
        """The host has seen the end of what held it up."""
        begun = self.before.time if self.before is not None else 0.0
        self.over, self.time = True, max(now, self.host.through(begun, self.busy))
        tasks, self.tasks = self.tasks, []  # their device has this host: a circle that would outlive the player
        for task in tasks:
            self.add(task)
        for task in tasks:
            if task.holds is not self:
                task.waiting -= 1
                if not task.waiting:
                    task.ready()
