"""Base of effects on links: which links a target names."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sim.engine.effects import Effect
from topologies.links.topology import Ids, Topology
from topologies.reading import UserError, nearest

MANY = 2000  # names of links that are looked at for an error


class LinkEffect(Effect):
    """An effect on the links that its target names: `node 3 nic 2 out`, or without the direction both."""

    def gpus(self, topology: Topology) -> Ids:
        """None: it acts on links."""
        return np.empty(0, dtype=np.int64)

    def named(self, topology: Topology) -> tuple[int, ...]:
        """The links whose name is the target or begins with it. Raises UserError when there are none."""
        names = _names(topology)
        chosen = tuple(link for link, name in enumerate(names) if name == self.target or name.startswith(f"{self.target} "))
        if not chosen:
            raise UserError(f"effect '{self}': no link is called '{self.target}'{nearest(self.target, names[:MANY])}")
        return chosen


@lru_cache(maxsize=8)
def _names(topology: Topology) -> tuple[str, ...]:
    """The name of every link; several effects of a job, and its several plays, ask for them."""
    return tuple(topology.name(link) for link in range(topology.links))
