"""The NICs through which GPUs send to other nodes."""

from __future__ import annotations

import numpy as np

from topologies.links.topology import Ids, Topology, kind_of_link


def own_nic(topology: Topology) -> Ids:
    """The NIC through which each GPU sends to other nodes, the first link of that kind on its way; −1 without other nodes."""
    every = np.arange(topology.gpus)
    node = topology.node_of(every)
    if not node[-1]:
        return np.full(topology.gpus, -1)
    routes = topology.routes(every, np.where(node == 0, topology.gpus - 1, 0))
    is_nic = np.array([kind_of_link(kind) == "nic" for kind in topology.kinds])
    nics = (routes >= 0) & is_nic[topology.kind(np.maximum(routes, 0))]
    return np.where(nics.any(axis=1), routes[every, nics.argmax(axis=1)], -1)


def sharing_nics(topology: Topology) -> Ids:
    """How many GPUs send to other nodes through the NIC of each GPU."""
    _, which, count = np.unique(own_nic(topology), return_inverse=True, return_counts=True)
    return np.asarray(count[which.ravel()])
