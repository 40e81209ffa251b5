"""Properties of a topology that follow from its routes: sorts of links, bisection bandwidth, and the graph behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from topologies.links.topology import Ids, Topology

_PAIRS = 1 << 18  # beyond this many pairs a part of them stands for all


class LinkSort(NamedTuple):
    """`number` directed links of one kind and capacity; `example` is the name of the first."""

    kind: str
    number: int
    capacity: float  # bytes per second
    latency: float  # seconds
    example: str


def link_sorts(topology: Topology) -> list[LinkSort]:
    """All links, counted by kind, capacity and latency; innermost kinds first, faster links before slower ones."""
    links = np.arange(topology.links)
    if not links.size:
        return []
    table = np.stack((topology.kind(links), -topology.capacity(links), topology.latency(links)), axis=1)
    rows, first, counts = np.unique(table, axis=0, return_index=True, return_counts=True)
    return [
        LinkSort(topology.kinds[int(kind)], int(count), -float(rate), float(latency), topology.name(int(example)))
        for (kind, rate, latency), example, count in zip(rows, first, counts, strict=True)
    ]


def across(topology: Topology) -> float:
    """Bytes per second from the first half of the GPUs to the second when every GPU sends to every other one alike.

    The most loaded link decides. Where routes spread evenly this is the bisection bandwidth of that cut, one direction. Of more
    than 2¹⁸ pairs a part is taken in which every GPU sends and receives equally often.
    """
    half = topology.gpus // 2
    if not half:
        return 0.0
    shifts = np.arange(half) if half * half <= _PAIRS else np.arange(0, half, half // max(1, _PAIRS // half))
    source = np.tile(np.arange(half), len(shifts))
    destination = topology.gpus - half + (source + np.repeat(shifts, half)) % half
    routes = topology.routes(source, destination)
    links, load = np.unique(routes[routes >= 0], return_counts=True)
    return float(len(source) * (topology.capacity(links) / load).min())


class Joint(NamedTuple):
    """A point where links meet: a GPU (its number), or a switch, a NIC or a socket (−1), and the ids of the links that leave
    it.
    """

    gpu: int
    leaving: tuple[int, ...]


class Shape(NamedTuple):
    """The graph behind the routes. links: id of each used link, and the numbers of the joints it leads from and to."""

    joints: tuple[Joint, ...]
    links: tuple[tuple[int, int, int], ...]


def shape(topology: Topology) -> Shape:
    """Two links that follow each other in some route meet in one joint. Takes all pairs: for drawings, not for 16,384 GPUs."""
    gpus = topology.gpus
    source, destination = (grid.ravel() for grid in np.meshgrid(np.arange(gpus), np.arange(gpus), indexing="ij"))
    routes = topology.routes(source, destination)
    lengths = (routes >= 0).sum(axis=1)
    # ends of links as numbers: GPUs first, then the tail and the head of every link
    tails, heads = gpus + 2 * routes, gpus + 2 * routes + 1
    linked = np.flatnonzero(lengths)
    last = lengths[linked] - 1
    pairs = [(source[linked], tails[linked, 0]), (destination[linked], heads[linked, last])]
    follow = routes[:, 1:] >= 0
    pairs.append((heads[:, :-1][follow], tails[:, 1:][follow]))
    group = _united(gpus + 2 * topology.links, pairs)
    # there and back pass the same switches, but not always the same GPUs
    back = destination * gpus + source
    row, hop = np.nonzero(follow & (lengths == lengths[back])[:, None])
    there, home = heads[row, hop], heads[back[row], lengths[row] - 2 - hop]
    switch = (group[there] >= gpus) & (group[home] >= gpus)
    group = _united(gpus + 2 * topology.links, [*pairs, (there[switch], home[switch])])
    return _shape(group, np.unique(routes[routes >= 0]), gpus)


def _shape(group: Ids, used: Ids, gpus: int) -> Shape:
    ends = [(int(link), int(group[gpus + 2 * link]), int(group[gpus + 2 * link + 1])) for link in used]
    numbers = dict.fromkeys([*range(gpus), *(joint for _, *both in ends for joint in both)])
    order = {joint: position for position, joint in enumerate(numbers)}
    leaving: list[list[int]] = [[] for _ in order]
    for link, tail, _ in ends:
        leaving[order[tail]].append(link)
    joints = tuple(Joint(number if number < gpus else -1, tuple(links)) for number, links in enumerate(leaving))
    return Shape(joints, tuple((link, order[tail], order[head]) for link, tail, head in ends))


def _united(size: int, pairs: list[tuple[Ids, Ids]]) -> Ids:
    """The smallest member of each number's group, when the two of every pair belong together."""
    root = list(range(size))

    def find(item: int) -> int:
        while root[item] != item:
            root[item] = root[root[item]]
            item = root[item]
        return item

    for a, b in np.unique(np.concatenate([np.stack(pair, axis=1) for pair in pairs]), axis=0).tolist():
        low, high = sorted((find(a), find(b)))
        root[high] = low
    return np.array([find(item) for item in range(size)], dtype=np.int64)
