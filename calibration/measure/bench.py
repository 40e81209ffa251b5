"""How a thing is timed: warmed up, on all ranks at once, many times, with an eye on who else uses the machine.

Imports torch: import this module inside the function that needs it.

On a GPU a repetition is timed by CUDA events on the stream, on a CPU by the clock; a computation of one thread by its CPU time,
which is the same when nobody takes its core away, and still right when somebody does. Foreign use is what the machine's cores
were busy with (/proc/stat) beyond the CPU time of the ranks themselves.
"""

from __future__ import annotations

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

from calibration.launch.place import Place
from calibration.measure.interference import busy

Array = NDArray[np.float64]
Action = Callable[[], Any]
LEAST, MOST = 5, 400  # repetitions
TICK = 2e-4  # seconds that a timed stretch lasts at least: shorter actions are timed several at a time
WINDOW = 0.4  # seconds
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


@dataclass
class Bench:
    """One rank's side of the measurements. budget: seconds for the repetitions of a case."""

    place: Place
    budget: float
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
        return torch.device("cuda", self.place.local_rank) if self.place.device == "cuda" else torch.device("cpu")

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
        """Wait for the GPU."""
        if self.place.device == "cuda":
            torch.cuda.synchronize()

    def repetitions(self, action: Action, extra: float = 0.0, least: int = LEAST) -> tuple[int, float]:
        """How often `action` fits the budget, the same on every rank, and about how long it takes; warms it up."""
        for _ in range(2):
            action()
        self.finish()
        start = time.perf_counter()
        action()
        self.finish()
        about = float(self.gather([time.perf_counter() - start]).max())
        return int(np.clip(self.budget / max(about + extra, 1e-7), least, MOST)), about

    @property
    def clock(self) -> Callable[[], float]:
        """Of computations that wait for nobody."""
        return time.process_time if self.place.device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def times(
        self,
        action: Action,
        count: int,
        before: Action | None = None,
        batch: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Array:
        """Seconds of each of `count` stretches of `batch` actions, per action; `before` is run, not timed, ahead of each."""
        if self.place.device == "cuda":
            return self._on_gpu(action, count, before, batch)
        seconds = np.empty(count)
        for number in range(count):
            if before is not None:
                before()
            start = clock()
            for _ in range(batch):
                action()
            seconds[number] = clock() - start
        return seconds / batch

    def _on_gpu(self, action: Action, count: int, before: Action | None, batch: int) -> Array:
        marks = []
        for _ in range(count):
            if before is not None:
                before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(batch):
                action()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return np.array([1e-3 * start.elapsed_time(end) for start, end in marks]) / batch

    def kernel(self, action: Action) -> Reading:
        """Seconds of a computation, while every rank runs the same: the mean over ranks of the median over repetitions."""
        _, about = self.repetitions(action)
        batch = max(1, int(TICK / max(about, 1e-7)))
        count = int(np.clip(self.budget / max(about * batch, 1e-7), LEAST, MOST))
        self.barrier()
        mine = self.times(action, count, batch=batch, clock=self.clock)
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


def cold(make: Callable[[], Any], size: float, room: float = 96e6) -> Iterator[Any]:
    """Copies of operands in turn, so many that none is still in a cache when it comes again."""
    copies = [make() for _ in range(int(np.clip(room / max(size, 1.0), 1, 16)))]
    while True:
        yield from copies


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
