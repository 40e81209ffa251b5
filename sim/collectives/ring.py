"""Ring algorithms: bandwidth-optimal, latency linear in the number of members.

Each member sends (n−1)/n·S in a reduce-scatter or all-gather and 2(n−1)/n·S in an all-reduce, the least possible (Patarasuk and
Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; nccl-tests doc/PERFORMANCE.md).

Where GPUs are wired to each other without a switch, rings follow their links (`cycles`). Over several nodes there are as many
rings (channels) as members in the emptiest node, each entering a node at another member, so that every NIC carries its share; a
node is crossed forwards or backwards in turns, so that a ring leaves a node on the rail by which it enters the next one, and
where members have links of their own in an order that uses them alike (`Place.crossing`).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from sim.collectives import Ids, Phase, Place, Schedule, algorithms, turning


def orders(place: Place) -> Ids:
    """Rings as orders of members, shape (channels, n)."""
    if place.rings:
        return np.array(place.rings)
    even = place.even()
    if even is not None:
        channels = 1 if place.turned or len(even) == 1 else even.shape[1]
        rings = np.stack([np.roll(even, -channel, axis=1) for channel in range(channels)])[:, :, place.crossing(even.shape[1])]
        if len(even) > 1:  # forwards: channel, channel + 1, …, channel − 1; backwards starts where the node before was left
            rings[:, 1::2] = rings[:, 1::2, ::-1]
        return rings.reshape(channels, -1)
    nodes = place.per_node()
    smallest = min(len(node) for node in nodes)
    if smallest == 1:
        return np.array([[member for node in nodes for member in node]])
    return np.array([_uneven(place, nodes, channel) for channel in range(smallest)])


def _uneven(place: Place, nodes: list[list[int]], channel: int) -> list[int]:
    ring: list[int] = []
    for position, node in enumerate(nodes):
        crossed = [(node[channel:] + node[:channel])[at] for at in place.crossing(len(node))]
        ring += crossed if position % 2 == 0 else crossed[::-1]
    return ring


def _phase(rings: Ids, lag: int, reduce: bool) -> Phase:
    """One trip around: in round t the member at position p sends the chunk owned by the member at position p − t − lag."""
    channels, size = rings.shape
    position = np.tile(np.arange(size), channels)
    channel = np.repeat(np.arange(channels), size)
    owner = partial(_owned, rings, position, channel, lag)
    return Phase(rings.ravel(), np.roll(rings, -1, axis=1).ravel(), channel, owner, times=size - 1, reduce=reduce)


def _owned(rings: Ids, position: Ids, channel: Ids, lag: int, turn: int) -> Ids:
    channels, size = rings.shape
    return np.asarray(rings[channel, (position - turn - lag) % size] * channels + channel)


def _chunks(place: Place, rings: Ids) -> int:
    return rings.size * (int(np.count_nonzero(place.node == place.node[0])) if place.turned else 1)


@algorithms("reduce_scatter/ring")
@turning
def reduce_scatter(place: Place) -> Schedule:
    """Member i ends with the sum of everybody's piece i."""
    rings = orders(place)
    return Schedule(_chunks(place, rings), (_phase(rings, 1, reduce=True),))


@algorithms("all_gather/ring")
@turning
def all_gather(place: Place) -> Schedule:
    """Member i starts with piece i; everybody ends with all pieces."""
    rings = orders(place)
    return Schedule(_chunks(place, rings), (_phase(rings, 0, reduce=False),))


@algorithms("all_reduce/ring")
@turning
def all_reduce(place: Place) -> Schedule:
    """Reduce-scatter, then all-gather."""
    rings = orders(place)
    return Schedule(_chunks(place, rings), (_phase(rings, 1, reduce=True), _phase(rings, 0, reduce=False)))
