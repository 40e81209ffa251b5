"""The load of each collective of a job on each link: schedules laid over the topology.

All sibling groups of a cohort run the same collective at the same time, so one demand counts the transfers of all of them on
every link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sim.collectives import Ids, NotApplicable, Phase, Place, Schedule, algorithms, is_turning, together
from sim.collectives.cycles import MEMBERS, ring_cycles
from sim.grid import Grid
from sim.pricing.transfers.aggregation import above
from sim.pricing.transfers.loads import FramedLoad, Load, on_links, total
from sim.pricing.transfers.path_latency import Floats, Paths
from sim.pricing.transfers.traffic import Traffic, first_members, members
from sim.pricing.transfers.translation import copies, is_turned, original, rotation_of
from topologies.links.sums import distinct
from topologies.links.topology import Topology, aggregation, is_hosted, is_multicast, kind_of_link
from topologies.reading import UserError

MANY = 64  # stretches of one collective that are kept apart
ROOTED = ("broadcast", "reduce", "scatter", "gather")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a collective during which the same links carry the same share.

    share: fraction of the buffer S that one flow carries; load: how many such flows cross each link (transfers that
    carry less count as a part of a flow); steps: by how much this stretch lengthens the longest path that data takes: for each
    kind of link, on how many hops it is the outermost (the profile prices its protocol); wire: seconds that links and switches
    themselves add along that path; turned: each link stands for its orbit (`topologies.links.rotation`), whose links are alike.
    """

    share: float
    load: Load | FramedLoad
    steps: Floats
    wire: float
    turned: bool = False

    @property
    def links(self) -> Ids:
        """Links that are crossed."""
        return self.load.links

    @property
    def flows(self) -> Floats:
        """Flows on each of `links`."""
        return self.load.flows


@lru_cache(maxsize=4096)
def extent(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[int, int]:
    """(ranks, nodes) of the first group."""
    first = first_members(grid, traffic)
    return len(first), len(distinct(topology.node_of(first)))


@lru_cache(maxsize=4096)
def link_rates(topology: Topology, grid: Grid, traffic: Traffic) -> dict[str, float]:
    """Nominal bytes per second by kind of link: of the first link from a member of the first group to another in its node, and of
    the node's NICs for each of its members. Kinds that the group does not take are left out.
    """
    first = first_members(grid, traffic)
    near = topology.node_of(first) == topology.node_of(first[:1])
    inner, outer, result = first[near], first[~near], dict[str, float]()
    way = topology.routes(inner[:1], inner[1:2])[:, :1] if len(inner) > 1 else np.empty((0, 0), np.int64)
    if way.size and way[0, 0] >= 0:
        result[kind_of_link(topology.kinds[int(topology.kind(way[0])[0])])] = float(topology.capacity(way[0])[0])
    if len(outer) and len(nics := nics_between(topology, inner, outer[:1])):
        result["nic"] = float(topology.capacity(nics).sum()) / len(inner)
    return result


def nics_between(topology: Topology, ranks: Ids, other: Ids) -> Ids:
    """The NICs by which `ranks` of a node send to one rank of another, each once; none where some have no NIC."""
    ways = topology.routes(ranks, np.repeat(other, len(ranks)))
    kind = np.array([kind_of_link(name) for name in (*topology.kinds, "")])
    is_nic = np.where(ways < 0, "", kind[topology.kind(np.maximum(ways, 0))]) == "nic"
    return distinct(ways[np.arange(len(ways)), is_nic.argmax(axis=1)]) if is_nic.any(axis=1).all() else np.empty(0, np.int64)


def endpoints(topology: Topology, grid: Grid, traffic: Traffic, plan: Schedule | None = None) -> Ids:
    """The members of each group: its ranks and, when the algorithm needs them, the switches beside them. plan: its schedule.

    Shape (groups, n + switches); a switch's number is the topology's.
    """
    groups, phases = members(grid, traffic), (plan or schedule(topology, grid, traffic)).phases
    last = max((int(max(phase.source.max(initial=0), phase.destination.max(initial=0))) for phase in phases), default=0)
    if traffic.algorithm.startswith("copy/"):
        return _ends_of_copies(topology, groups, *traffic.algorithm.split("/")[1:])
    ends, size = [groups], groups.shape[1]
    if last >= size and is_multicast(topology) and (switches := topology.switch_of(groups)).min() >= 0:
        ends.append(switches[:, np.sort(np.unique(switches[0], return_index=True)[1])])
        size += ends[-1].shape[1]
    if last >= size and (fabric := above(topology, groups)) is not None:
        ends.append(fabric.switches)
    return np.concatenate(ends, axis=1)


def _ends_of_copies(topology: Topology, ranks: Ids, source: str, destination: str) -> Ids:
    """Where the copies of each rank begin and end, shape (ranks, 2)."""
    if not is_hosted(topology) or topology.cpu is None:
        raise UserError("the cluster describes no CPUs (node.cpu), so nothing can be copied to them")
    return np.stack([topology.place(ranks[:, 0], name) for name in (source, destination)], axis=1)


def schedule(topology: Topology, grid: Grid, traffic: Traffic) -> Schedule:
    """The schedule of the first group; the others, spread over nodes in the same way, use the same order of members.

    Raises NotApplicable when the algorithm does not work for them.
    """
    return _schedule(topology, grid, original(topology, grid, traffic)[0])


def plan_of(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[Schedule, bool]:
    """The schedule, or where members of nodes may take each other's places its transfers of one turn (`Place.turned`); whether it
    is these. Raises NotApplicable.
    """
    first = original(topology, grid, traffic)[0]
    turned = "/" in traffic.algorithm and is_turning(traffic.algorithm) and is_turned(topology, grid, first)
    return _schedule(topology, grid, first, turned), turned


@lru_cache(maxsize=4096)
def _schedule(topology: Topology, grid: Grid, traffic: Traffic, turned: bool = False) -> Schedule:
    if traffic.algorithm.startswith("copy/"):
        return Schedule(1, (together(np.array([0]), np.array([1]), np.array([0])),))
    place = _place(topology, grid, traffic._replace(algorithm=""))
    return algorithms[traffic.algorithm](replace(place, turned=turned))


@lru_cache(maxsize=8)
def _place(topology: Topology, grid: Grid, traffic: Traffic) -> Place:
    """Where the members of the first group are, whatever their algorithm."""
    first = first_members(grid, traffic)
    switch = np.empty(0, np.int64)
    if is_multicast(topology) and (beside := topology.switch_of(first)).min(initial=0) >= 0:
        _, seen, number = np.unique(beside, return_index=True, return_inverse=True)
        switch = np.argsort(np.argsort(seen))[number]  # by first member
    along = rings(topology, tuple(first.tolist())) if len(first) <= MEMBERS else ()
    place = Place(topology.node_of(first), switch, traffic.counts, along, meshed=not along and is_meshed(topology, first))
    if aggregation(topology) is not None:
        place = _below_switches(place, topology, grid, traffic, first)
    return place


def _below_switches(place: Place, topology: Topology, grid: Grid, traffic: Traffic, first: Ids) -> Place:
    """`place` with the fabric's switches, where they add for all sibling groups at once."""
    fabric = above(topology, members(grid, traffic._replace(groups=())))
    if fabric is None or place.size < 2:
        return place
    fabric = above(topology, first[None]) or fabric
    inside = [np.array(node) for node in place.per_node() if len(node) > 1]
    pairs = [(first[node[:1]], first[node[1:2]]) for node in inside]
    switched = all(topology.routes(*pair).shape[1] > 1 and not place.rings for pair in pairs)
    return replace(place, leaf=fabric.leaf, above=fabric.above, nic=fabric.nic, switched=switched)


@lru_cache(maxsize=1024)
def rings(topology: Topology, gpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Rings along direct links between these GPUs, of half a link each where that uses more of them; none where all traffic
    passes a switch. On four V100 with two NVLinks between each two NCCL 2.7.8 lays six rings of one link (its log in
    github.com/bigscience-workshop/bigscience experiments/bandwidth).
    """
    size = len(gpus)
    if not 2 < size <= MEMBERS:
        return ()
    ends = np.array(gpus)
    routes = topology.routes(np.repeat(ends, size), np.tile(ends, size))
    direct = ((routes >= 0).sum(axis=1) == 1).reshape(size, size)
    if not direct.any():
        return ()
    capacity = np.where(direct, topology.capacity(np.maximum(routes.max(axis=1), 0)).reshape(size, size), 0.0)
    units = np.rint(capacity / capacity[direct].min()).astype(np.int64)
    whole, halves = ring_cycles(units), ring_cycles(2 * units)
    return halves if len(halves) > 2 * len(whole) else whole


def is_meshed(topology: Topology, gpus: Ids) -> bool:
    """Whether every two of these GPUs that share the first one's node have a link of their own."""
    beside = gpus[topology.node_of(gpus) == topology.node_of(gpus[:1])]
    size = len(beside)
    routes = topology.routes(np.repeat(beside, size), np.tile(beside, size))
    return size > 2 and int(((routes >= 0).sum(axis=1) == 1).sum()) == size * (size - 1) and size < len(gpus)


@lru_cache(maxsize=4096)
def applicable(topology: Topology, grid: Grid, traffic: Traffic) -> bool:
    """Whether the algorithm works for these members."""
    try:
        plan_of(topology, grid, traffic)
    except NotApplicable:
        return False
    return True


@lru_cache(maxsize=4096)
def fullest(topology: Topology, grid: Grid, traffic: Traffic) -> int:
    """Members of the first sibling group in the node that has most of them."""
    return int(np.unique(topology.node_of(first_members(grid, traffic)), return_counts=True)[1].max())


@lru_cache(maxsize=4096)
def sent(topology: Topology, grid: Grid, traffic: Traffic, at: tuple[tuple[str, int], ...]) -> float:
    """Fraction of the buffer S that a rank at these coordinates sends.

    Where they are those of all members, the most that one sends; of operations with a root the mean, for ranks that run the same
    program take turns as the root.
    """
    first = first_members(grid, traffic)
    plan, turned = plan_of(topology, grid, traffic)
    rotation = rotation_of(topology)
    shares = plan.sent(len(first), rotation.turns if rotation and turned else 1)
    ours = grid.are_at(first, dict(at))
    if ours.all() and traffic.algorithm.partition("/")[0] not in ROOTED:
        return float(shares.max(initial=0.0))
    return float(shares[ours].mean())


@lru_cache(maxsize=4096)
def stretches(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[Stretch, ...]:
    """The demand of `traffic` on raw links; consecutive phases over the same transfers are one stretch.

    The first piece of a pipeline goes through all phases one after the other; the others follow in its wake, all phases at once.
    """
    (plan, turned), again = plan_of(topology, grid, traffic), copies(topology, grid, traffic)
    groups, rotation = endpoints(topology, grid, again.first, plan), rotation_of(topology)
    ends = _turned_ends(groups.shape[1], len(first_members(grid, traffic)), rotation.turns if rotation and turned else 1)
    fold = rotation if turned or again.turned else None
    laid = [(phase, times, *on_links(topology, groups, phase, again, fold)) for phase, times in _merged(plan)]
    result: list[Stretch] = []
    paths, most = Paths(np.zeros((int(ends[-1]) + 1, len(topology.kinds) + 1))), 0
    for phase, times, load, hops in laid:
        before = paths.longest
        paths.lengthen(phase, times, hops, ends)
        largest = int(phase.amounts.max(initial=0))
        result.append(_stretch(load, largest, times / plan.chunks / plan.pieces, paths.longest - before))
        most = max(most, largest * times)
    if plan.pieces > 1:
        rest = (plan.pieces - 1) / plan.chunks / plan.pieces
        result.append(_stretch(total([(load, times) for _, times, load, _ in laid]), most, rest, np.zeros_like(paths.longest)))
    if rotation and (turned or again.turned):
        result = [replace(stretch, turned=True) for stretch in result]
    return tuple(result) if len(result) <= MANY else _alike(topology, result)


def _turned_ends(ends: int, members: int, turns: int) -> Ids:
    """A number for each endpoint of a group that members which take each other's places share; those of switches follow."""
    number = np.arange(ends)
    number[:members] //= turns
    number[members:] -= members - members // turns
    return number


def _alike(topology: Topology, stretches: list[Stretch]) -> tuple[Stretch, ...]:
    """Stretches that ask as much of as many equal links are one, on the links of the first: a chain of n members has as many
    stretches, of a few sorts. They follow each other, so that their times add up; that others of a node are busy meanwhile, and
    not these, is left out.
    """
    sorts: dict[bytes, list[Stretch]] = {}
    for stretch in stretches:
        row = np.stack([topology.kind(stretch.links), topology.capacity(stretch.links), stretch.flows])
        sorts.setdefault(row[:, np.lexsort(row)].tobytes(), []).append(stretch)
    return tuple(
        Stretch(
            sum(same.share for same in alike),
            alike[0].load,
            np.sum([same.steps for same in alike], axis=0),
            sum(same.wire for same in alike),
            alike[0].turned,
        )
        for alike in sorts.values()
    )


def _stretch(load: Load | FramedLoad, largest: int, chunk: float, more: Floats) -> Stretch:
    """load: chunks that cross each link; largest: chunks of the largest flow; chunk: as a fraction of S."""
    return Stretch(largest * chunk, load.divided(max(largest, 1)), more[:-1], float(more[-1]))


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
