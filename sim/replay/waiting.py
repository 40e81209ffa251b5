"""How much longer a synchronous step is because GPUs of one kind are not quite alike: it waits for the slowest.

Kernels of each GPU take exp(σ·z) times as long as on the median GPU, with z from a standard normal distribution, once for the
whole step. The played step is worked out anew for each of some draws (`sim.replay.step`), the same draws for all plans of equally
many GPUs. What does not wait for kernels (launches, exposed transfers, a bubble that a faster stage fills) waits for nobody here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.replay.draws import drawn, samples_of, slowest_of_places
from sim.replay.step import Factors, replay_of
from sim.timeline import Timeline
from topologies.links.topology import gpu_kind


@dataclass(frozen=True)
class GpuVariability:
    """What a step waits, on average, because GPUs of one kind are not quite alike."""

    gpus: float  # standard deviation of the logarithm of kernels' seconds among GPUs of one kind
    seconds: float  # by which the step is longer than with GPUs alike
    deviation: float  # of the step from its mean, as a part of it
    samples: int  # draws of all GPUs


def waiting(timeline: Timeline, samples: int | None = None) -> GpuVariability:
    """What a played step waits for slower GPUs, by `Timeline.variability`. samples: draws of all GPUs, by default as many as its
    places ask for; steps of one job that were played in several ways are compared by equally many. Raises UserError for steps
    that cannot be replayed.
    """
    replay = replay_of(timeline)
    samples = samples or samples_of(replay.places.count)
    factors = _factors(timeline, replay.places.inside, samples)
    steps = replay.times(factors).steps
    mean = float(steps.mean())
    seconds = max(0.0, mean - timeline.step) / timeline.program.steps
    return GpuVariability(max(timeline.variability), seconds, float(steps.std()) / mean, samples)


def _factors(timeline: Timeline, inside: tuple[str, ...], samples: int) -> Factors:
    """The factors of all ranks, or, where each pipeline rank has one program, of their places (see `slowest_of_places`)."""
    program, deviations = timeline.program, timeline.variability
    grid = program.grid
    if len(deviations) > 1:
        kinds = gpu_kind(timeline.op_costs.topology, np.arange(grid.world))
        return drawn(grid.world, samples, np.array(deviations)[kinds][:, None])
    if program.allotments or not all(cohort.at.keys() <= {"pp"} for cohort in program.cohorts):
        return drawn(grid.world, samples, deviations[0])
    slowest = slowest_of_places(grid, tuple(sorted(inside)), deviations[0], samples)
    return [slowest[cohort.at.get("pp", 0)] for cohort in program.cohorts]
