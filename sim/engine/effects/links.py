"""Base of effects on links: which links a target names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from sim.engine.effects import Effect
from topologies.gpu_targets import gpus_named
from topologies.links.topology import Ids, Topology
from topologies.reading import UserError, nearest

MANY = 2000  # names of links that are looked at for an error
SEVERAL = re.compile(r"(?:all|(nodes [\d,\s-]*\d)) (\D.*)|rail (\d+)")  # nodes, what each of them has; or a NIC of each
OF_NODE = re.compile(r"node (\d+) (.*)")


class LinkEffect(Effect):
    """An effect on the links that its target names: `node 3 nic 2 out`, or without the direction both; of several nodes `nodes
    0-3,7 nic 2`, of all `all nic 2`, or `rail 2`, which are the same NICs.
    """

    def gpus(self, topology: Topology) -> Ids:
        """None: it acts on links."""
        return np.empty(0, dtype=np.int64)

    def named(self, topology: Topology) -> tuple[int, ...]:
        """The links whose name is the target or begins with it, on each of its nodes. Raises UserError when there are none."""
        names, several = _names(topology), SEVERAL.fullmatch(self.target)
        if several is None:
            chosen = tuple(link for link, name in enumerate(names) if _begins(name, self.target))
        else:
            on = gpus_named(several[1], topology, f"effect '{self}'") if several[1] else np.arange(topology.gpus)
            nodes, mine = set(topology.node_of(on).tolist()), several[2] or f"nic {several[3]}"
            parts = ((link, OF_NODE.fullmatch(name)) for link, name in enumerate(names))
            chosen = tuple(link for link, of in parts if of and _begins(of[2], mine) and int(of[1]) in nodes)
        if not chosen:
            raise UserError(f"effect '{self}': no link is called '{self.target}'{_hint(self.target, names[:MANY])}")
        return chosen


def _begins(name: str, target: str) -> bool:
    return name == target or name.startswith(f"{target} ")


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
