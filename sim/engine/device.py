"""A device: the kernels on its compute stream, and the collectives beside them, which slow them down."""

from __future__ import annotations

from typing import cast

from simpy import Environment, Event

from sim.clock import on_grid
from sim.engine.host import Host
from sim.engine.task import Stream, Task, cancel
from sim.pricing.block_costs import BlockCost
from sim.program import Block


def kernels(seconds: float) -> BlockCost:
    """The cost of kernels in a row that are launched in no time."""
    return BlockCost(seconds, seconds, 0.0, {}, seconds)


class Compute(Task):
    """A block of kernels, `work`, at its price. stretch: seconds by which collectives on the same device lengthened it; owed: by
    effect, the seconds by which this one did.
    """

    __slots__ = ("cost", "device", "owed", "stretch", "work")

    def __init__(self, env: Environment, device: Device, cost: BlockCost, work: Block | None = None) -> None:
        super().__init__(env)
        self.device, self.cost, self.work = device, cost, work
        self.stretch = 0.0
        self.owed: dict[str, float] | None = None

    def begin(self) -> None:
        """Run on the device."""
        self.device.compute(self)

    def disturb(self) -> None:
        """A collective comes beside the kernels: those of a block that is one event are slowed down evenly."""


class Device:
    """A GPU, or GPUs that do the same at the same times. One block of kernels runs at a time.

    slowdown: the factor by which kernels take longer while a collective runs beside them. `host` launches its tasks.
    """

    def __init__(self, env: Environment, slowdown: float = 1.0, host: Host | None = None) -> None:
        self.env, self.slowdown, self.host = env, slowdown, host or Host()
        self.streams: dict[str, Stream] = {}
        self.scheduled: list[float] = []  # when each event so far was scheduled
        # of each collective that runs now, the part of its time in which it slows compute; above 1: more than others do
        self._working: list[float] = []
        # the block that runs: the event of its end, seconds left at `since` were it not slowed, whether it is slowed
        self._task: Compute | None = None
        self._event: Event | None = None
        self._left = self._since = self._slow = 0.0

    def stream(self, name: str) -> Stream:
        """The stream of that name, made when it is first named."""
        stream = self.streams.get(name)
        if stream is None:
            stream = self.streams[name] = Stream()
        return stream

    def cost(self, task: Compute) -> BlockCost:
        """What a block costs on this device now."""
        return task.cost

    def duration(self, task: Compute) -> float:
        """Seconds that a block takes from its start, were no collective beside it: launches may hold it up."""
        cost = self.cost(task)
        return max(cost.busy, task.launched + cost.critical - task.start)

    def compute(self, task: Compute) -> None:
        """Start a block, or go on with one that has run as it is priced since its start."""
        self._task, self._since = task, self.env.now
        self._left = self.duration(task) - (self._since - task.start)
        self._slow = self._slowed_now() if self._working else 0.0
        self._expect(self._left)

    def stop(self) -> None:
        """Let the block that runs go, which does not end."""
        cancel(self._event)
        self._task = self._event = None

    @property
    def is_undelayed(self) -> bool:
        """Whether the block that runs has done so as it is priced since its start."""
        task = self._task
        return task is not None and self._since == task.start and self.cost(task) is task.cost

    def _slowed_now(self) -> float:
        """How much of `slowdown` the collectives that run make: as much as the one that slows most, or one that always works."""
        return min(max(1.0, *self._working), sum(self._working)) if self._working else 0.0

    @property
    def beside_collectives(self) -> bool:
        """Whether collectives run that slow down kernels."""
        return bool(self._working) and self.slowdown != 1

    def _factor(self) -> float:
        """The factor by which the block takes longer beside collectives that work for a part of the time: its kernels take
        longer, its own collectives and launches do not.
        """
        if not self._slow:
            return 1.0
        task = cast(Compute, self._task)
        nominal = self.duration(task)
        return 1 + self._slow * (self.slowdown - 1) * self.cost(task).kernels / nominal if nominal else 1.0

    def _expect(self, seconds: float) -> None:
        """Schedule the end of the block. seconds: left, were it not slowed."""
        self.scheduled.append(self._since)
        event = self._event = self.env.timeout(on_grid(seconds * self._factor()) if self._slow else seconds)
        event.callbacks.append(self._computed)

    def _computed(self, _: Event) -> None:
        task = cast(Compute, self._task)
        self.settle(task)
        self._task = self._event = None
        task.finish()

    def settle(self, task: Compute) -> None:
        """Say what lengthened a block that ends now."""
        if self._slow or self._since != task.start:
            task.stretch = self.env.now - task.start - self.duration(task)

    def communicate(self, working: float) -> None:
        """A collective starts: compute that is running slows down."""
        self._working.append(working)
        if self._task is not None and self.slowdown != 1:
            self._task.disturb()
        self._adapt()

    def fall_silent(self, working: float) -> None:
        """A collective ends: compute that is running recovers."""
        self._working.remove(working)
        self._adapt()

    def _adapt(self) -> None:
        slow = self._slowed_now()
        if self._event is None or slow == self._slow:
            return
        self._advance()
        self._slow = slow
        cancel(self._event)
        self._expect(self._left if self._slow else on_grid(self._left))

    def _advance(self) -> None:
        """Note what the block has done until now."""
        self._left = max(0.0, self._left - (self.env.now - self._since) / self._factor())
        self._since = self.env.now
