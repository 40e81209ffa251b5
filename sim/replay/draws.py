"""The speeds that GPUs of one kind are drawn with: kernels of each take exp(σ·z) times as long as on the median GPU, with z
from a standard normal distribution. Plans of equally many ranks and places have the same draws.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sim.grid import Grid
from sim.replay.places import Floats

SEED = 0
SAMPLES = 8, 64  # draws: at least, at most
NUMBERS = 4096  # about as many factors per op as numpy works out in the time of one call; fewer ranks are drawn more often
KEPT = 2**21  # factors that are kept for the next plan


def samples_of(places: int) -> int:
    """How often the GPUs are drawn for a step whose cohorts have so many places, see `sim.replay.places`."""
    return int(np.clip(NUMBERS // places, *SAMPLES))


def drawn(world: int, samples: int, deviation: float | Floats) -> Floats:
    """Factors of the kernels of each rank, shape (ranks, samples). deviation: σ, of all ranks or of each, shape (ranks, 1)."""
    if isinstance(deviation, np.ndarray) or world * samples > KEPT:
        return _factors(world, samples, deviation)
    return _known(world, samples, deviation)


def _factors(world: int, samples: int, deviation: float | Floats) -> Floats:
    return np.exp(deviation * np.random.default_rng(SEED).standard_normal((world, samples)))


_known = lru_cache(maxsize=4)(_factors)


@lru_cache(maxsize=8)
def slowest_of_places(grid: Grid, inside: tuple[str, ...], deviation: float, samples: int | None = None) -> Floats:
    """The factors of the slowest rank of each place of each pipeline rank, where ranks along the axes `inside` meet inside
    blocks: shape (pipeline ranks, places, samples). Places are in the order of `sim.replay.places.Places`.
    samples: by default as many as these places ask for.
    """
    axes = [axis for axis, _ in reversed(grid.sizes)]
    degrees = [grid.degree(axis) for axis in axes]
    samples = samples or samples_of(grid.world // grid.size(("pp", *inside)))
    factors = drawn(grid.world, samples, deviation).reshape(*degrees, samples)
    meeting = tuple(place for place, axis in enumerate(axes) if axis in inside)
    slowest = factors.max(axis=meeting, keepdims=True)
    result: Floats = np.moveaxis(slowest, axes.index("pp"), 0).reshape(grid.degree("pp"), -1, samples)
    return result
