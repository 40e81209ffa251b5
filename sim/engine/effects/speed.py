"""GPUs that are slower than others of their kind, all the time or for a while.

Among GPUs of one kind the same work takes 8 % longer on average than on the fastest and up to 22 % longer; the slowest outliers
take 1.5 times as long as the median (Sinha et al. 2022, "Not All GPUs Are Created Equal", arXiv:2208.11035: five clusters,
18,800 hours). Of 12,288 GPUs 0.5 % were on machines about 10 % slow (MegaScale, arXiv:2402.15627).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sim.engine.effects import LastingEffect, Steps, effects


@effects("speed")
class Speed(LastingEffect):
    """Kernels run at `speed` of their usual speed: 0.9 makes each of them take 1 / 0.9 as long."""

    component: ClassVar[str] = "slower GPU"

    speed: float = Field(gt=0.001, le=1)  # part of the usual speed

    def kernels(self) -> Steps:
        """One factor, from `start` to `end`."""
        return self.during(1 / self.speed)
