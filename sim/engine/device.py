"""A device: the kernels on its compute stream, and the collectives beside them, which slow them down."""

from __future__ import annotations

from typing import cast

from simpy import Environment, Event

from sim.clock import on_grid
from sim.engine.task import Stream, Task, cancel
from sim.pricing.block_costs import BlockCost


class Compute(Task):
    """A block of kernels. stretch: seconds by which collectives on the same device lengthened it; owed: by effect, the seconds by
    which this one did.
    """

    __slots__ = ("cost", "device", "owed", "stretch")

    def __init__(self, env: Environment, device: Device, cost: BlockCost) -> None:
        super().__init__(env)
        self.device, self.cost = device, cost
        self.stretch = 0.0
        self.owed: dict[str, float] | None = None

    def begin(self) -> None:
        """Run on the device."""
        self.device.compute(self)


class Device:
    """A GPU, or GPUs that do the same at the same times. One block of kernels runs at a time.

    slowdown: the factor by which kernels take longer while a collective runs beside them.
    """

    def __init__(self, env: Environment, slowdown: float = 1.0) -> None:
        self.env, self.slowdown = env, slowdown
        self.streams: dict[str, Stream] = {}
        self.events = 0  # scheduled so far
        self._working: list[float] = []  # of each collective that runs now, the part of its time in which it slows compute
        # of the block that runs: the event of its end, seconds left at `since` were it not slowed, whether it is slowed
        self._event: Event | None = None
        self._left = self._since = self._slow = 0.0

    def stream(self, name: str) -> Stream:
        """The stream of that name, made when it is first named."""
        stream = self.streams.get(name)
        if stream is None:
            stream = self.streams[name] = Stream()
        return stream

    def duration(self, task: Compute) -> float:
        """Seconds that a block takes from its start, were no collective beside it: launches may hold it up."""
        cost = task.cost
        return max(cost.busy, task.launched + cost.critical - task.start)

    def compute(self, task: Compute) -> None:
        """Start a block."""
        seconds = self.duration(task)
        slow = self._slow = min(1.0, sum(self._working))
        self._left, self._since = seconds, self.env.now
        self._expect(task, on_grid(seconds * self._factor(task, slow)) if slow else seconds)

    def _factor(self, task: Compute, slow: float) -> float:
        """The factor by which the block takes longer beside collectives that work for a part `slow` of the time: its kernels take
        longer, its own collectives and launches do not.
        """
        nominal = self.duration(task)
        return 1 + slow * (self.slowdown - 1) * task.cost.kernels / nominal if nominal else 1.0

    def _expect(self, task: Compute, seconds: float) -> None:
        self.events += 1
        event = self._event = self.env.timeout(seconds, task)
        event.callbacks.append(self._computed)

    def _computed(self, event: Event) -> None:
        task = cast(Compute, event.value)
        self._event = None
        if self._slow or self._since != task.start:
            self.settle(task)
        task.finish()

    def settle(self, task: Compute) -> None:
        """Say what lengthened a block that has ended."""
        task.stretch = self.env.now - task.start - self.duration(task)

    def communicate(self, working: float) -> None:
        """A collective starts: compute that is running slows down."""
        self._working.append(working)
        self._adapt()

    def fall_silent(self, working: float) -> None:
        """A collective ends: compute that is running recovers."""
        self._working.remove(working)
        self._adapt()

    def _adapt(self) -> None:
        event, slow, before = self._event, min(1.0, sum(self._working)), self._slow
        if event is None or slow == before:
            return
        now, task = self.env.now, cast(Compute, event.value)
        elapsed = (now - self._since) / self._factor(task, before)
        left = self._left = max(0.0, self._left - elapsed)
        self._since, self._slow = now, slow
        cancel(event)
        self._expect(task, on_grid(left * self._factor(task, slow)))
