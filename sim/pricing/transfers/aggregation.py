"""The fabric's switches above the members of groups, and whether they add for all groups at once (SHARP)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.collectives import Ids
from topologies.links.topology import Topology, aggregation

PER_SWITCH, PER_PORT = 2, 3  # generations of SHARP: one streaming tree at a time per switch, or per port


class Aggregation(NamedTuple):
    """Of the first group: leaf and NIC of each member, and the next switch above each; as in `Place`. switches: of every group
    the endpoint of each switch, in the same order, shape (groups, switches).
    """

    leaf: Ids
    above: Ids
    nic: Ids
    switches: Ids


@lru_cache(maxsize=256)
def _above(topology: Topology, groups: bytes, size: int) -> Aggregation | None:
    members = np.frombuffer(groups, dtype=np.int64).reshape(-1, size)
    sharp = aggregation(topology)
    if sharp is None or not sharp.generation:
        return None
    ways, nic = sharp.aggregators(members), sharp.nic_of(members)  # (groups, n, tiers), (groups, n)
    if not serves(sharp.generation, topology.node_of(members), ways[:, :, 0], nic):
        return None
    first = ways[0].ravel()
    known, begin, number = np.unique(first, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(begin))  # switches in order of first appearance
    numbers = order[number].reshape(ways[0].shape)
    above = np.full(len(known), -1)
    above[numbers[:, :-1].ravel()] = numbers[:, 1:].ravel()
    places = np.sort(begin)
    ends = ways.reshape(len(ways), -1)[:, places]
    return Aggregation(numbers[:, 0], above, nic[0], ends)


def above(topology: Topology, groups: Ids) -> Aggregation | None:
    """None where the switches do not add, or not for so many groups. groups: GPUs, shape (groups, n)."""
    if aggregation(topology) is None:
        return None
    return _above(topology, np.ascontiguousarray(groups, dtype=np.int64).tobytes(), groups.shape[1])


def serves(generation: int, node: Ids, leaf: Ids, nic: Ids) -> bool:
    """Whether a tree for each NIC of a node and each group fits the switches. All of shape (groups, n); nic: numbers of the whole
    cluster.
    """
    group = np.broadcast_to(np.arange(len(node))[:, None], node.shape)
    ports = np.unique(np.stack([nic.ravel(), group.ravel()]), axis=1)
    if len(np.unique(ports[0])) < ports.shape[1]:
        return False  # a NIC in two groups
    if generation >= PER_PORT:
        return True
    trees = np.unique(np.stack([leaf.ravel(), group.ravel()]), axis=1)
    below = np.unique(np.stack([leaf.ravel(), group.ravel(), node.ravel(), nic.ravel()]), axis=1)
    one_port = np.unique(below[:3], axis=1).shape[1] == below.shape[1]
    return bool(len(np.unique(trees[0])) == trees.shape[1] and one_port)
