"""Base of effects on links: which links a target names."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sim.engine.effects import Effect, Steps
from topologies.reading import UserError
from topologies.topology import Ids, Topology

EXAMPLES = 3  # names of links in an error


class LinkEffect(Effect):
    """An effect on the links that its target names: `node 3 nic 2 out`, or without the direction both."""

    of_links: ClassVar[bool] = True

    def gpus(self, topology: Topology) -> Ids:
        """None: it acts on links."""
        return np.empty(0, dtype=np.int64)

    def capacity(self) -> Steps:
        """The part of the link's capacity that is there from each moment on, where that changes."""
        return iter(())

    def named(self, topology: Topology) -> tuple[int, ...]:
        """The links whose name is the target or begins with it. Raises UserError when there are none."""
        names = [topology.name(link) for link in range(topology.links)]
        chosen = tuple(link for link, name in enumerate(names) if name == self.target or name.startswith(f"{self.target} "))
        if not chosen:
            near = [name for name in names if name.split(" ")[-3:-2] == self.target.split(" ")[-2:-1]] or names
            raise UserError(f"effect '{self}': no link is called '{self.target}'; they are called {', '.join(near[:EXAMPLES])}, …")
        return chosen
