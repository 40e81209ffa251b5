"""A GPU that stops in the middle of the step: the others wait for it in their next collective until somebody notices.

PyTorch's watchdog of NCCL collectives ends a process whose collective has not ended after a timeout, by default 10 minutes
(torch.distributed.init_process_group, `timeout`, NCCL backend), from when it was called (ProcessGroupNCCL.cpp: checkTimeout,
workStartTime_): it is the first rank to wait that ends the job.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from sim.engine.effects import Effect, Steps, Time, effects
from topologies.reading import UserError

WATCHDOG = 600.0  # seconds


class StepHangsError(UserError):
    """A step that never ends. Seconds: failed, when a GPU stood still; first, when the first other rank began to wait for it;
    silent, when the last one did.
    """

    def __init__(self, effect: str, failed: float, first: float, silent: float) -> None:
        self.failed, self.first, self.silent = failed, max(failed, first), max(failed, silent)
        self.detected = self.first + WATCHDOG
        super().__init__(
            f"the step hangs ({effect}): a GPU stands still from {failed:.3g} s on, the first rank waits for it from "
            f"{self.first:.3g} s on, all do by {self.silent:.3g} s, and PyTorch's watchdog ends the job at "
            f"{self.detected:.4g} s, {WATCHDOG:.0f} s after the first began to wait"
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
