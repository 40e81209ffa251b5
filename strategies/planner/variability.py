"""How long a step takes when GPUs of one kind are not quite alike: each rank draws its own speed, the step waits for the slowest.

The step is played once, and worked out anew for each draw (`sim.replay.step`). Kernels of a GPU take exp(σ·z) times as long as on
the median GPU, with z from a standard normal distribution, once for the whole step; collectives and sends likewise, one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.replay.places import Floats
from sim.replay.step import StepReplay
from strategies.job import Job
from strategies.predict import simulate

GPUS = 0.02  # where neither the job nor its profile says, as shipped profiles of GPUs say (their part `variability`)
PERCENTILES = (10, 50, 90, 99)
AT_ONCE = 20_000_000  # numbers drawn at a time
FAST = 0.1  # factor of ranks that nobody shall wait for


@dataclass(frozen=True)
class Variability:
    """The spread of a step. Seconds; scaling: data parallel replicas -> part of the ideal speed that is left, on average."""

    ideal: float  # all GPUs as the median one
    mean: float
    percentiles: dict[int, float]
    gpus: float  # standard deviation of the logarithm of kernels' seconds
    collectives: float
    samples: int
    scaling: dict[int, float]

    @property
    def cost(self) -> float:
        """By which part the step is longer than the ideal one, on average."""
        return self.mean / self.ideal - 1


def variability(job: Job, gpus: float | None = None, collectives: float = 0.0, samples: int = 1000, seed: int = 0) -> Variability:
    """The spread of the step of `job`. gpus, collectives: standard deviations of the logarithm; None: as the job or its profile
    says. Raises UserError.
    """
    timeline = simulate(job)
    if gpus is None:
        gpus = max(timeline.variability) or GPUS
    replay = StepReplay(timeline)
    steps = np.concatenate(list(_steps(replay, gpus, collectives, samples, seed))) / timeline.program.steps
    ideal = timeline.step / timeline.program.steps
    replicas = _replicas(replay)
    scaling = {}
    for count in sorted({1 << power for power in range(20) if 1 << power < replicas.max() + 1} | {int(replicas.max()) + 1}):
        own = np.concatenate(list(_steps(replay, gpus, collectives, max(20, samples // 10), seed, replicas < count)))
        scaling[count] = float(timeline.step / own.mean())
    spread = {each: float(np.percentile(steps, each)) for each in PERCENTILES}
    return Variability(ideal, float(steps.mean()), spread, gpus, collectives, samples, scaling)


def _steps(
    replay: StepReplay, gpus: float, collectives: float, samples: int, seed: int, waited_for: NDArray[np.bool_] | None = None
) -> Iterator[Floats]:
    """Steps of all samples. waited_for: whether each rank is there; the others are so fast that nobody waits for them."""
    draw, world = np.random.default_rng(seed), replay.program.grid.world
    each = max(1, AT_ONCE // world)
    for first in range(0, samples, each):
        count = min(each, samples - first)
        kernels = np.exp(gpus * draw.standard_normal((world, count)))
        if waited_for is not None:
            kernels = np.where(waited_for[:, None], kernels, FAST)

        def transfers(_op: int, _places: int, count: int = count) -> Floats:
            return np.asarray(np.exp(collectives * draw.standard_normal((1, count))))

        yield replay.times(kernels, transfers if collectives else None).steps


def _replicas(replay: StepReplay) -> Floats:
    """The data parallel replica of each rank."""
    grid = replay.program.grid
    result = np.empty(grid.world)
    for number in range(grid.degree("dp")):
        result[grid.groups((), {"dp": number}).ravel()] = number
    return result
