"""A device on which effects act: what they cost is kept apart, by effect."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from simpy import Environment, Event

from sim.clock import on_grid
from sim.engine.device import Compute, Device
from sim.engine.task import cancel
from sim.pricing.block_costs import BlockCost
from sim.program import Join, SharedItems


class Cores:
    """`count` cores for processes that compute: while there are more of these, each gets an equal part. name: of what
    lengthens their kernels then.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.computing: dict[PerturbedDevice, int] = {}  # by device, its processes
        self.factor = 1.0  # by which kernels take longer now

    def take(self, device: PerturbedDevice) -> None:
        """The processes of a device begin to compute."""
        self.computing[device] = device.processes
        self._share()
        device.change(self.name, self.factor)

    def leave(self, device: PerturbedDevice) -> None:
        """They wait again."""
        del self.computing[device]
        self._share()

    def _share(self) -> None:
        factor = max(1.0, sum(self.computing.values()) / self.count)
        if factor != self.factor:
            self.factor = factor
            for device in list(self.computing):
                device.change(self.name, factor)


PREEMPTION = "preemption"  # what preempted hosts cost

# Kernels that a host is ahead of its GPU at most: of 10,000 of 190 us each a stream takes some 1,000 at 4 to 5 us a launch, and
# then one whenever one ends (forums.developer.nvidia.com/t/68937).
QUEUE = 1000

Price = Callable[
    [Compute, float, float], BlockCost
]  # of a block whose kernels take so many times as long, at a part of the clock


class PerturbedDevice(Device):
    """A device whose kernels take longer by effects that come and go. price: the cost of a block by the factor and the clock;
    processes: that do the same at the same times.
    """

    def __init__(self, env: Environment, slowdown: float, price: Price, processes: int = 1) -> None:
        super().__init__(env, slowdown)
        self.price, self.processes = price, processes
        self.cores: Cores | None = None  # that its processes share with others
        self.factors: dict[str, float] = {}  # by effect, by which kernels take longer now; infinite: they stand still
        self.clocks: dict[str, float] = {}  # by effect, the part of its clock at which the GPU runs now
        self.noises: dict[str, Callable[[], float]] = {}  # by effect, the factor of the next block
        # of the block that runs
        self._drawn: dict[str, float] = {}
        self._cost: BlockCost | None = None  # with all effects
        self._owed: dict[str, float] = {}  # seconds to each effect until `since`
        # kernels of the blocks that have ended; launched by a host that has no core now; and those launched, and when, by one
        # that had launched too few and got its core back
        self._ran = 0.0
        self._queued: float | None = None
        self._caught = (0.0, -math.inf)

    def cost(self, task: Compute) -> BlockCost:
        """What the block that runs costs under the effects of now."""
        cost = self._cost or task.cost
        late = self.host.more(task.launched, cost.host)
        return cost._replace(critical=cost.critical + late) if late else cost

    def compute(self, task: Compute) -> None:
        """Start a block."""
        if self.cores is not None:
            self.cores.take(self)
        self._drawn = {name: draw() for name, draw in self.noises.items()}
        self._owed = {}
        self._cost = self._priced(task)
        super().compute(task)
        if self._standing:
            cancel(self._event)
        elif self._queued is not None:
            self._run_dry(self._queued)

    def stop(self) -> None:
        """Let the block that runs go, which does not end."""
        super().stop()
        if self.cores is not None:
            self.cores.leave(self)

    def _computed(self, event: Event) -> None:
        self._ran += _launches(self._task)
        if self.cores is not None:
            self.cores.leave(self)
        super()._computed(event)

    @property
    def _standing(self) -> list[str]:
        """The effects by which kernels stand still now."""
        return [name for name, factor in self.factors.items() if factor == math.inf]

    def _acting(self) -> dict[str, float]:
        """The factor of each effect by which kernels run slower or quicker now."""
        return {name: factor for name, factor in {**self.factors, **self._drawn}.items() if factor not in (1.0, math.inf)}

    def _priced(self, task: Compute) -> BlockCost:
        """The cost of a block under the effects of now. What is drawn for a block lengthens its kernels, and does not change
        which of them wait for their launch.
        """
        factor = math.prod(factor for name, factor in self._acting().items() if name not in self._drawn)
        clock = math.prod(self.clocks.values())
        cost = task.cost if factor == clock == 1 else self.price(task, factor, clock)
        drawn = math.prod(self._drawn.values())
        return cost if drawn == 1 else cost._replace(busy=on_grid(cost.busy + (drawn - 1) * cost.kernels))

    def change(self, name: str, factor: float) -> None:
        """From now on kernels take `factor` times as long by an effect."""
        self._alter(self.factors, name, factor)

    def clock(self, name: str, part: float) -> None:
        """From now on an effect leaves `part` of the GPU's clock."""
        self._alter(self.clocks, name, part)

    def lose_core(self, factor: float) -> None:
        """The host loses its core (infinite), or has it again: the GPU runs what was launched, and then stands still."""
        if factor == math.inf:
            count, launched = _launches(self._task), self._caught[0]
            if self._task is not None and self._task.cost.host:
                launched += count * (self.env.now - self._caught[1]) / self._task.cost.host
            else:
                launched = math.inf
            self._queued = min(self._position() + QUEUE, launched)
            self._run_dry(self._queued)
            return
        self._queued = None
        if PREEMPTION in self._standing:
            self._caught = self._position(), self.env.now
            self.change(PREEMPTION, 1.0)

    def _position(self) -> float:
        """Kernels that the GPU has run."""
        if self._task is None:
            return self._ran
        self._advance()
        whole = self.duration(self._task)
        return self._ran + _launches(self._task) * (1 - self._left / whole if whole else 0.0)

    def _run_dry(self, queued: float) -> None:
        """Stand still after so many kernels, if that is in the block that runs."""
        task, count = self._task, _launches(self._task)
        if task is not None and queued < self._ran + count:
            left = max(0.0, queued - self._position()) / count * self.duration(task) * self._factor()
            self.env.timeout(on_grid(left), (task, queued)).callbacks.append(self._dry)

    def _dry(self, event: Event) -> None:
        if (self._task, self._queued) == event.value:
            self.change(PREEMPTION, math.inf)

    def _alter(self, values: dict[str, float], name: str, value: float) -> None:
        task = self._task
        if task is None:
            values[name] = value
            return
        self._advance()
        before = self.duration(task)
        values[name] = value
        self._cost = self._priced(task)
        self._left *= self.duration(task) / before if before else 1.0
        cancel(self._event)
        if not self._standing:
            self._slow = self._slowed_now()
            self._expect(self._left if self._slow else on_grid(self._left))

    def _adapt(self) -> None:
        if not self._standing:
            super()._adapt()

    def _advance(self) -> None:
        """Note what the block has done until now, and what it owes to which effect."""
        task, passed, standing = self._task, self.env.now - self._since, self._standing
        assert task is not None
        if standing:
            self._owe(standing[0], passed)
            self._since = self.env.now
            return
        done = passed / self._factor()
        super()._advance()
        whole, usual = self.duration(task), _usual(task)
        more = done * (1 - usual / whole) if whole else 0.0
        acting = list(self._acting().items())
        lower = next((name for name, part in self.clocks.items() if part != 1), None)
        last = lower or (acting.pop()[0] if acting else PREEMPTION)  # what a lower clock makes of it differs by kernel
        product, rest = 1.0, more
        for effect, factor in acting:  # one after the other, as far as kernels go
            part = done / whole * task.cost.kernels * product * (factor - 1) if whole else 0.0
            self._owe(effect, part)
            product, rest = product * factor, rest - part
        if rest:
            self._owe(last, rest)

    def _owe(self, effect: str, seconds: float) -> None:
        self._owed[effect] = self._owed.get(effect, 0.0) + seconds

    def settle(self, task: Compute) -> None:
        """Say what lengthened a block that ends now: effects, and collectives beside it."""
        slowed = self._slow or any(self._working)
        self._advance()
        more = self.env.now - task.start - _usual(task)
        owed = {name: on_grid(seconds) for name, seconds in self._owed.items()}
        rest = more - sum(owed.values())
        if owed and not slowed and abs(rest) < 1e-9 * max(1.0, self.env.now - task.start):  # what rounding left
            owed[max(owed, key=lambda name: abs(owed[name]))] += rest
            rest = 0.0
        task.owed, task.stretch = owed or None, rest


def _launches(task: Compute | None) -> int:
    """Kernels of a block, and collectives inside of it."""
    return 0 if task is None or task.work is None else sum(times * _launched(items) for times, items in task.work.runs)


@lru_cache(maxsize=4096)
def _launched(items: SharedItems) -> int:
    return sum(not isinstance(item, Join) for item in items)


def _usual(task: Compute) -> float:
    """Seconds that the block would take from its start without any effect."""
    return max(task.cost.busy, task.launched + task.cost.critical - task.start)
