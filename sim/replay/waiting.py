"""How much longer a synchronous step is because GPUs of one kind are not quite alike: it waits for the slowest.

Kernels of each GPU take exp(σ·z) times as long as on the median GPU, with z from a standard normal distribution, once for the
whole step. The played step is worked out anew for each of some draws (`sim.replay.step`), the same draws for all plans of equally
many GPUs. What does not wait for kernels (launches, exposed transfers, a bubble that a faster stage fills) waits for nobody here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sim.replay.places import Floats
from sim.replay.step import StepReplay
from sim.timeline import Timeline
from topologies.links.topology import gpu_kind

SEED = 0
SAMPLES = 8, 64  # draws: at least, at most
NUMBERS = 4096  # about as many factors per op as numpy works out in the time of one call; fewer ranks are drawn more often
KEPT = 2**21  # factors that are kept for the next plan


@dataclass(frozen=True)
class GpuVariability:
    """What a step waits, on average, because GPUs of one kind are not quite alike."""

    gpus: float  # standard deviation of the logarithm of kernels' seconds among GPUs of one kind
    seconds: float  # by which the step is longer than with GPUs alike
    deviation: float  # of the step from its mean, as a part of it
    samples: int  # draws of all GPUs


def waiting(timeline: Timeline) -> GpuVariability:
    """What a played step waits for slower GPUs, by `Timeline.variability`. Raises UserError for steps that cannot be replayed."""
    replay = StepReplay(timeline)
    samples = int(np.clip(NUMBERS // replay.places.count, *SAMPLES))
    world, deviations = timeline.program.grid.world, timeline.variability
    if len(deviations) == 1:
        factors = _drawn(world, samples, deviations[0])
    else:
        kinds = gpu_kind(timeline.op_costs.topology, np.arange(world))
        factors = _factors(world, samples, np.array(deviations)[kinds][:, None])
    steps = replay.times(factors).steps
    if timeline.before is not None:  # each further period adds what the last one does
        steps = steps + timeline.periods * (steps - StepReplay(timeline.before).times(factors).steps)
    mean = float(steps.mean())
    seconds = max(0.0, mean - timeline.step) / timeline.program.steps
    return GpuVariability(max(deviations), seconds, float(steps.std()) / mean, samples)


def _drawn(world: int, samples: int, deviation: float) -> Floats:
    return (_known if world * samples <= KEPT else _factors)(world, samples, deviation)


def _factors(world: int, samples: int, deviation: float | Floats) -> Floats:
    return np.exp(deviation * np.random.default_rng(SEED).standard_normal((world, samples)))


_known = lru_cache(maxsize=4)(_factors)
