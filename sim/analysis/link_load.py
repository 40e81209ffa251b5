"""Bytes that each link carries in a step, and its utilisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.collectives import Ids
from sim.pricing.transfers.path_latency import Floats
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.pricing.transfers.wiring import endpoints, schedule
from sim.program import Block, Collective, Send
from sim.timeline import Timeline
from topologies.links.sums import distinct
from topologies.links.topology import Topology, is_hosted

NEAR = 1e-9  # part of the most seconds of a kind's links by which rounding may move those that are asked for


@dataclass(frozen=True)
class LinkLoad:
    """`count` links that carry equally much; `name` is the name of the first.

    capacity: nominal bytes per second; bytes: carried by each in the step; utilisation: of its capacity over the step.
    """

    name: str
    kind: str
    count: int
    capacity: float
    bytes: float
    utilisation: float


def link_loads(timeline: Timeline) -> list[LinkLoad]:
    """Every link that carries anything, the hottest first."""
    return _loads(timeline, {link: size for link, size in enumerate(_carried_by_links(timeline)) if size})


def hottest(timeline: Timeline) -> tuple[LinkLoad, ...]:
    """The hottest link of each kind, the hottest kind first."""
    wiring, size = timeline.op_costs.wiring, _carried_by_links(timeline)
    seconds = [each / capacity for each, capacity in zip(size, wiring.capacity, strict=True)]
    most: dict[str, float] = {}
    for kind, each in zip(wiring.kind, seconds, strict=True):
        most[kind] = max(each, most.get(kind, 0.0))
    nearly = {
        link: size[link] for link, each in enumerate(seconds) if size[link] and each >= most[wiring.kind[link]] * (1 - NEAR)
    }
    first: dict[str, LinkLoad] = {}
    for load in _loads(timeline, nearly):
        first.setdefault(load.kind, load)
    return tuple(first.values())


def _carried_by_links(timeline: Timeline) -> list[float]:
    """Bytes on each link of the wiring."""
    wiring = timeline.op_costs.wiring
    load_of = [0.0] * len(wiring.capacity)
    known: dict[int, list[tuple[float, int, float]]] = {}  # by the object of a traffic, which is kept: a hash visits each member
    for traffic, size, _ in transfers(timeline):
        demands = known.get(id(traffic))
        if demands is None:
            demands = [(demand.share, link, flows) for demand in wiring.demands[traffic] for link, flows in demand.flows]
            known[id(traffic)] = demands
        for share, link, flows in demands:
            load_of[link] += size * share * flows
    return load_of


def _loads(timeline: Timeline, carried: dict[int, float]) -> list[LinkLoad]:
    """Links of the wiring with the bytes that they carry, the hottest first."""
    wiring, topology, step = timeline.op_costs.wiring, timeline.op_costs.topology, timeline.step
    loads = []
    for link, size in carried.items():
        capacity = wiring.capacity[link]
        name, utilisation = topology.name(wiring.example[link]), size / (capacity * step) if step else 0.0
        loads.append(LinkLoad(name, wiring.kind[link], wiring.multiple[link], capacity, size, utilisation))
    return sorted(loads, key=lambda load: (-load.utilisation, load.name))


def link_kinds(timeline: Timeline) -> set[str]:
    """The kinds of links that the step's communication takes."""
    return set(timeline.op_costs.wiring.kind)


def node_of_rank(timeline: Timeline) -> Ids:
    """The node of each rank, shape (W,)."""
    return timeline.op_costs.topology.node_of(np.arange(timeline.program.grid.world))


def pairs(timeline: Timeline) -> tuple[Ids, Ids, Floats]:
    """Sources, destinations and bytes of all transfers in a step; ends are ranks, or switches that add, numbered after the GPUs.

    Three arrays of one length; a pair comes once for each collective that it is part of.
    """
    grid, topology = timeline.program.grid, timeline.op_costs.topology
    sources, destinations, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
    for traffic, size, _ in transfers(timeline):
        plan, groups = schedule(topology, grid, traffic), endpoints(topology, grid, traffic)
        for phase in plan.phases:
            sources.append(groups[:, phase.source].ravel())
            destinations.append(groups[:, phase.destination].ravel())
            sizes.append(np.tile(phase.amounts * (phase.times * size / plan.chunks), len(groups)))
    return np.concatenate(sources), np.concatenate(destinations), np.concatenate(sizes)


def matrix(timeline: Timeline) -> Floats:
    """Bytes that rank i sends to rank j in a step, shape (W, W); what goes through an adding switch is not between ranks."""
    world = timeline.program.grid.world
    sources, destinations, sizes = pairs(timeline)
    between = (sources < world) & (destinations < world)
    flat: Floats = np.bincount(sources[between] * world + destinations[between], sizes[between], minlength=world * world).astype(
        float
    )
    return flat.reshape(world, world)


def carried(timeline: Timeline) -> Floats:
    """Bytes on every single link of the topology in a step, shape (links,)."""
    topology = timeline.op_costs.topology
    sources, destinations, sizes = pairs(timeline)
    sorts = 3 * _sort(topology, sources) + _sort(topology, destinations)
    loads = np.zeros(topology.links)
    for sort in distinct(sorts):  # routes are asked for between ends of the same sorts
        these = sorts == sort
        routes = topology.routes(sources[these], destinations[these])
        sent = np.repeat(sizes[these], routes.shape[1])
        loads += np.bincount(routes.ravel() + 1, sent, minlength=topology.links + 1)[1:]
    return loads


def _sort(topology: Topology, ends: Ids) -> Ids:
    """0: a GPU or a switch, 1: the memory of a node, 2: its disks."""
    if not is_hosted(topology) or topology.cpu is None:
        return np.zeros(len(ends), dtype=np.int64)
    first = [int(topology.place(np.zeros(1, dtype=np.int64), name)[0]) for name in ("cpu", "nvme")]
    return np.searchsorted(first, ends, side="right").astype(np.int64)


def transfers(timeline: Timeline) -> Iterator[tuple[Traffic, float, Collective | Send]]:
    """(traffic, bytes of its buffers in the step, what it is); what several lanes do together is shared out between them."""
    op_costs, grid = timeline.op_costs, timeline.program.grid
    shares = [lane.ranks / grid.count(timeline.cohort(number).at) for number, lane in enumerate(timeline.lanes)]
    for lane, number, op, count in timeline.distinct:
        work = op.work
        if isinstance(work, Block):
            for repeats, collective in work.collectives:
                traffic = op_costs.collective(collective, timeline.lanes[lane].cohort).traffic
                yield traffic, count * repeats * collective.repeat * collective.bytes * shares[lane], collective
            continue
        cost = timeline.cost[number]
        assert isinstance(cost, TransferCost)
        repeat = work.repeat if isinstance(work, Collective) else 1
        yield cost.traffic, count * repeat * work.bytes / _partners(timeline, cost, work, timeline.cohort(lane).at), work


def _partners(timeline: Timeline, cost: TransferCost, work: object, at: dict[str, int]) -> int:
    """The number of lanes that report the same transfer."""
    if not isinstance(work, Collective):
        return 1
    if work.cohorts:
        return 2
    return cost.lanes * (timeline.program.grid.degree(work.axis) if work.axis in at else 1)
