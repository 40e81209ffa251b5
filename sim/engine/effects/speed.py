"""GPUs that are slower than others of their kind, all the time or for a while.

Among GPUs of one kind the same work takes 8 % longer on average than on the fastest and up to 22 % longer; the slowest outliers
take 1.5 times as long as the median (Sinha et al. 2022, "Not All GPUs Are Created Equal", arXiv:2208.11035: five clusters,
18,800 hours). Of 12,288 GPUs 0.5 % were on machines about 10 % slow (MegaScale, arXiv:2402.15627).
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from sim.engine.effects import Effect, Steps, Time, check_end, during, effects


@effects("speed")
class Speed(Effect):
    """Kernels run at `speed` of their usual speed: 0.9 makes each of them take 1 / 0.9 as long."""

    component: ClassVar[str] = "slower GPU"

    speed: float = Field(gt=0.001, le=1)  # part of the usual speed
    start: Time = Field(0.0, alias="from")  # when it begins
    end: Time | None = Field(None, alias="to")  # absent: never

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        check_end(self.start, self.end)
        return self

    def kernels(self) -> Steps:
        """One factor, from `start` to `end`."""
        return during(1 / self.speed, 1.0, self.start, self.end)
