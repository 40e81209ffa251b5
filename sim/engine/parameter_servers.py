"""Parameter servers over many steps: workers compute, push gradients, servers update, workers pull parameters.

Li et al. 2014 (OSDI, "Scaling distributed machine learning with the parameter server"). Synchronous (bound 0): servers update
once all gradients of a step are there. Asynchronous (bound None): each gradient updates by itself, and its worker goes on.
Bounded staleness (Ho et al. 2013, NIPS, "stale synchronous parallel"): asynchronous, but no worker starts a step more than
`bound` steps ahead of the slowest.

What is simulated: compute times that vary at random, the links of the servers and of the workers, updates one after the other.
What is not: how staleness changes convergence; summing gradients in a synchronous step, which servers do while they arrive.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event

from sim.clock import on_grid
from sim.engine.task import cancel

TICK = 2.0**-40  # seconds: see sim.clock


class Pool:
    """Transfers over one link of `capacity`, each at most at `most` bytes per second: max-min fair, as in `sim.engine.network`.

    All transfers have the same rate, so that a transfer ends when the bytes that each has carried reach a level known at its
    start (processor sharing in virtual time): a start or an end costs log n, where the network of the engine costs n (64 workers
    over 100 steps: 0.1 s here, 1.1 s there; 256 over 20 steps: 0.1 s and 29 s).
    """

    def __init__(self, env: Environment, capacity: float, most: float) -> None:
        self.env, self.capacity, self.most = env, capacity, most
        self.carried = 0.0  # bytes, of all
        self._level = self._since = self._rate = 0.0  # bytes that each has carried, when, and how fast it grows
        self._present: list[tuple[float, int, Event]] = []  # (level of its end, number, event)
        self._started = 0
        self._timer: Event | None = None

    def carry(self, size: float) -> Event:
        """An event at the moment when `size` bytes from now have left."""
        event = self.env.event()
        self._advance()
        self._started += 1
        self.carried += size
        heappush(self._present, (self._level + size, self._started, event))
        self._expect()
        return event

    def _advance(self) -> None:
        now = self.env.now
        self._level = self._level + self._rate * (now - self._since) if self._present else 0.0
        self._since = now

    def _expect(self) -> None:
        cancel(self._timer)
        self._timer = None
        if self._present:
            self._rate = min(self.most, self.capacity / len(self._present))
            self._timer = self.env.timeout(on_grid(max(0.0, self._present[0][0] - self._level) / self._rate))
            self._timer.callbacks.append(self._ended)

    def _ended(self, _: Event) -> None:
        self._advance()
        self._level = max(self._level, self._present[0][0])
        near = self._level + self._rate * TICK + 1e-9 * self._level
        while self._present and self._present[0][0] <= near:
            heappop(self._present)[2].succeed()
        self._timer = None
        self._expect()


@dataclass(frozen=True)
class Setting:
    """n workers and the servers, which are alike and work in step: a push goes to all of them at once.

    Bytes are of the whole model; bandwidths are `into` and `out` of all servers together, and at most `worker` of one worker.
    """

    workers: int
    compute: float  # mean seconds of a forward and backward pass
    gradient: float  # bytes
    parameters: float  # bytes
    into: float
    out: float
    worker: float
    latency: float = 0.0  # seconds of a message
    update: float = 0.0  # seconds of one update of all servers side by side


@dataclass(frozen=True)
class Staleness:
    """Staleness of a gradient: updates by other workers between the pull of its parameters and its own update, from each worker's
    second step on.
    """

    mean: float
    p50: float
    p99: float
    largest: int
    histogram: dict[int, int]  # updates -> gradients
    ahead: int  # most steps by which a worker that started a step was ahead of the slowest


@dataclass(frozen=True)
class Played:
    """The result of a run. Fractions are of the whole time."""

    seconds: float
    gradients_per_second: float  # of all workers together
    staleness: Staleness
    pushing: float  # of the capacity into the servers
    pulling: float  # of the capacity out of them
    updating: float  # of the servers' time
    computing: float  # of the workers' time


def play(setting: Setting, steps: int, bound: int | None = None, jitter: float = 0.0, seed: int = 0) -> Played:
    """`steps` steps of every worker.

    bound: 0 synchronous, None asynchronous, otherwise bounded staleness. jitter: standard deviation of compute times over their
    mean (log-normal); every (worker, step) has its own time, which depends on `seed` alone.
    """
    rng = np.random.default_rng(seed)
    spread = np.sqrt(np.log1p(jitter**2))
    factor = np.exp(spread * rng.standard_normal((setting.workers, steps)) - spread**2 / 2)
    return _Play(setting, steps, bound, setting.compute * factor).result()


class _Play:
    """SimPy processes of the workers, and the state of the servers."""

    def __init__(self, setting: Setting, steps: int, bound: int | None, compute: NDArray[np.float64]) -> None:
        self.setting, self.steps, self.bound = setting, steps, bound
        self.env = Environment()
        self.into = Pool(self.env, setting.into, setting.worker)
        self.out = Pool(self.env, setting.out, setting.worker)
        self.free = 0.0  # when the servers have done all updates that they have
        self.updates = 0
        self.version = 0
        self.done = [0] * setting.workers  # steps of each worker that are in the parameters
        self.at = [setting.workers] + [0] * steps  # by number of steps: how many workers have done as many
        self.slowest = 0
        self.waiting: list[tuple[int, int, Event]] = []  # (steps that all must have done, worker, event)
        self.stale: list[int] = []
        self.ahead = 0
        self.computing = float(compute.sum())
        for worker, seconds in enumerate(compute.tolist()):
            self.env.process(self._worker(worker, seconds))
        self.env.run()

    def _worker(self, worker: int, seconds: list[float]) -> Generator[Event, None, None]:
        env, setting = self.env, self.setting
        read = 0  # the version of the parameters that it has
        for step, compute in enumerate(seconds):
            self.ahead = max(self.ahead, step - self.slowest)
            yield env.timeout(on_grid(compute))
            yield self.into.carry(setting.gradient)
            if setting.latency:
                yield env.timeout(on_grid(setting.latency))
            if self.bound == 0:
                yield from self._together(worker, step)
            else:
                yield self._updated()
            if step:
                self.stale.append(self.version - read)
            if self.bound != 0:
                self.version += 1
                self._has_done(worker)
                if self.bound is not None:
                    yield self._all_have(step + 1 - self.bound, worker)
            read = self.version
            if setting.latency:
                yield env.timeout(on_grid(setting.latency))
            yield self.out.carry(setting.parameters)

    def _updated(self) -> Event:
        """An event at the end of one more update; updates run one after the other."""
        self.updates += 1
        self.free = max(self.free, self.env.now) + on_grid(self.setting.update)
        return self.env.timeout(self.free - self.env.now)

    def _together(self, worker: int, step: int) -> Generator[Event, None, None]:
        """Wait for the only update of the step, which the last worker starts; no gradient is stale."""
        self._has_done(worker)
        yield self._all_have(step + 1, worker)
        if self.updates == step:
            self._updated()
        yield self.env.timeout(self.free - self.env.now)

    def _has_done(self, worker: int) -> None:
        done = self.done[worker]
        self.done[worker] += 1
        self.at[done] -= 1
        self.at[done + 1] += 1
        while self.slowest < self.steps and not self.at[self.slowest]:
            self.slowest += 1
        while self.waiting and self.waiting[0][0] <= self.slowest:
            heappop(self.waiting)[2].succeed()

    def _all_have(self, steps: int, worker: int) -> Event:
        """An event when every worker has done `steps` steps."""
        event = self.env.event()
        if self.slowest >= steps:
            return event.succeed()
        heappush(self.waiting, (steps, worker, event))
        return event

    def result(self) -> Played:
        """The result."""
        seconds, setting = self.env.now, self.setting
        stale = np.array(self.stale or [0])
        values, counts = np.unique(stale, return_counts=True)
        histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
        p50, p99 = np.percentile(stale, [50, 99]).tolist()
        return Played(
            seconds=seconds,
            gradients_per_second=setting.workers * self.steps / seconds,
            staleness=Staleness(float(stale.mean()), p50, p99, int(stale.max()), histogram, self.ahead),
            pushing=self.into.carried / setting.into / seconds,
            pulling=self.out.carried / setting.out / seconds,
            updating=self.updates * setting.update / seconds,
            computing=self.computing / setting.workers / seconds,
        )
