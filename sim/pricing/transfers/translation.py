"""Traffics that are copies of each other, shifted by periods of the cluster: laid over its links once for all of them.

Where a fabric's switches have equally many nodes below them, GPUs that are shifted by a multiple of these
(`ClusterTopology.period`) are wired alike, also to each other: nodes are mapped on nodes, links on links of equal kind, capacity
and latency, and routes on routes. The pipeline stages of a job are such copies where a stage fills whole switches.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple, TypeGuard

import numpy as np

from sim.grid import Grid
from sim.pricing.transfers.traffic import Traffic, members
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.sums import summed
from topologies.links.topology import Ids, Topology, Values, is_unequal


def translated(grid: Grid, traffic: Traffic, period: int) -> tuple[Traffic, int]:
    """The groups at the lowest coordinates whose ranks are those of `traffic`, shifted by a multiple of `period` ranks, and by
    how many ranks.
    """
    at, to, shift = dict(traffic.at), dict(traffic.to), 0
    for axis in at.keys() & (to or at).keys():
        stride = grid.first({axis: 1})
        step = period // gcd(period, stride)
        down = min(at[axis], to.get(axis, at[axis])) // step * step
        at[axis] -= down
        if to:
            to[axis] -= down
        shift += down * stride
    return (traffic._replace(at=tuple(at.items()), to=tuple(to.items())), shift) if shift else (traffic, 0)


def is_periodic(topology: Topology) -> TypeGuard[ClusterTopology]:
    """Whether GPUs that are shifted by a period have copies of links."""
    return isinstance(topology, ClusterTopology) and not is_unequal(topology) and topology.has_frames


@lru_cache(maxsize=4096)
def original(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[Traffic, int]:
    """The first traffic of which `traffic` is a copy, and by how many GPUs it is shifted."""
    period = topology.period if is_periodic(topology) else None
    return translated(grid, traffic, period) if period else (traffic, 0)


class Copies(NamedTuple):
    """The first of sibling groups, and how often they are there, shifted by 0, 1, … times `shift` GPUs."""

    first: Traffic
    times: int = 1
    shift: int = 0

    def load(self, topology: Topology, links: Ids, load: Values) -> tuple[Ids, Values]:
        """What all groups load, where the first ones load `links`."""
        if self.times == 1 or not is_periodic(topology):
            return links, load
        frames = topology.frames(self.shift // topology.gpus_per_node)
        frame, place = frames.split(links)
        every = frames.link(frame + np.arange(self.times)[:, None], place)
        return summed(every.ravel(), np.tile(load, self.times))


@lru_cache(maxsize=4096)
def copies(topology: Topology, grid: Grid, traffic: Traffic) -> Copies:
    """The fewest sibling groups of which the others are copies, in the order of `members`."""
    outside = [axis for axis, degree in grid.sizes if degree > 1 and axis not in (*traffic.axes, *dict(traffic.at))]
    if not is_periodic(topology) or traffic.groups or not outside:
        return Copies(traffic)
    stride, degree = grid.first({outside[-1]: 1}), grid.degree(outside[-1])
    for period in ([topology.gpus_per_node] if topology.is_wired_inside else []) + [topology.period]:
        step = period // gcd(period, stride) if period else degree
        if step < degree and degree % step == 0:
            first = traffic._replace(groups=tuple(range(step * grid.size(tuple(outside[:-1])))))
            node = topology.node_of(members(grid, first))
            if period == topology.period or (node == node[:, :1]).all():
                return Copies(first, degree // step, step * stride)
    return Copies(traffic)
