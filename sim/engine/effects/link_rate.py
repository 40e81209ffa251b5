"""A link that is slower than it should be, or has more latency, during the whole step; or slower for a part of it.

An InfiniBand or Ethernet port with a bad cable trains down to fewer or slower lanes: half or a quarter of its rate (IBTA
specification, link width and speed downgrade; `ibstat` shows the active rate).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sim.engine.effects import LastingEffect, Steps, Time, effects
from sim.engine.effects.links import LinkEffect
from topologies.links.impaired import LinkChange
from topologies.links.topology import Topology


@effects("rate")
class LinkRate(LastingEffect, LinkEffect):
    """The link carries `rate` of its usual bytes per second, `latency` later."""

    rate: float = Field(gt=0.0001, le=1)  # part of the link's rate that is left
    latency: Time = 0.0  # more than the link's own

    @model_validator(mode="after")
    def _later_all_the_time(self) -> Self:
        if self.latency and not self._always:
            raise ValueError(f"latency={self.latency:g} s contradicts from and to: it is more during the whole step")
        return self

    @property
    def _always(self) -> bool:
        return not self.start and self.end is None

    def links(self, topology: Topology) -> tuple[LinkChange, ...]:
        """Each named link, if it is slower all the time."""
        return tuple(LinkChange(link, self.rate, self.latency) for link in self.named(topology)) if self._always else ()

    def varying(self, topology: Topology) -> tuple[int, ...]:
        """Each named link, if it is slower for a while."""
        return () if self._always else self.named(topology)

    def capacity(self) -> Steps:
        """What is left, and everything."""
        return iter(()) if self._always else self.during(self.rate)
