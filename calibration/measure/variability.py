"""How far ranks come apart that do the same work at the same time: who meets them waits for the slowest.

Imports torch: import this module inside the function that needs it.

All ranks start a stretch of equal work together, and each says how long it took by the clock on the wall, as a collective that
follows would see it. GPUs of one kind differ in what they draw and in how warm they are, processes on cores in whose turn it is
and in what the others leave of caches and memory.
"""

from __future__ import annotations

import time

import numpy as np

from calibration.measure.bench import LEAST, Array, Bench, Probe, Reading, spread, trimmed
from calibration.measure.grid import Grid
from calibration.measure.training import piece

STRETCH = 0.15  # seconds: about as long as steps go between two meetings
STRETCHES = 24


def probes(grid: Grid) -> list[Probe]:
    """One."""

    def run(bench: Bench) -> Reading:
        action = piece(bench, grid.side)
        count = max(1, round(STRETCH / bench.repetitions(action)[1]))
        seconds = np.empty((max(LEAST, round(bench.pace * STRETCHES)), bench.place.world))
        for number in range(len(seconds)):
            bench.barrier()
            mine = float(bench.times(action, 1, batch=count, clock=time.perf_counter)[0])
            seconds[number] = bench.gather([mine])[:, 0]
        each = deviations(seconds)
        value = max(0.0, trimmed(each))
        return Reading(value, value, spread(each), len(each))

    return [Probe("variability", {}, run, rounds=2)]


def deviations(seconds: Array) -> Array:
    """Of each stretch, how much longer the slowest rank took than the mean, in units of what the slowest of so many takes longer
    that are normally distributed with standard deviation 1: its mean over stretches is the deviation with which the mean wait for
    the slowest is the measured one. seconds: (stretches, ranks).
    """
    longer: Array = seconds.max(axis=1) / seconds.mean(axis=1) - 1
    return longer / slowest(seconds.shape[1])


def slowest(count: int) -> float:
    """The expected largest of so many standard normal numbers: 0.564 of two, 1.423 of eight."""
    from scipy.integrate import quad
    from scipy.stats import norm

    return float(quad(lambda z: z * count * norm.pdf(z) * norm.cdf(z) ** (count - 1), -10, 10)[0])
