"""Base of effects on links: which links a target names."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
            raise UserError(f"effect '{self}': no link is called '{self.target}'{_hint(self.target, names[:MANY])}")
        return chosen


def _hint(target: str, names: Sequence[str]) -> str:
    """The name that is nearest to a wrong one, or one of each kind of link."""
    near = nearest(target, names)
    if not near.startswith("; known"):
        return near
    kinds = {re.sub(r"\d+", "#", name): name for name in reversed(names)}
    return f"; known are {', '.join(sorted(kinds.values()))}, and so on (`shardyard topology` has all)"


@lru_cache(maxsize=8)
def _names(topology: Topology) -> tuple[str, ...]:
    """The name of every link; several effects of a job, and its several plays, ask for them."""
    return tuple(topology.name(link) for link in range(topology.links))
