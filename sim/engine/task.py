"""Work on streams: a task starts when all that it waits for has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simpy import Environment, Event


def cancel(event: Event | None) -> None:
    """Let a scheduled event pass without effect. SimPy takes no event out of its queue; one without callbacks does nothing."""
    if event is not None:
        event.callbacks = []


class Task:
    """One piece of work. Subclasses say in `begin` what it is, and call `finish` when it is over.

    waiting: how many tasks it waits for; followers: tasks that wait for it; launched: when the host has launched it, seconds;
    start, end: seconds; `end` is None as long as it has not ended; earliest: where that may be later than what it waits for says,
    puts its beginning off and says whether it has.
    """

    __slots__ = ("earliest", "end", "env", "followers", "holds", "launched", "start", "waiting")

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.waiting = 0
        self.followers: list[Task] = []
        self.launched = self.start = 0.0
        self.end: float | None = None
        self.earliest: Callable[[Task], bool] | None = None
        self.holds: Any = None  # what the host launches from this task on, when it waits for what the task waits for

    def wait_for(self, other: Task) -> None:
        """Start only after `other` has ended."""
        self.waiting += 1
        other.followers.append(self)

    def ready(self) -> None:
        """Everything that it waits for has ended."""
        if self.earliest is not None and self.earliest(self):
            return
        if self.holds is not None:
            self.holds.resume(self.env.now)
        self.start = self.env.now
        self.begin()

    def begin(self) -> None:
        """Do the work."""
        raise NotImplementedError

    def finish(self) -> None:
        """The work is done: what waited for nothing else starts."""
        self.end = self.env.now
        for follower in self.followers:
            follower.waiting -= 1
            if not follower.waiting:
                follower.ready()


def start(tasks: Iterable[Task]) -> None:
    """Begin with those of `tasks` that wait for nothing; the environment's run does the rest."""
    for task in [task for task in tasks if not task.waiting]:
        task.ready()


class Stream:
    """Tasks that run in the order in which they are added, as in CUDA."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Task | None = None

    def add(self, task: Task, after: Sequence[Task] = ()) -> Task:
        """Put `task` behind the stream's last one; it also waits for the tasks of `after`."""
        last = self.last
        self.last = task
        for other in dict.fromkeys(after) if len(after) > 1 else after:
            if other is not last:
                task.waiting += 1
                other.followers.append(task)
        if last is not None:
            task.waiting += 1
            last.followers.append(task)
        return task
