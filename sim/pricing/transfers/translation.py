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

from sim.collectives.cycles import MEMBERS
from sim.grid import Grid
from sim.pricing.transfers.traffic import Traffic, members
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.rotation import Rotation
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
    """The first of sibling groups, and how often they are there: on the other GPUs of their nodes (turned: `Rotation`), and all
    of these shifted by 0, 1, … times `shift` GPUs.
    """

    first: Traffic
    times: int = 1
    shift: int = 0
    turned: bool = False

    def load(self, topology: Topology, links: Ids, load: Values) -> tuple[Ids, Values]:
        """What all shifted groups load, where the first ones load `links`."""
        if self.times == 1 or not is_periodic(topology):
            return links, load
        frames = topology.frames(self.shift // topology.gpus_per_node)
        frame, place = frames.split(links)
        every = frames.link(frame + np.arange(self.times)[:, None], place)
        return summed(every.ravel(), np.tile(load, self.times))

    def of_all(self, topology: Topology, each: Ids) -> Ids:
        """What all groups have of which the first ones have `each`, in the order of `members`."""
        rotation = rotation_of(topology)
        return np.tile(np.repeat(each, rotation.turns if rotation and self.turned else 1), self.times)


def rotation_of(topology: Topology) -> Rotation | None:
    """The symmetry of GPUs in their nodes, where there is one."""
    return topology.rotation if is_periodic(topology) else None


@lru_cache(maxsize=4096)
def copies(topology: Topology, grid: Grid, traffic: Traffic) -> Copies:
    """The fewest sibling groups of which the others are copies."""
    outside = [axis for axis, degree in grid.sizes if degree > 1 and axis not in (*traffic.axes, *dict(traffic.at))]
    if not is_periodic(topology) or traffic.groups or not outside:
        return Copies(traffic)
    inner, outer, rotation = outside[0], outside[-1], rotation_of(topology)
    turned = rotation is not None and grid.first({inner: 1}) == 1 and grid.degree(inner) == rotation.turns
    each = rotation.turns if rotation is not None and turned else 1
    first = traffic._replace(groups=tuple(range(0, grid.size(tuple(outside)), each))) if turned else traffic
    if turned and inner == outer:
        return Copies(first, turned=True)
    stride, degree = grid.first({outer: 1}), grid.degree(outer)
    for period in ([topology.gpus_per_node] if topology.is_wired_inside else []) + [topology.period]:
        step = period // gcd(period, stride) if period else degree
        if step < degree and degree % step == 0:
            few = traffic._replace(groups=tuple(range(0, step * grid.size(tuple(outside[:-1])), each)))
            node = topology.node_of(members(grid, few))
            if period == topology.period or (node == node[:, :1]).all():
                return Copies(few, degree // step, step * stride, turned)
    return Copies(first, turned=turned)


@lru_cache(maxsize=4096)
def is_turned(topology: Topology, grid: Grid, traffic: Traffic) -> bool:
    """Whether members are all GPUs of several nodes, in order: a schedule that is `turning` is the same when the members of each
    node take each other's places in turn.
    """
    rotation = rotation_of(topology)
    if rotation is None or traffic.to or grid.size(traffic.axes) % rotation.turns or grid.size(traffic.axes) <= MEMBERS:
        return False
    nodes = members(grid, copies(topology, grid, traffic).first).reshape(-1, rotation.turns)
    whole = (nodes[:, :1] % rotation.turns == 0).all() and (nodes == nodes[:, :1] + np.arange(rotation.turns)).all()
    return bool(whole) and grid.size(traffic.axes) > rotation.turns
