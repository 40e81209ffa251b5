"""Kernels that take differently long on each GPU and at each time.

Durations are lognormal with mean 1, as the ratio of many small independent factors is: a synchronous step then waits for the
slowest of its ranks. Measured spreads: see `sim.engine.effects.speed`. A block, the kernels of a pass over a microbatch, is drawn
as a whole, or with `per step` a GPU once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sim.engine.effects import Effect, effects


@effects("jitter")
class Jitter(Effect):
    """Kernels take a random factor longer; `jitter` is its standard deviation."""

    component: ClassVar[str] = "jitter"

    jitter: float = Field(gt=0, le=1)  # standard deviation of the factor, whose mean is 1
    per: Literal["block", "step"] = "block"  # whether each block of kernels draws its own factor, or the GPU one for the step
    seed: int = Field(0, ge=0, le=2**31)  # of the draws

    def noise(self, gpu: int) -> Callable[[], float]:
        """Factors of one GPU, which depend on the seed and its number only."""
        sigma = math.sqrt(math.log1p(self.jitter**2))
        draw = np.random.default_rng((self.seed, gpu))

        def factor() -> float:
            return float(draw.lognormal(-(sigma**2) / 2, sigma))

        if self.per == "step":
            once = factor()
            return lambda: once
        return factor

    @property
    def constant(self) -> bool:
        """Where a GPU has one factor for the step."""
        return self.per == "step"

    @property
    def alike(self) -> bool:
        """No two GPUs."""
        return False
