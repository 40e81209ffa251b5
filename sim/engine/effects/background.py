"""Traffic of another job on a link: a share of it is gone, all the time or in bursts.

Under max-min fairness traffic that never asks for more than its share takes exactly that; the rest is left.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sim.engine.effects import Steps, Time, check_period, effects, periodic
from sim.engine.effects.links import LinkEffect
from topologies.links.topology import Topology


@effects("background")
class Background(LinkEffect):
    """Other traffic takes `background` of the link, from `at` on: always, or for `lasting` seconds of each `every` seconds."""

    background: float = Field(gt=0, lt=1)  # part of the link's rate
    at: Time = 0.0  # when it begins
    lasting: Time | None = Field(None, gt=0)  # absent: always
    every: Time | None = Field(None, gt=0)  # from one beginning to the next

    @model_validator(mode="after")
    def _rests(self) -> Self:
        check_period(self.lasting, self.every)
        return self

    def varying(self, topology: Topology) -> tuple[int, ...]:
        """Each named link."""
        return self.named(topology)

    def capacity(self) -> Steps:
        """What is left, and everything."""
        if self.lasting is None:
            yield self.at, 1 - self.background
        else:
            yield from periodic(1 - self.background, 1.0, self.at, self.lasting, self.every)
