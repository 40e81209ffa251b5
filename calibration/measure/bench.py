"""How a thing is timed: warmed up, on all ranks at once, many times, with an eye on who else uses the machine.

Imports torch: import this module inside the function that needs it.

How a repetition is timed is the device's own (`calibration.devices`). Foreign use is what the machine's cores
were busy with (/proc/stat) beyond the CPU time of the ranks themselves.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from calibration.devices import ComputeDevice
from calibration.launch.place import Place
from calibration.measure.interference import busy

Array = NDArray[np.float64]
Action = Callable[[], Any]
LEAST, MOST = 5, 400  # repetitions
TICK = 2e-4  # seconds that a timed stretch lasts at least: shorter actions are timed several at a time
WINDOW = 0.4  # seconds
STRETCHES = 5  # of launches
ROOM, CACHES = 9.6e7, 3.0  # bytes that operands are taken from in turn: at least, and as a multiple of the cache
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
TRIM = 0.1  # share of repetitions left out at either end of a mean


@dataclass(frozen=True)
class Reading:
    """What a case gives: seconds (or bytes), the least of the ranks, relative spread, repetitions."""

    value: float
    least: float = 0.0
    spread: float = 0.0
    count: int = 1


@dataclass(frozen=True)
class Probe:
    """A case and how it is measured; every rank calls `run` at the same time."""

    part: str
    case: Mapping[str, str | float]
    run: Callable[[Bench], Reading]
    context: Literal["alone", "step"] = "alone"
    takes: float = 0.0  # bytes of device memory, besides ROOM
    rounds: int = 10  # at most: of a quick look, what is dear and seldom used is measured once


@dataclass
class Bench:
    """One rank's side of the measurements. budget: seconds for the repetitions of a case; pace: the part of it, and of the least
    repetitions of a case, that is left for each.
    """

    place: Place
    budget: float
    pace: float = 1.0
    host: Array = field(init=False)  # of each rank, a number per machine

    def __post_init__(self) -> None:
        names: list[Any] = [None] * self.place.world
        if dist.is_initialized():
            dist.all_gather_object(names, socket.gethostname())
        else:
            names = [socket.gethostname()]
        self.host = np.array([names.index(name) for name in names], float)

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        where: torch.device = self.place.compute.torch_device
        return where

    @property
    def dtype(self) -> torch.dtype:
        """What the device trains in."""
        return DTYPES[self.place.compute.precisions()[0]]

    @property
    def room(self) -> float:
        """Bytes that operands in turn must overflow, so that none is still in a cache when it comes again."""
        return max(ROOM, CACHES * self.place.compute.cache())

    def gather(self, values: Sequence[float]) -> Array:
        """Every rank's values: shape (world, n)."""
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.place.world == 1:
            return np.asarray(mine.cpu().numpy())[None]
        whole = [torch.empty_like(mine) for _ in range(self.place.world)]
        dist.all_gather(whole, mine)
        return np.stack([tensor.cpu().numpy() for tensor in whole])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])

    def finish(self) -> None:
        """Wait for the device."""
        self.place.compute.synchronise()

    def repetitions(self, action: Action, extra: float = 0.0, least: int = LEAST) -> tuple[int, float]:
        """How often `action` fits the budget, the same on every rank, and about how long it takes; warms it up."""
        for _ in range(2):
            action()
        self.finish()
        start = time.perf_counter()
        action()
        self.finish()
        about = float(self.gather([time.perf_counter() - start]).max())
        return int(np.clip(self.pace * self.budget / max(about + extra, 1e-7), max(LEAST, self.pace * least), MOST)), about

    @property
    def clock(self) -> Callable[[], float]:
        """Of computations that wait for nobody."""
        return self.place.compute.clock()

    def times(
        self,
        action: Action,
        count: int,
        before: Action | None = None,
        batch: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Array:
        """Seconds of each of `count` stretches of `batch` actions, per action; `before` is run, not timed, ahead of each."""
        return self.place.compute.times(action, count, before, batch, clock)

    def launching(self, action: Action, launches: int) -> Reading:
        """Seconds of this rank's host for each of the `launches` that one action makes, which nobody waits for meanwhile: the
        median of several stretches.
        """
        result = []
        for _ in range(STRETCHES):
            self.finish()
            start = self.clock()
            action()
            result.append((self.clock() - start) / launches)
            self.finish()
        middle = sorted(result)[STRETCHES // 2]
        return Reading(middle, middle, (max(result) - min(result)) / middle, STRETCHES)

    def cold(self, make: Callable[[], Any], size: float) -> Iterator[Any]:
        """Copies of operands of so many bytes in turn, so many that none is still in a cache when it comes again."""
        copies = [make() for _ in range(int(np.clip(math.ceil(self.room / max(size, 1.0)), 1, self.place.compute.copies)))]
        while True:
            yield from copies

    def kernel(self, action: Action, on: ComputeDevice | None = None) -> Reading:
        """Seconds of a computation, while every rank runs the same: the mean over ranks of the median over repetitions.

        on: where it runs, if that is not the rank's device.
        """
        where = on or self.place.compute
        _, about = self.repetitions(action)
        batch = max(1, int(TICK / max(about, 1e-7)))
        count = int(np.clip(self.pace * self.budget / max(about * batch, 1e-7), LEAST, MOST))
        self.barrier()
        mine = where.times(action, count, None, batch, where.clock())
        both = self.gather([float(np.median(mine)), spread(mine)])
        return Reading(float(both[:, 0].mean()), float(both[:, 0].min()), float(both[:, 1].max()), count)


def spread(values: Array) -> float:
    """Interquartile range over the median."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float((high - low) / middle) if middle > 0 else 0.0


def trimmed(values: Array) -> float:
    """Mean without the extreme repetitions: waiting for others counts, a single hiccup does not."""
    ordered = np.sort(values)
    cut = int(TRIM * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


class Watch:
    """Foreign use of the machines' CPUs. The system counts in hundredths of a second: it is asked about WINDOW or more."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.marks: list[tuple[float, float, float]] = []
        self.look()

    def look(self) -> None:
        """A case begins."""
        self.marks = [*self.marks[-50:], (time.perf_counter(), busy(), time.process_time())]

    def foreign(self) -> float:
        """Share of the cores' time that went to others since the case began, and some time before a short one; of the machine
        that was disturbed most. Call on every rank.
        """
        now = time.perf_counter()
        old = [number for number, mark in enumerate(self.marks) if mark[0] <= now - WINDOW]
        back = len(self.marks) - (old[-1] if old else 0)  # marks: as many on every rank
        at, begun, own = self.marks[-int(self.bench.gather([back]).max())]
        table = self.bench.gather([busy() - begun, time.process_time() - own, now - at])
        worst = 0.0
        for machine in np.unique(self.bench.host):
            used, spent, wall = table[self.bench.host == machine].T
            worst = max(worst, (used.max() - spent.sum()) / ((os.cpu_count() or 1) * max(wall.max(), 1e-3)))
        return max(0.0, worst)
