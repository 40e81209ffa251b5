"""A GPU that stops in the middle of the step: the others wait for it in their next collective until somebody notices.

PyTorch's watchdog of NCCL collectives ends a process whose collective has not ended after a timeout, by default 10 minutes
(torch.distributed.init_process_group, `timeout`, NCCL backend).
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from sim.engine.effects import Effect, Steps, Time, effects
from topologies.reading import UserError

WATCHDOG = 600.0  # seconds


class StepHangsError(UserError):
    """A step that never ends. failed: when a GPU stood still; silent: when the last rank that could go on stopped, seconds."""

    def __init__(self, effect: str, failed: float, silent: float) -> None:
        self.failed, self.silent, self.detected = failed, max(failed, silent), max(failed, silent) + WATCHDOG
        super().__init__(
            f"the step hangs ({effect}): a GPU stands still from {failed:.3g} s on, by {self.silent:.3g} s every rank waits for "
            f"it, and PyTorch's watchdog ends the job at {self.detected:.3g} s, {WATCHDOG:.0f} s later"
        )


@effects("fails")
class Failure(Effect):
    """Kernels stand still from `at` on; `fails` has no value."""

    component: ClassVar[str] = "failure"

    fails: str = Field("", max_length=0)  # no value
    at: Time  # when

    def kernels(self) -> Steps:
        """Nothing runs any more."""
        yield self.at, math.inf

    @property
    def failure(self) -> float:
        """When it fails."""
        return self.at
