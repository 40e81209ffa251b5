"""The cost of collectives and sends on the links that they are laid on, without contention: bytes per link, and latency."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from sim.clock import on_grid
from sim.engine.network import FlowPart
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.transfers.link_merging import Demand, Wiring, wire
from sim.pricing.transfers.measured_tables import CollectiveTable
from sim.pricing.transfers.nccl_tuning import chunks, limits_of
from sim.pricing.transfers.protocols import (
    BETWEEN,
    OWN_KERNEL,
    P2P,
    SIMPLE,
    WRITING,
    Rates,
    Shape,
    collective_seconds,
    own_piece,
    priced_as,
)
from sim.pricing.transfers.switch_loops import Loops
from sim.pricing.transfers.traffic import Traffic, members, ranks_of
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.pricing.transfers.wiring import extent, fullest, sent
from sim.program import Collective, Send
from sim.remembered import kept
from topologies.links.topology import Topology, gpu_kind, kind_of_link

COPY = "copy"  # the protocol of copies to and from the host
SHORT = 16  # a stretch that takes less than 1/SHORT of a collective's time on links is not a flow of its own
SUMS = ("all_reduce", "reduce_scatter")  # of gloo: rings whose members add up all parts of the buffer but one
REMEMBERED = 1024  # traffics by themselves on the links

At = tuple[tuple[str, int], ...]  # coordinates that ranks share


class Way(NamedTuple):
    """What the price of a traffic by a protocol follows from, whatever is sent. full: by stretch, bytes per second of a flow that
    has its links for itself; each: members of a node where the switch adds; wire: see `TransferPrices._wire`.
    """

    rates: GroupRates
    price: Rates
    demands: tuple[Demand, ...]
    full: list[float]
    shape: Shape
    table: CollectiveTable | None
    wire: float


class GroupRates(NamedTuple):
    """The prices of groups of ranks, with their protocols' numbers by kind of link, and those of copies."""

    prices: Prices
    protocols: dict[str, Rates]
    copies: Rates


@dataclass
class Known:
    """What the choices of all programs with equal prices, topology and grid have in common."""

    chosen: dict[Hashable, Any] = field(default_factory=dict)  # by what is sent, and among whom
    priced: dict[Prices, GroupRates] = field(default_factory=dict)
    groups_of: dict[Traffic, GroupRates] = field(default_factory=dict)
    laid: dict[tuple[Traffic, ...], TransferPrices] = field(default_factory=dict)  # on links that nothing else uses


class TransferPrices:
    """Prices of collectives and sends, each on its own or (`_lay`) with others on the same links."""

    def __init__(self, topology: Topology, grid: Grid, prices: Prices) -> None:
        self.topology, self.grid, self.prices = topology, grid, prices
        self._known = self._known_of(prices)

    def _known_of(self, prices: Prices) -> Known:
        """What is known under these prices: prices that are others scaled share with them what was chosen, but no rates."""
        every: dict[Prices, Known] = prices.choices.setdefault((self.topology, self.grid), {})
        if prices not in every:
            every[prices] = Known(next(iter(every.values())).chosen if every else {})
        return every[prices]

    def _of(self, traffic: Traffic) -> GroupRates:
        """The prices of groups by the kinds of their GPUs."""
        if len(self.prices.members) == 1:
            return self._rates(self.prices)
        rates = self._known.groups_of.get(traffic)
        if rates is None:
            ranks = np.unique(members(self.grid, traffic))
            kinds = np.unique(gpu_kind(self.topology, ranks)).tolist()
            rates = self._known.groups_of[traffic] = self._rates(self.prices.among(tuple(kinds)))
        return rates

    def _rates(self, prices: Prices) -> GroupRates:
        rates = self._known.priced.get(prices)
        if rates is None:
            protocols = prices.rates(self.topology.kinds)
            kinds, simple = len(self.topology.kinds), protocols[SIMPLE]
            # a copy has no steps: its links carry what Simple reaches on them
            copies = simple._replace(
                base=0.0, latency=(0.0,) * kinds, fill=(0.0,) * kinds, copy=float("inf"), widening=(), overlap=()
            )
            rates = self._known.priced[prices] = GroupRates(prices, protocols, copies)
        return rates

    def _lay(self, traffics: tuple[Traffic, ...]) -> None:
        """Wire `traffics` onto the links: see `sim.pricing.transfers.link_merging`."""
        self._lay_on(wire(self.topology, self.grid, traffics))

    def _lay_on(self, wiring: Wiring) -> None:
        self.wiring = wiring
        price = self.prices.link
        pairs = zip(self.wiring.shared_capacity, self.wiring.shared_kind, strict=True)
        self.capacity = [nominal * price(kind).efficiency for nominal, kind in pairs]  # bytes per second that traffic reaches
        self._binding = self._binding_links()
        self._shapes = self.wiring.shapes
        self._ways: dict[tuple[Traffic, str], Way] = {}

    def alone(self, traffic: Traffic) -> TransferPrices:
        """Prices with only `traffic` on the links."""
        return self.laid(traffic)

    def laid(self, *traffics: Traffic) -> TransferPrices:
        """Prices with only `traffics` on the links."""
        traffics, known = tuple(dict.fromkeys(traffics)), self._known.laid
        laid = known.get(traffics)
        if laid is None:
            laid = TransferPrices(self.topology, self.grid, self.prices)
            laid._lay(traffics)  # which may refuse: only what is on the links is known
            kept(known, traffics, laid, REMEMBERED)
        return laid

    def _binding_links(self) -> list[bool]:
        """Flows on the links that can limit: of links that always carry the same traffic, the one of least capacity."""
        least: dict[int, int] = {}
        for link, twin in enumerate(self.wiring.twin):
            if twin not in least or self.capacity[link] < self.capacity[least[twin]]:
                least[twin] = link
        return [least[twin] == link for link, twin in enumerate(self.wiring.twin)]

    def _kinds(self, traffic: Traffic) -> set[str]:
        """The kinds of links that `traffic` takes."""
        return {self.wiring.kind[link] for demand in self.wiring.demands[traffic] for link, _ in demand.flows}

    def _table(self, operation: str, traffic: Traffic) -> CollectiveTable | None:
        """The measured prices of `operation` among such groups."""
        prices = self._of(traffic).prices
        return prices.table(operation, *self._extent(traffic)) if prices.profile.tables else None

    def _extent(self, traffic: Traffic) -> tuple[int, int]:
        return extent(self.topology, self.grid, traffic)

    def shape(self, traffic: Traffic) -> Shape:
        """The load of `traffic` on links, as `sim.pricing.transfers.protocols` needs it."""
        shape = self._shapes.get(traffic)
        if shape is None:
            wiring, loads, hops = self.wiring, [], [0.0] * len(self.wiring.kinds)
            demands = wiring.demands[traffic]
            for demand in demands:
                hops = [total + more for total, more in zip(hops, demand.steps, strict=True)]
                busiest: dict[int, float] = {}
                for link, flows in demand.flows:
                    kind = wiring.kinds.index(wiring.kind[link])
                    busiest[kind] = max(busiest.get(kind, 0.0), demand.share * flows / wiring.capacity[link])
                loads.append(tuple(busiest.items()) or ((0, 0.0),))
            operation = traffic.algorithm.partition("/")[0]
            own, writing = own_piece(operation, ranks_of(self.grid, traffic)), WRITING.get(operation, 1.0)
            steps = sum(demand.wire for demand in demands)
            loops, parts = self._loops(traffic), self._chunks(operation, traffic)
            shape = self._shapes[traffic] = Shape(tuple(hops), steps, tuple(loads), own, loops, writing, parts)
        return shape

    def _chunks(self, operation: str, traffic: Traffic) -> float:
        """See `nccl_tuning.chunks`; none of messages that leave the node."""
        inside = OWN_KERNEL.get(operation) == P2P and not {kind_of_link(kind) for kind in self._kinds(traffic)} & set(BETWEEN)
        return chunks(ranks_of(self.grid, traffic)) if inside else 0.0

    def _loops(self, traffic: Traffic) -> Loops | None:
        """The loops of a reduction in the switch, where the profile has a price for its kernel."""
        algorithm, priced = traffic.algorithm.partition("/")[2], self._of(traffic).protocols
        if algorithm not in ("in_switch", "in_switch_tree", "in_switch_collnet") or "in_switch" not in priced:
            return None
        nodes, kinds = self._extent(traffic)[1], self.wiring.kinds
        channels = limits_of(self._of(traffic).prices.gpu).switch_channels[nodes > 1]
        inside, across = (
            tuple(number for number, kind in enumerate(kinds) if kind_of_link(kind) in among) for among in (("nvlink",), BETWEEN)
        )
        return Loops(fullest(self.topology, self.grid, traffic), channels, nodes, inside, across)

    def _way(self, traffic: Traffic, protocol: str) -> Way:
        """See `Way`."""
        way = self._ways.get((traffic, protocol))
        if way is None:
            rates, demands, capacity = self._of(traffic), self.wiring.demands[traffic], self.capacity
            name = priced_as(traffic.algorithm, protocol, rates.protocols)
            price = rates.copies if protocol == COPY else rates.protocols[name]
            links = [[link for link in demand.meets if self._binding[link[0]]] for demand in demands]
            full = [min([capacity[link] / count for link, count in meets], default=0.0) for meets in links]
            operation, _, algorithm = traffic.algorithm.partition("/")
            table = self._table(operation, traffic) if demands else None
            own = table if table and algorithm == table.algorithm else None
            shape, wire = self.shape(traffic), self._wire(operation, traffic)
            way = self._ways[traffic, protocol] = Way(rates, price, demands, full, shape, own, wire)
        return way

    def _times(self, work: Collective | Send, traffic: Traffic, way: Way) -> tuple[float, list[float], float]:
        """Of one collective seconds besides those on links, seconds of each stretch, and the part of them in which it slows
        compute beside it.
        """
        if not way.demands:
            return 0.0, [], 1.0
        latency, transfers = collective_seconds(way.price, way.shape, work.bytes)
        if way.table:  # the formula says how the time divides, the measurement how much it is
            more = self._summing(work, way.table.operation, traffic)
            scale = (way.table.seconds(work.bytes) + more) / (latency + sum(transfers))
            return latency * scale, [transfer * scale for transfer in transfers], way.table.working(work.bytes, more)
        if way.wire != 1.0:
            latency, transfers = latency * way.wire, [transfer * way.wire for transfer in transfers]
        return latency, transfers, 1.0

    def seconds(self, work: Collective | Send, traffic: Traffic, protocol: str) -> float:
        """Seconds of `work` without contention."""
        way = self._way(traffic, protocol)
        latency, transfers, _ = self._times(work, traffic, way)
        repeat = work.repeat if isinstance(work, Collective) else 1
        if isinstance(work, Collective) and work.pieces:
            latency += _listed(work, way.rates.prices)
        short = _short(transfers)
        on_links = zip(transfers, way.full, strict=True)
        return on_grid(repeat * latency) + sum(on_grid(each * repeat) for each, full in on_links if full or each < short)

    def price(
        self, work: Collective | Send, traffic: Traffic, protocol: str, at: At, played: Traffic | None = None
    ) -> TransferCost:
        """A protocol that reaches less of the links than they have is as many more bytes on them.

        Stretches that are short beside the others (the first piece on its way down a tree) are over before they could be shared:
        they count as latency, so that a collective is a few flows however many ranks it has.

        played: some groups of `traffic`, which take the time and send the bytes of all groups, but load their own links only.
        """
        repeat = work.repeat if isinstance(work, Collective) else 1
        way, binding, capacity = self._way(traffic, protocol), self._binding, self.capacity
        demands = way.demands
        own = self.wiring.demands[played] if played else demands
        if played and len(own) != len(demands):  # many stretches, fewer of them distinct where the others are absent
            return self.price(work, played, protocol, at)
        latency, transfers, working = self._times(work, traffic, way)
        if isinstance(work, Collective) and work.pieces:
            latency += _listed(work, way.rates.prices)
        alone = latency = on_grid(repeat * latency)
        parts, full_rates, short = [], list[float](), _short(transfers)
        for demand, mine, transfer, full in zip(demands, own, transfers, way.full, strict=True):
            if transfer < short:
                latency += on_grid(transfer * repeat)
                alone += on_grid(transfer * repeat)
                continue
            part = FlowPart(transfer * repeat * full, tuple(flow for flow in mine.meets if binding[flow[0]]))
            parts.append(part)
            least = full if mine is demand else min([capacity[link] / count for link, count in part.flows], default=inf)
            full_rates.append(least if part.flows else inf)
            alone += on_grid(transfer * repeat) if full else 0.0
        volume = sent(self.topology, self.grid, traffic, at) * work.bytes * repeat
        is_send, slowing = isinstance(work, Send), way.rates.prices.slowing(work)
        if slowing is not None and (usual := way.rates.prices.profile.slowdown) > 1:
            working = (slowing - 1) / (usual - 1)
        priced = played or traffic, tuple(parts), tuple(full_rates), latency, volume, alone, is_send, protocol, working
        return TransferCost(*priced, slowing=slowing)

    def _summing(self, work: Collective | Send, operation: str, traffic: Traffic) -> float:
        """Seconds in which a rank adds up numbers of 16 bits, beyond those of as many bytes of fp32, which tables are of."""
        ranks, narrow = self._extent(traffic)[0], operation in SUMS and work.width == 2
        return narrow * self._of(traffic).prices.profile.narrow_sum * work.bytes / 2 * (ranks - 1) / ranks

    def _wire(self, operation: str, traffic: Traffic) -> float:
        """The factor by which the library keeps links busy for longer than the data need."""
        factors = self._of(traffic).prices.profile.wire
        if not factors:
            return 1.0
        return factors.get(f"{operation}/{self._extent(traffic)[0]}", factors.get(operation, 1.0))


def _short(transfers: list[float]) -> float:
    """Seconds of stretches that are shorter are latency; never of the longest."""
    return min(sum(transfers) / SHORT, max(transfers, default=0.0))


def _listed(work: Collective, prices: Prices) -> float:
    """Seconds in which the GPU copies the pieces of a list, one by one."""
    memory, bandwidth = prices.profile.memory, prices.gpu.memory_bandwidth
    return work.pieces * memory.fixed + 2 * work.bytes / (bandwidth * memory.efficiency)
