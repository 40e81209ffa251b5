"""GPUs whose multiprocessors run at a lower clock than others of their kind, as `nvidia-smi --lock-gpu-clocks` sets it.

Kernels that arithmetic bounds take longer; memory has a clock of its own, and links too (clocks.sm and clocks.mem of
`nvidia-smi --help-query-gpu`). What the power limit slows down anyway is not slowed down twice.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sim.engine.effects import LastingEffect, Steps, effects


@effects("clock")
class Clock(LastingEffect):
    """Arithmetic runs at `clock` of its usual clock, memory as ever."""

    component: ClassVar[str] = "lower clock"

    clock: float = Field(ge=0.1, le=1)  # part of the usual clock

    def clocks(self) -> Steps:
        """One part, from `start` to `end`."""
        return self.during(self.clock)
