"""A NIC, or the rail behind it, that is gone: its GPU reaches other nodes through a neighbour's NIC, which then serves two.

NCCL sends through another GPU's NIC over NVLink (PXN, NCCL 2.12) when a GPU has none of its own.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sim.engine.effects import effects
from sim.engine.effects.links import LinkEffect
from topologies.links.topology import Ids, Topology, kind_of_link
from topologies.reading import UserError


@effects("lost")
class LostNic(LinkEffect):
    """The NIC carries nothing; `lost` has no value."""

    lost: str = Field("", max_length=0)  # no value

    def gone(self, topology: Topology) -> frozenset[int]:
        """Each named link."""
        return frozenset(self.named(topology))

    def detours(self, topology: Topology, gone: frozenset[int]) -> dict[int, int]:
        """The GPUs that use the NIC, each with the next GPU of its node that has another one. gone: links of all lost NICs.

        Raises UserError when the link is no NIC, or no GPU of the node has one left.
        """
        own, node = _own_nic(topology), topology.node_of(np.arange(topology.gpus))
        users = np.flatnonzero(np.isin(own, self.named(topology)))
        if not len(users):
            raise UserError(f"effect '{self}': '{self.target}' is no NIC between this cluster's nodes")
        left, detours = ~np.isin(own, list(gone)), {}
        for gpu in users.tolist():
            siblings = np.flatnonzero(node == node[gpu])
            neighbours = siblings[left[siblings]]
            if not len(neighbours):
                raise UserError(f"effect '{self}': node {node[gpu]} has no NIC left")
            detours[gpu] = int(neighbours[((neighbours - gpu) % len(siblings)).argmin()])
        return detours


def _own_nic(topology: Topology) -> Ids:
    """The NIC through which each GPU sends to other nodes, the first link of that kind on its way; −1 without other nodes."""
    every = np.arange(topology.gpus)
    node = topology.node_of(every)
    if not node[-1]:
        return np.full(topology.gpus, -1)
    routes = topology.routes(every, np.where(node == 0, topology.gpus - 1, 0))
    is_nic = np.array([kind_of_link(kind) == "nic" for kind in topology.kinds])
    nics = (routes >= 0) & is_nic[topology.kind(np.maximum(routes, 0))]
    return np.where(nics.any(axis=1), routes[every, nics.argmax(axis=1)], -1)
