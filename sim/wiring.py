"""What each collective of a job asks of each link: schedules laid over the topology, and links that cannot be told apart merged.

All sibling groups of a cohort run the same collective at the same time, so one demand counts the transfers of all of them on
every
link. Links with equal capacity that carry the same demands behave the same whatever happens; they become one. What is left is
a handful of links however many GPUs there are, and the fluid network on it is exact, not approximate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, NotApplicable, Phase, Place, Schedule, algorithms
from sim.collectives.cycles import MEMBERS, ring_cycles
from sim.grid import Grid
from sim.protocols import Shape
from topologies.topology import Multicast, Topology

Floats = NDArray[np.float64]
_ODD = 1_000_003  # numbers of flows are told apart to one part of this


class Traffic(NamedTuple):
    """Who does what: a collective along `axes` of the ranks at coordinates `at`, or (to not empty) a send to the ranks at `to`.

    `group` picks one of the sibling groups; −1 is all of them at once. `algorithm` is the full name, "all_reduce/ring".
    counts: of an all_to_allv, as in `Place`.
    """

    algorithm: str
    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...]
    to: tuple[tuple[str, int], ...] = ()
    group: int = -1
    counts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a collective during which the same links carry the same share.

    share: fraction of the buffer S that one flow carries; links and flows: how many such flows cross each link (transfers that
    carry less count as a part of a flow); steps: by how much this stretch lengthens the longest path that data takes: for each
    kind of link, on how many hops it is the outermost (the profile prices its protocol); wire: seconds that links and switches
    themselves add along that path.
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


def endpoints(topology: Topology, grid: Grid, traffic: Traffic) -> Ids:
    """Who takes part in each group: its ranks and, when the algorithm needs them, the switches beside them.

    Shape (groups, n + switches); a switch's number is the topology's.
    """
    groups, phases = members(grid, traffic), schedule(topology, grid, traffic).phases
    last = max((int(max(phase.source.max(initial=0), phase.destination.max(initial=0))) for phase in phases), default=0)
    if last < groups.shape[1] or not isinstance(topology, Multicast):
        return groups
    switches = topology.switch_of(groups)
    return np.concatenate([groups, switches[:, np.sort(np.unique(switches[0], return_index=True)[1])]], axis=1)


@lru_cache(maxsize=4096)
def schedule(topology: Topology, grid: Grid, traffic: Traffic) -> Schedule:
    """The schedule of the first sibling group; its siblings use the same order of members.

    Raises NotApplicable when the algorithm does not work for them.
    """
    first = members(grid, traffic._replace(group=max(traffic.group, 0)))[0]
    switch: tuple[int, ...] = ()
    if isinstance(topology, Multicast) and (beside := topology.switch_of(first)).min(initial=0) >= 0:
        _, seen, number = np.unique(beside, return_index=True, return_inverse=True)
        switch = tuple(np.argsort(np.argsort(seen))[number].tolist())  # by first member
    rings = _rings(topology, tuple(first.tolist()))
    return algorithms[traffic.algorithm](Place(tuple(topology.node_of(first).tolist()), switch, traffic.counts, rings))


@lru_cache(maxsize=1024)
def _rings(topology: Topology, gpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Rings along direct links between these GPUs; none where all traffic passes a switch."""
    size = len(gpus)
    if not 2 < size <= MEMBERS:
        return ()
    ends = np.array(gpus)
    routes = topology.routes(np.repeat(ends, size), np.tile(ends, size))
    direct = ((routes >= 0).sum(axis=1) == 1).reshape(size, size)
    if not direct.any():
        return ()
    capacity = np.where(direct, topology.capacity(np.maximum(routes.max(axis=1), 0)).reshape(size, size), 0.0)
    return ring_cycles(np.rint(capacity / capacity[direct].min()).astype(np.int64))


@lru_cache(maxsize=4096)
def applicable(topology: Topology, grid: Grid, traffic: Traffic) -> bool:
    """Whether the algorithm works for these members."""
    try:
        schedule(topology, grid, traffic)
    except NotApplicable:
        return False
    return True


@lru_cache(maxsize=4096)
def fullest(topology: Topology, grid: Grid, traffic: Traffic) -> int:
    """Members of the first sibling group in the node that has most of them."""
    return int(np.unique(topology.node_of(members(grid, traffic._replace(group=0))[0]), return_counts=True)[1].max())


@lru_cache(maxsize=4096)
def sent(topology: Topology, grid: Grid, traffic: Traffic) -> float:
    """Fraction of the buffer S sent by the member that sends most."""
    plan = schedule(topology, grid, traffic)
    return float(plan.sent(members(grid, traffic._replace(group=0)).shape[1]).max(initial=0.0))


@lru_cache(maxsize=4096)
def alike(topology: Topology, grid: Grid, traffic: Traffic) -> bool:
    """Whether sibling groups cannot be told apart by the links of their routes inside nodes, so that one stands for all.

    Which of them cross the spine may differ: all are priced as the slowest.
    """
    groups, inside = endpoints(topology, grid, traffic), topology.kinds.index("spine")
    if len(groups) == 1:
        return True
    for phase in schedule(topology, grid, traffic).phases:
        routes = topology.routes(groups[:, phase.source].ravel(), groups[:, phase.destination].ravel())
        links = np.maximum(routes, 0)
        kinds = np.where(routes >= 0, topology.kind(links), inside)
        for value in (kinds + 1, topology.capacity(links), topology.latency(links)):
            rows = np.where(kinds < inside, value, 0).sum(axis=1).reshape(len(groups), -1)
            if not np.allclose(rows, rows[0], rtol=1e-9, atol=1e-9):
                return False
    return True


@lru_cache(maxsize=4096)
def stretches(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[Stretch, ...]:
    """The demand of `traffic` on raw links; consecutive phases over the same transfers are one stretch.

    The first piece of a pipeline goes through all phases one after the other; the others follow in its wake, all phases at once.
    """
    plan = schedule(topology, grid, traffic)
    groups = endpoints(topology, grid, traffic)
    result: list[Stretch] = []
    arrival = np.zeros((groups.shape[1], len(topology.kinds) + 1))  # hops and wire on the longest path to each member's data
    longest, most, total = arrival[0].copy(), 0, np.zeros(topology.links)
    for phase, times in _merged(plan):
        routes = topology.routes(groups[:, phase.source].ravel(), groups[:, phase.destination].ravel())
        carried = np.repeat(np.tile(phase.amounts, len(groups)), routes.shape[1])
        load: Floats = np.bincount(routes.ravel() + 1, carried, minlength=topology.links + 1)[1:].astype(float)
        hops = _worst(_hops(topology, routes).reshape(len(groups), len(phase.source), -1))
        arrival = _after(arrival, phase, times, hops)
        before, longest = longest, _slowest(arrival)
        largest = int(phase.amounts.max(initial=0))
        result.append(_stretch(load, largest, times / plan.chunks / plan.pieces, longest - before))
        most, total = max(most, largest * times), total + load * times
    if plan.pieces > 1:
        result.append(_stretch(total, most, (plan.pieces - 1) / plan.chunks / plan.pieces, np.zeros_like(longest)))
    return tuple(result)


def _stretch(load: Floats, largest: int, chunk: float, more: Floats) -> Stretch:
    """load: chunks that cross each link; largest: chunks of the largest flow; chunk: as a fraction of S."""
    links = np.flatnonzero(load)
    return Stretch(largest * chunk, links, load[links] / max(largest, 1), more[:-1], float(more[-1]))


def _merged(plan: Schedule) -> Iterator[tuple[Phase, int]]:
    """Phases and their numbers of rounds, consecutive ones over the same transfers as one."""
    last: Phase | None = None
    times = 0
    for phase in plan.phases:
        same = last is not None and all(
            np.array_equal(getattr(last, name), getattr(phase, name)) for name in ("source", "destination", "amounts")
        )
        if last is not None and not same:
            yield last, times
        last, times = phase, (times if same else 0) + phase.times
    if last is not None:
        yield last, times


def _hops(topology: Topology, routes: Ids) -> Floats:
    """Per route: 1 in the column of its outermost kind of link, and in the last column the latency of its links in seconds."""
    real = routes >= 0
    links = np.maximum(routes, 0)
    kinds = np.where(real, topology.kind(links), -1).max(axis=1, initial=-1)
    hops = np.zeros((len(routes), len(topology.kinds) + 1))
    hops[np.flatnonzero(kinds >= 0), kinds[kinds >= 0]] = 1.0
    hops[:, -1] = np.where(real, topology.latency(links), 0.0).sum(axis=1)
    return hops


def _worst(hops: Floats) -> Floats:
    """Of each transfer, the slowest among sibling groups; hops is (groups, transfers, kinds + 1)."""
    order = hops @ np.append(1e3 ** np.arange(1, hops.shape[2]), 1.0)
    return np.asarray(hops[order.argmax(axis=0), np.arange(hops.shape[1])])


def _after(arrival: Floats, phase: Phase, times: int, hops: Floats) -> Floats:
    """Longest paths to each member's data after `times` rounds of `phase`, whose transfers take `hops`."""
    if times > 1:
        return np.tile(_slowest(arrival) + _longest(hops, phase, times), (len(arrival), 1))
    rows = np.concatenate([arrival, arrival[phase.source] + hops])
    member = np.concatenate([np.arange(len(arrival)), phase.destination])
    order = _order(rows, member)
    last = np.flatnonzero(np.diff(member[order], append=len(arrival)))
    return rows[order[last]]


def _longest(hops: Floats, phase: Phase, times: int) -> Floats:
    """Sum of hops on the path that data takes in `times` rounds, each receiver sending on; of the slowest start.

    A ring's data crosses fast and slow hops in turns: its latency is the sum along the path, not `times` slowest hops.
    """
    if (hops == hops[0]).all():
        return np.asarray(hops[0] * times)
    width = int(max(phase.source.max(), phase.destination.max())) + 1
    sender = np.full((int(phase.channel.max()) + 1) * width, -1)
    sender[phase.channel * width + phase.source] = np.arange(len(phase.source))
    used = np.flatnonzero(hops.any(axis=0))
    total = np.zeros_like(hops)
    total[:, used] = _along(hops[:, used], sender[phase.channel * width + phase.destination], times)
    return _slowest(total)


def _order(rows: Floats, *first: Ids) -> Ids:
    """Order by `first`, then by hops of the outermost kind, of the next one, …, then by wire."""
    used = [row for row in rows[:, :-1].T if row.any()]
    return np.lexsort((rows[:, -1], *used, *first))


def _slowest(hops: Floats) -> Floats:
    """The row with most hops of the outermost kind, then of the next one: outer kinds are slower by far."""
    return np.asarray(hops[0] if (hops == hops[0]).all() else hops[_order(hops)[-1]])


def _along(hops: Floats, following: Ids, times: int) -> Floats:
    """Sum of `hops` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(hops), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + hops[at], following[at]
        hops, following, times = hops + hops[following], following[following], times >> 1
    return total


class Demand(NamedTuple):
    """A stretch on merged links: `flows[l]` flows of `share`·S bytes each cross link l; `meets` is the same on shared links."""

    share: float
    flows: tuple[tuple[int, float], ...]
    steps: tuple[float, ...]
    wire: float
    meets: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Merged links and every traffic's demand on them."""

    capacity: tuple[float, ...]  # nominal bytes per second of each merged link
    kind: tuple[str, ...]
    example: tuple[int, ...]  # one raw link of each merged link
    multiple: tuple[int, ...]  # how many raw links it stands for
    shared_capacity: tuple[float, ...]  # of the links on which traffic meets: see `_shared`
    shared_kind: tuple[str, ...]
    twin: tuple[int, ...]  # shared links with equal numbers carry the same demands and differ in capacity only
    demands: dict[Traffic, tuple[Demand, ...]]
    kinds: tuple[str, ...]
    shapes: dict[Traffic, Shape] = field(default_factory=dict, compare=False)  # what prices need of each demand, once asked for


@lru_cache(maxsize=1024)
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
        load[at[number]] += np.rint(stretch.flows * _ODD).astype(np.uint64) * random[number]
    mark = load + capacity.view(np.uint64) * random[-1] + kind.astype(np.uint64) * random[-2]
    _, first, merged, multiple = np.unique(mark, return_index=True, return_inverse=True, return_counts=True)
    flows = np.zeros((len(parts), len(first)))
    for number, (_, stretch) in enumerate(parts):
        links, one = np.unique(merged[at[number]], return_index=True)
        flows[number, links] = stretch.flows[one]
    kinds, nominal = kind[first], capacity[first]
    order = {traffic: number for number, traffic in enumerate(traffics)}
    shared = _shared(flows, np.array([order[traffic] for traffic, _ in parts], dtype=np.int64), nominal, kinds)
    demands: dict[Traffic, tuple[Demand, ...]] = dict.fromkeys(traffics, ())
    for number, (traffic, stretch) in enumerate(parts):
        steps = tuple(stretch.steps.tolist())
        last = Demand(stretch.share, _pairs(flows[number]), steps, stretch.wire, _pairs(shared.flows[number]))
        demands[traffic] = _joined(demands[traffic], last)
    names = topology.kinds
    return Wiring(
        capacity=tuple(nominal.tolist()),
        kind=tuple(names[k] for k in kinds),
        example=tuple(touched[first].tolist()),
        multiple=tuple(multiple.tolist()),
        shared_capacity=tuple(shared.capacity.tolist()),
        shared_kind=tuple(names[k] for k in shared.kind),
        twin=tuple(np.unique(shared.flows, axis=1, return_inverse=True)[1].tolist()) if shared.flows.size else (),
        demands=demands,
        kinds=names,
    )


def _pairs(flows: Floats) -> tuple[tuple[int, float], ...]:
    links = np.flatnonzero(flows)
    return tuple(zip(links.tolist(), flows[links].tolist(), strict=True))


class _Shared(NamedTuple):
    """Links as far as traffic meets on them: capacity and kind (links,), flows (demands, links)."""

    capacity: Floats
    kind: Ids
    flows: Floats


def _shared(flows: Floats, traffic: Ids, capacity: Floats, kind: Ids) -> _Shared:
    """One link for all of a kind that the same traffic uses, with the most that each of them asks of any; none that cannot limit.

    Links of a symmetric job are alike and nothing changes. Where they are not (a tree loads inner members more than leaves), the
    members of a cohort move together, as fast as the most loaded of them.
    """
    used = np.zeros((int(traffic.max(initial=-1)) + 1, flows.shape[1]), dtype=bool)
    np.logical_or.at(used, traffic, flows > 0)
    _, first, group = np.unique(
        np.concatenate([kind[None].astype(np.uint8), np.packbits(used, axis=0)]), axis=1, return_index=True, return_inverse=True
    )
    count = len(first)
    least = np.full(count, np.inf)
    np.minimum.at(least, group, capacity)
    seconds = np.zeros((len(flows), count))
    for link, one in enumerate(group):
        np.maximum(seconds[:, one], flows[:, link] / capacity[link], out=seconds[:, one])
    kept = np.flatnonzero(_limits(seconds, kind[first]))
    return _Shared(least[kept], kind[first][kept], np.round(seconds[:, kept] * least[kept], 9))


def _limits(seconds: Floats, kind: Ids) -> NDArray[np.bool_]:
    """Which links can ever be the limit: not one on which every demand takes no longer than on another of its kind."""
    result = np.ones(len(kind), dtype=bool)
    for one in np.unique(kind):
        links = np.flatnonzero(kind == one)
        links = links[np.argsort(-seconds[:, links].sum(axis=0), kind="stable")]
        kept = np.empty((len(seconds), 0))
        for link in links:
            mine = seconds[:, link : link + 1]
            result[link] = not (mine <= kept).all(axis=0).any()
            if result[link]:
                kept = np.concatenate([kept, mine], axis=1)
    return result


def _joined(demands: tuple[Demand, ...], last: Demand) -> tuple[Demand, ...]:
    """`demands` and after them `last`, which is one with the demand before it when it asks the same links for as many flows."""
    if not demands or demands[-1].flows != last.flows:
        return (*demands, last)
    before = demands[-1]
    steps = tuple(a + b for a, b in zip(before.steps, last.steps, strict=True))
    return (*demands[:-1], last._replace(share=before.share + last.share, steps=steps, wire=before.wire + last.wire))
