"""What each collective of a job asks of each link: schedules laid over the topology, and links that cannot be told apart merged.

All sibling groups of a cohort run the same collective at the same time, so one demand counts the transfers of all of them on every
link. Links with equal capacity that carry the same demands behave the same whatever happens; they become one. What is left is a handful of
links however many GPUs there are, and the fluid network on it is exact, not approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Place, Schedule, algorithms
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
    steps: for each kind of link, on how many rounds of the longest path it is the slowest hop (latency is priced from it).
    """

    share: float
    links: Ids
    flows: Floats
    steps: Floats


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
    while phases:
        phase = phases.pop(0)
        times = phase.times
        while phases and np.array_equal(phases[0].source, phase.source) and np.array_equal(phases[0].destination, phase.destination):
            times += phases.pop(0).times
        source, destination = groups[:, phase.source], groups[:, phase.destination]
        routes = topology.routes(source.ravel(), destination.ravel())
        links, flows = np.unique(routes[routes >= 0], return_counts=True)
        slowest = _slowest_kind(topology, routes).reshape(source.shape)
        steps = _steps(slowest[0], phase.source, phase.destination, phase.channel, times, len(topology.kinds))
        result.append(Stretch(times / plan.chunks, links, flows.astype(float), steps))
    return tuple(result)


def _slowest_kind(topology: Topology, routes: Ids) -> Ids:
    """The kind of link that sets the latency of each route: the outermost in the order of `kinds`, −1 for no link."""
    kinds = np.where(routes >= 0, topology.kind(np.maximum(routes, 0)), -1)
    return kinds.max(axis=1, initial=-1)


def _steps(kind: Ids, source: Ids, destination: Ids, channel: Ids, times: int, kinds: int) -> Floats:
    """How often each kind is on the path that data takes in `times` rounds, following receiver to next sender; the worst start.

    A ring's data crosses fast and slow hops in turns: its latency is the sum along the path, not `times` slowest hops.
    """
    counts = np.zeros((len(kind), kinds))
    counts[np.flatnonzero(kind >= 0), kind[kind >= 0]] = 1.0
    if times == 1:
        total = counts
    else:
        width = int(max(source.max(), destination.max())) + 1
        where = np.full((int(channel.max()) + 1) * width, -1)
        where[channel * width + source] = np.arange(len(source))
        total = _along(counts, where[channel * width + destination], times)
    weight = total @ np.arange(1, kinds + 1) ** 4  # outer kinds are slower by far
    return np.asarray(total[int(np.argmax(weight))])


def _along(counts: Floats, following: Ids, times: int) -> Floats:
    """Sum of `counts` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(counts), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + counts[at], following[at]
        counts, following, times = counts + counts[following], following[following], times >> 1
    return total


class Demand(NamedTuple):
    """A stretch on merged links: `flows[l]` flows of `share`·S bytes each cross merged link l."""

    share: float
    flows: tuple[tuple[int, float], ...]
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Merged links and every traffic's demand on them."""

    capacity: tuple[float, ...]  # nominal bytes per second of each merged link
    kind: tuple[str, ...]
    example: tuple[int, ...]  # one raw link of each merged link
    multiple: tuple[int, ...]  # how many raw links it stands for
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
    mark = capacity.view(np.uint64) * random[-1] + kind.astype(np.uint64) * random[-2]
    at = [np.searchsorted(touched, stretch.links) for _, stretch in parts]
    for number, (_, stretch) in enumerate(parts):
        mark[at[number]] += stretch.flows.astype(np.uint64) * random[number]
    _, first, merged, multiple = np.unique(mark, return_index=True, return_inverse=True, return_counts=True)
    demands: dict[Traffic, tuple[Demand, ...]] = {traffic: () for traffic in traffics}
    for number, (traffic, stretch) in enumerate(parts):
        links, one = np.unique(merged[at[number]], return_index=True)
        flows = tuple(zip(links.tolist(), stretch.flows[one].tolist(), strict=True))
        demands[traffic] += (Demand(stretch.share, flows, tuple(stretch.steps.tolist())),)
    names = topology.kinds
    return Wiring(
        tuple(capacity[first].tolist()), tuple(names[k] for k in kind[first]), tuple(touched[first].tolist()),
        tuple(multiple.tolist()), demands, names,
    )  # fmt: skip
