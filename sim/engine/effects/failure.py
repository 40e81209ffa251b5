"""A GPU that stops in the middle of the step: the others wait for it in their next collective until somebody notices.

PyTorch's watchdog of NCCL collectives ends a process whose collective has not ended after a timeout, by default 10 minutes
(torch.distributed.init_process_group, `timeout`, NCCL backend).
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from sim.engine.effects import Effect, Steps, Time, effects


@effects("fails")
class Failure(Effect):
    """Kernels stand still from `at` on; `fails` has no value."""

    component: ClassVar[str] = "failure"

    fails: str = Field("", max_length=0)
    at: Time

    def kernels(self) -> Steps:
        """Nothing runs any more."""
        yield self.at, math.inf
