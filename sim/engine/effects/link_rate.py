"""A link that is slower than it should be, or has more latency, during the whole step.

An InfiniBand or Ethernet port with a bad cable trains down to fewer or slower lanes: half or a quarter of its rate (IBTA
specification, link width and speed downgrade; `ibstat` shows the active rate).
"""

from __future__ import annotations

from pydantic import Field

from sim.engine.effects import Time, effects
from sim.engine.effects.links import LinkEffect
from topologies.links.impaired import LinkChange
from topologies.links.topology import Topology


@effects("rate")
class LinkRate(LinkEffect):
    """The link carries `rate` of its usual bytes per second, `latency` later."""

    rate: float = Field(gt=0.0001, le=1)  # part of the link's rate that is left
    latency: Time = 0.0  # more than the link's own

    def links(self, topology: Topology) -> tuple[LinkChange, ...]:
        """Each named link."""
        return tuple(LinkChange(link, self.rate, self.latency) for link in self.named(topology))
