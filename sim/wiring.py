"""What each collective of a job asks of each link: schedules laid over the topology, and links that cannot be told apart merged.

All sibling groups of a cohort run the same collective at the same time, so one demand counts the transfers of all of them on
every
link. Links with equal capacity that carry the same demands behave the same whatever happens; they become one. What is left is
a handful of links however many GPUs there are, and the fluid network on it is exact, not approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Phase, Place, Schedule, algorithms
from sim.grid import Grid
from topologies.topology import Topology

Floats = NDArray[np.float64]


class Traffic(NamedTuple):
    """Who does what: a collective along `axes` of the ranks at coordinates `at`, or (to not empty) a send to the ranks at `to`.

    `group` picks one of the sibling groups; −1 is all of them at once. `algorithm` is the full name, "all_reduce/ring".
    """

    algorithm: str
    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...]
    to: tuple[tuple[str, int], ...] = ()
    group: int = -1


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a collective during which the same links carry the same share.

    share: fraction of the buffer S that one flow carries; links and flows: how many such flows cross each link;
    steps: by how much this stretch lengthens the longest path that data takes: for each kind of link, on how many hops it is the
    outermost (the profile prices its protocol); wire: seconds that links and switches themselves add along that path.
    """

    share: float
    links: Ids
    flows: Floats
    steps: Floats
    wire: float


def members(grid: Grid, traffic: Traffic) -> Ids:
    """Ranks of the groups, shape (groups, n); of a send, (pairs, 2): sender and receiver."""
    at = dict(traffic.at)
    if traffic.to:
        groups = np.stack([grid.groups((), at).ravel(), grid.groups((), dict(traffic.to)).ravel()], axis=1)
    else:
        groups = grid.groups(traffic.axes, at)
    return groups if traffic.group < 0 else groups[traffic.group : traffic.group + 1]


@lru_cache(maxsize=4096)
def schedule(topology: Topology, grid: Grid, traffic: Traffic) -> Schedule:
    """The schedule of the first sibling group; its siblings use the same order of members."""
    first = members(grid, traffic._replace(group=0))[0]
    return algorithms[traffic.algorithm](Place(tuple(topology.node_of(first).tolist())))


@lru_cache(maxsize=4096)
def fullest(topology: Topology, grid: Grid, traffic: Traffic) -> int:
    """Members of the first sibling group in the node that has most of them."""
    return int(np.unique(topology.node_of(members(grid, traffic._replace(group=0))[0]), return_counts=True)[1].max())


@lru_cache(maxsize=4096)
def sent(topology: Topology, grid: Grid, traffic: Traffic) -> float:
    """Fraction of the buffer S sent by the member that sends most."""
    plan = schedule(topology, grid, traffic)
    return float(plan.sent(members(grid, traffic._replace(group=0)).shape[1]).max())


@lru_cache(maxsize=4096)
def stretches(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[Stretch, ...]:
    """The demand of `traffic` on raw links; consecutive phases over the same transfers are one stretch."""
    plan = schedule(topology, grid, traffic)
    groups = members(grid, traffic)
    result: list[Stretch] = []
    phases = list(plan.phases)
    arrival = np.zeros((groups.shape[1], len(topology.kinds) + 1))  # hops and wire on the longest path to each member's data
    longest = arrival[0].copy()
    while phases:
        phase = phases.pop(0)
        times = phase.times
        while (
            phases and np.array_equal(phases[0].source, phase.source) and np.array_equal(phases[0].destination, phase.destination)
        ):
            times += phases.pop(0).times
        source, destination = groups[:, phase.source], groups[:, phase.destination]
        routes = topology.routes(source.ravel(), destination.ravel())
        links, flows = np.unique(routes[routes >= 0], return_counts=True)
        hops = _hops(topology, routes).reshape(*source.shape, -1)
        if times > 1:
            arrival = np.repeat(_slowest(arrival)[None] + _longest(hops[0], phase, times)[None], len(arrival), axis=0)
        else:
            for receiver, path in zip(phase.destination, arrival[phase.source] + hops[0], strict=True):
                arrival[receiver] = _slowest(np.stack([arrival[receiver], path]))
        before, longest = longest, _slowest(arrival)
        more = longest - before
        result.append(Stretch(times / plan.chunks, links, flows.astype(float), more[:-1], float(more[-1])))
    return tuple(result)


def _hops(topology: Topology, routes: Ids) -> Floats:
    """Per route: 1 in the column of its outermost kind of link, and in the last column the latency of its links in seconds."""
    real = routes >= 0
    links = np.maximum(routes, 0)
    kinds = np.where(real, topology.kind(links), -1).max(axis=1, initial=-1)
    hops = np.zeros((len(routes), len(topology.kinds) + 1))
    hops[np.flatnonzero(kinds >= 0), kinds[kinds >= 0]] = 1.0
    hops[:, -1] = np.where(real, topology.latency(links), 0.0).sum(axis=1)
    return hops


def _longest(hops: Floats, phase: Phase, times: int) -> Floats:
    """Sum of hops on the path that data takes in `times` rounds, each receiver sending on; of the slowest start.

    A ring's data crosses fast and slow hops in turns: its latency is the sum along the path, not `times` slowest hops.
    """
    width = int(max(phase.source.max(), phase.destination.max())) + 1
    sender = np.full((int(phase.channel.max()) + 1) * width, -1)
    sender[phase.channel * width + phase.source] = np.arange(len(phase.source))
    return _slowest(_along(hops, sender[phase.channel * width + phase.destination], times))


def _slowest(hops: Floats) -> Floats:
    """The row with most hops of the outermost kind, then of the next one: outer kinds are slower by far."""
    return np.asarray(hops[np.lexsort((hops[:, -1], *hops[:, :-1].T))[-1]])


def _along(hops: Floats, following: Ids, times: int) -> Floats:
    """Sum of `hops` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(hops), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + hops[at], following[at]
        hops, following, times = hops + hops[following], following[following], times >> 1
    return total


class Demand(NamedTuple):
    """A stretch on merged links: `flows[l]` flows of `share`·S bytes each cross merged link l."""

    share: float
    flows: tuple[tuple[int, float], ...]
    steps: tuple[float, ...]
    wire: float


@dataclass(frozen=True, slots=True)
class Wiring:
    """Merged links and every traffic's demand on them."""

    capacity: tuple[float, ...]  # nominal bytes per second of each merged link
    kind: tuple[str, ...]
    example: tuple[int, ...]  # one raw link of each merged link
    multiple: tuple[int, ...]  # how many raw links it stands for
    twin: tuple[int, ...]  # links with equal numbers carry the same demands and differ in capacity only
    demands: dict[Traffic, tuple[Demand, ...]]
    kinds: tuple[str, ...]


@lru_cache(maxsize=256)
def wire(topology: Topology, grid: Grid, traffics: tuple[Traffic, ...]) -> Wiring:
    """Lay all traffics over the topology and merge links that no demand tells apart."""
    parts = [(traffic, stretch) for traffic in traffics for stretch in stretches(topology, grid, traffic)]
    touched = np.unique(np.concatenate([np.empty(0, np.int64), *(stretch.links for _, stretch in parts)]))
    capacity, kind = topology.capacity(touched), topology.kind(touched)
    # A random number per demand makes the sum over a link's demands its fingerprint; 64 bits over some 10⁵ links never meet.
    random = np.random.default_rng(0).integers(1, 2**63, size=len(parts) + 2, dtype=np.uint64)
    load = np.zeros(len(touched), np.uint64)
    at = [np.searchsorted(touched, stretch.links) for _, stretch in parts]
    for number, (_, stretch) in enumerate(parts):
        load[at[number]] += stretch.flows.astype(np.uint64) * random[number]
    mark = load + capacity.view(np.uint64) * random[-1] + kind.astype(np.uint64) * random[-2]
    _, first, merged, multiple = np.unique(mark, return_index=True, return_inverse=True, return_counts=True)
    demands: dict[Traffic, tuple[Demand, ...]] = dict.fromkeys(traffics, ())
    for number, (traffic, stretch) in enumerate(parts):
        links, one = np.unique(merged[at[number]], return_index=True)
        flows = tuple(zip(links.tolist(), stretch.flows[one].tolist(), strict=True))
        demands[traffic] += (Demand(stretch.share, flows, tuple(stretch.steps.tolist()), stretch.wire),)
    names = topology.kinds
    twin = np.unique(load[first], return_inverse=True)[1]
    return Wiring(
        capacity=tuple(capacity[first].tolist()),
        kind=tuple(names[k] for k in kind[first]),
        example=tuple(touched[first].tolist()),
        multiple=tuple(multiple.tolist()),
        twin=tuple(twin.tolist()),
        demands=demands,
        kinds=names,
    )
