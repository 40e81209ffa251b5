"""GPUs whose multiprocessors run at a lower clock than others of their kind, as `nvidia-smi --lock-gpu-clocks` sets it.

Kernels that arithmetic bounds take longer; memory has a clock of its own, and links too (clocks.sm and clocks.mem of
`nvidia-smi --help-query-gpu`). What the power limit slows down anyway is not slowed down twice.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from sim.engine.effects import Effect, Steps, Time, check_end, during, effects


@effects("clock")
class Clock(Effect):
    """Arithmetic runs at `clock` of its usual clock, memory as ever."""

    component: ClassVar[str] = "lower clock"

    clock: float = Field(ge=0.1, le=1)  # part of the usual clock
    start: Time = Field(0.0, alias="from")  # when it begins
    end: Time | None = Field(None, alias="to")  # absent: never

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        check_end(self.start, self.end)
        return self

    def clocks(self) -> Steps:
        """One part, from `start` to `end`."""
        return during(self.clock, 1.0, self.start, self.end)
