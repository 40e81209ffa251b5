"""A link that goes down and comes back: what is on its way waits.

InfiniBand and RoCE retransmit for a while before they give up, so that a flap of seconds stalls a collective and does not end it
(NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT, NCCL documentation; by default some seconds).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sim.engine.effects import Steps, Time, check_period, effects, periodic
from sim.engine.effects.links import LinkEffect
from topologies.links.topology import Topology


@effects("down")
class Flapping(LinkEffect):
    """The link carries nothing for `down` seconds, from `at` on and then again each `every` seconds."""

    down: Time = Field(gt=0)  # how long
    at: Time = 0.0  # when it begins
    every: Time | None = Field(None, gt=0)  # from one beginning to the next; absent: once

    @model_validator(mode="after")
    def _rests(self) -> Self:
        check_period(self.down, self.every)
        return self

    def varying(self, topology: Topology) -> tuple[int, ...]:
        """Each named link."""
        return self.named(topology)

    def capacity(self) -> Steps:
        """Nothing, then all."""
        return periodic(0.0, 1.0, self.at, self.down, self.every)
