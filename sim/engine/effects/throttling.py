"""Power or thermal throttling that sets in after a while and stays.

A GPU at its limit of power or temperature lowers its clock step by step; kernels that are bound by arithmetic take longer in
proportion (NVIDIA, "Thermal slowdown" and "SW power cap" in nvidia-smi's clocks_event_reasons). Here all kernels do.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sim.engine.effects import Effect, Steps, Time, effects

STAGES = 8  # equal steps in which the clock falls


@effects("throttle")
class Throttling(Effect):
    """Kernels slow down to `throttle` of their usual speed, from `after` on, within `over` seconds."""

    component: ClassVar[str] = "throttling"

    throttle: float = Field(gt=0.001, lt=1)  # part of the usual speed in the end
    after: Time = 0.0  # when it begins
    over: Time = 0.0  # how long it takes to get there

    def kernels(self) -> Steps:
        """Falling speed in STAGES equal steps."""
        if not self.over:
            yield self.after, 1 / self.throttle
            return
        for stage in range(1, STAGES + 1):
            speed = 1 - (1 - self.throttle) * stage / STAGES
            yield self.after + self.over * (stage - 1) / STAGES, 1 / speed
