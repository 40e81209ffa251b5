"""A NIC, or the rail behind it, that is gone: its GPU reaches other nodes through a neighbour's NIC, which then serves two.

NCCL sends through another GPU's NIC over NVLink (PXN, NCCL 2.12) when a GPU has none of its own.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sim.engine.effects import effects
from sim.engine.effects.links import LinkEffect
from topologies.links.nics import own_nic
from topologies.links.topology import Topology
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
        own, node = own_nic(topology), topology.node_of(np.arange(topology.gpus))
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
