"""The choice of algorithm and protocol for a collective or send, and its cost without contention: bytes per link, and latency.

NCCL chooses for each communicator by itself: sibling groups whose members are spread over nodes in other ways may run by others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from sim.clock import on_grid
from sim.collectives import offered
from sim.engine.network import FlowPart
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.transfers.link_merging import Wiring, wire
from sim.pricing.transfers.measured_tables import CollectiveTable
from sim.pricing.transfers.nccl_tuning import communicator, limits_of, passed_over
from sim.pricing.transfers.protocols import (
    IN_SWITCH,
    SIMPLE,
    Rates,
    Shape,
    collective_seconds,
    considered,
    own_piece,
    priced_as,
    split,
    usable,
)
from sim.pricing.transfers.sibling_groups import first_alike, kinds, placements, together
from sim.pricing.transfers.switch_loops import MEASURED, filling
from sim.pricing.transfers.traffic import Traffic, members, ranks_of
from sim.pricing.transfers.transfer_cost import TransferCost, cost_key
from sim.pricing.transfers.wiring import applicable, extent, fullest, sent
from sim.program import Collective, Send
from topologies.links.impaired import ImpairedTopology
from topologies.links.topology import Topology, gpu_kind
from topologies.reading import UserError

COPY = "copy"  # the protocol of copies to and from the host
SHORT = 16  # a stretch that takes less than 1/SHORT of a collective's time on links is not a flow of its own
SUMS = ("all_reduce", "reduce_scatter")  # of gloo: rings whose members add up all parts of the buffer but one
REMEMBERED = 1024  # traffics by themselves on the links
NEAR = 0.01  # groups whose times differ by less than this part are of one kind

At = tuple[tuple[str, int], ...]  # coordinates that ranks share


class Choice(NamedTuple):
    """The cheapest algorithm and protocol for equivalent sibling groups."""

    traffic: Traffic
    protocol: str
    alone: float  # seconds without contention


class GroupRates(NamedTuple):
    """The prices of groups of ranks, with their protocols' numbers by kind of link, and those of copies."""

    prices: Prices
    protocols: dict[str, Rates]
    copies: Rates


@dataclass
class Known:
    """What the choices of all programs with equal prices, topology and grid have in common."""

    chosen: dict[Hashable, tuple[Choice, ...]] = field(default_factory=dict)  # by what is sent, and among whom
    priced: dict[Prices, GroupRates] = field(default_factory=dict)
    groups_of: dict[Traffic, GroupRates] = field(default_factory=dict)
    laid: dict[tuple[Traffic, ...], AlgorithmChoice] = field(default_factory=dict)  # on links that nothing else uses


class AlgorithmChoice:
    """Prices of collectives and sends, each on its own or (`_lay`) with others on the same links."""

    def __init__(self, topology: Topology, grid: Grid, prices: Prices) -> None:
        self.topology, self.grid, self.prices = topology, grid, prices
        self._known = self._known_of(prices)
        self._chosen = self._known.chosen

    def _known_of(self, prices: Prices) -> Known:
        """What is known under these prices."""
        known: Known = prices.choices.setdefault((self.topology, self.grid), Known())
        return known

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
            copies = simple._replace(base=0.0, latency=(0.0,) * kinds, fill=(0.0,) * kinds, copy=float("inf"))
            rates = self._known.priced[prices] = GroupRates(prices, protocols, copies)
        return rates

    def choose(self, work: Collective | Send, siblings: Traffic) -> tuple[Choice, ...]:
        """For each kind of the sibling groups of `work` the cheapest algorithm and protocol, with nothing else on the links.

        Raises NotApplicable when the plan asks for an algorithm that does not work for them.
        """
        key = cost_key(work), siblings
        choices = self._chosen.get(key)
        if choices is None and isinstance(self.topology, ImpairedTopology):
            choices = self._chosen[key] = tuple(self._unaware(self.topology.nominal, work, siblings))
        if choices is None and (first := first_alike(self.topology, self.grid, siblings)) != siblings:
            choices = self._chosen[key] = tuple(
                choice._replace(traffic=choice.traffic._replace(at=siblings.at, to=siblings.to))
                for choice in self.choose(work, first)
            )
        if choices is None:
            each = [siblings._replace(groups=groups) for groups in placements(self.topology, self.grid, siblings)]
            choices = self._chosen[key] = tuple(choice for placed in each for choice in self._cheapest(work, placed))
        return choices

    def _unaware(self, nominal: Topology, work: Collective | Send, siblings: Traffic) -> Iterator[Choice]:
        """What is chosen for links as they should be: a library's tables do not know that a link is slower."""
        for traffic, protocol, _ in AlgorithmChoice(nominal, self.grid, self.prices).choose(work, siblings):
            kind = kinds(self.topology, self.grid, traffic)
            numbers = traffic.groups or range(len(kind))
            for positions in together(kind) if kind else ((),):
                alike = traffic._replace(groups=tuple(numbers[position] for position in positions) or traffic.groups)
                yield Choice(alike, protocol, self.alone(alike).price(work, alike, protocol, alike.at).alone)

    def _cheapest(self, work: Collective | Send, placed: Traffic) -> list[Choice]:
        """The choices of groups whose members are spread over nodes in the same way, but may use other links: one, as slow as the
        slowest, where they take nearly as long.
        """
        able = self.able(work, placed)
        each = {traffic.algorithm: kinds(self.topology, self.grid, traffic) for traffic in able}
        whole = self._best(work, able)
        if not any(each.values()):
            return [whole]
        numbers = placed.groups or tuple(range(max(map(len, each.values()))))
        chosen: dict[tuple[str, int], list[int]] = {}
        for positions in together(zip(*(kind or (0,) * len(numbers) for kind in each.values()), strict=True)):
            alike = tuple(numbers[position] for position in positions)
            algorithm = self._best(work, [traffic._replace(groups=alike) for traffic in able]).traffic.algorithm
            kind = each[algorithm][positions[0]] if each[algorithm] else 0
            chosen.setdefault((algorithm, kind), []).extend(alike)
        apart = [
            self._best(work, [placed._replace(algorithm=algorithm, groups=tuple(sorted(every)))])
            for (algorithm, _), every in chosen.items()
        ]
        return apart if whole.alone > (1 + NEAR) * min(choice.alone for choice in apart) else [whole]

    def _best(self, work: Collective | Send, able: list[Traffic]) -> Choice:
        passed = self._passed_over(work, able)
        best = min(self.ways(work, [way for way in able if way.algorithm != passed]), key=lambda priced: priced.alone)
        return Choice(best.traffic, best.protocol, best.alone)

    def _passed_over(self, work: Collective | Send, able: list[Traffic]) -> str:
        """Of rings and trees the one that NCCL's own estimate rules out, where it has the choice; "" elsewhere."""
        names = {traffic.algorithm for traffic in able}
        if isinstance(work, Send) or not {"all_reduce/ring", "all_reduce/tree"} <= names:
            return ""
        prices = self._of(able[0]).prices
        profile = prices.profile
        if split(work.algorithm, work.operation)[0] != "auto" or "ll" not in profile.protocols or profile.tuner:
            return ""
        return passed_over(communicator(self.topology, self.grid, able[0], limits_of(prices.gpu)), work.bytes)

    def ways(self, work: Collective | Send, able: list[Traffic]) -> list[TransferCost]:
        """The cost of `work` on its own by each algorithm of `able` and each usable protocol. Raises UserError when there is
        none.
        """
        requested = split(work.algorithm, work.operation)[1] if isinstance(work, Collective) else "auto"
        if isinstance(work, Send) and work.route:
            pairs = [(traffic, COPY) for traffic in able]
        else:
            pairs = [
                (traffic, protocol)
                for traffic in able
                for protocol in usable(traffic.algorithm, requested, self._of(traffic).protocols)
            ]
        if not pairs and requested == "auto":  # an algorithm of hardware that the profile does not price
            pairs = [(traffic, SIMPLE) for traffic in able]
        if not pairs:
            raise UserError(
                f"protocol '{requested}': not for these algorithms, or not priced by the profile, which has "
                f"{', '.join(self._of(able[0]).protocols)}"
            )
        return [self.alone(traffic).price(work, traffic, protocol, traffic.at) for traffic, protocol in pairs]

    def able(self, work: Collective | Send, placed: Traffic) -> list[Traffic]:
        """Algorithms that work for the groups of `placed`; a single one that does not says why when it is laid."""
        candidates = self._candidates(work, placed)
        return [traffic for traffic in candidates if applicable(self.topology, self.grid, traffic)] or candidates[:1]

    def _candidates(self, work: Collective | Send, placed: Traffic) -> list[Traffic]:
        """Every algorithm that may run `work` in the groups of `placed`, whose members are spread over nodes in the same way."""
        if isinstance(work, Send):
            return [placed]
        names = offered(work.operation, split(work.algorithm, work.operation)[0])
        each = fullest(self.topology, self.grid, placed)
        priced = self._of(placed).prices.profile.protocols
        if names == offered(work.operation):
            names = considered(work.operation, names, priced, each)
            table = self._table(work.operation, placed)
            names = (table.algorithm,) if table else names
        return [placed._replace(algorithm=f"{work.operation}/{name}") for name in names]

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

    def alone(self, traffic: Traffic) -> AlgorithmChoice:
        """Prices with only `traffic` on the links."""
        return self.laid(traffic)

    def laid(self, *traffics: Traffic) -> AlgorithmChoice:
        """Prices with only `traffics` on the links."""
        traffics, known = tuple(dict.fromkeys(traffics)), self._known.laid
        laid = known.get(traffics)
        if laid is None:
            if len(known) > REMEMBERED:
                known.clear()
            laid = known[traffics] = AlgorithmChoice(self.topology, self.grid, self.prices)
            laid._lay(traffics)
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
            own = own_piece(traffic.algorithm.partition("/")[0], ranks_of(self.grid, traffic))
            shape = self._shapes[traffic] = Shape(tuple(hops), sum(demand.wire for demand in demands), tuple(loads), own)
        return shape

    def price(
        self, work: Collective | Send, traffic: Traffic, protocol: str, at: At, played: Traffic | None = None
    ) -> TransferCost:
        """A protocol that reaches less of the links than they have is as many more bytes on them.

        Stretches that are short beside the others (the first piece on its way down a tree) are over before they could be shared:
        they count as latency, so that a collective is a few flows however many ranks it has.

        played: some groups of `traffic`, which take the time and send the bytes of all groups, but load their own links only.
        """
        repeat = work.repeat if isinstance(work, Collective) else 1
        rates = self._of(traffic)
        each = fullest(self.topology, self.grid, traffic) if protocol in IN_SWITCH else 0
        name = priced_as(traffic.algorithm, protocol, rates.protocols, each)
        price = rates.copies if protocol == COPY else rates.protocols[name]
        demands, binding, capacity = self.wiring.demands[traffic], self._binding, self.capacity
        own = self.wiring.demands[played] if played else demands
        if played and len(own) != len(demands):  # many stretches, fewer of them distinct where the others are absent
            return self.price(work, played, protocol, at)
        latency, transfers = collective_seconds(price, self.shape(traffic), work.bytes) if demands else (0.0, [])
        if each > MEASURED and work.bytes:
            latency += sum(transfers) * filling(each, work.bytes) / work.bytes
        operation, _, algorithm = traffic.algorithm.partition("/")
        table, working = self._table(operation, traffic) if demands else None, 1.0
        if table and algorithm == table.algorithm:  # the formula says how the time divides, the measurement how much it is
            more = self._summing(work, operation, traffic)
            scale = (table.seconds(work.bytes) + more) / (latency + sum(transfers))
            latency, transfers = latency * scale, [transfer * scale for transfer in transfers]
            working = table.working(work.bytes, more)
        elif (more := self._wire(operation, traffic)) != 1.0:
            latency, transfers = latency * more, [transfer * more for transfer in transfers]
        if isinstance(work, Collective) and work.pieces:
            latency += _listed(work, rates.prices)
        alone = latency = on_grid(repeat * latency)
        parts, full_rates, short = [], list[float](), min(sum(transfers) / SHORT, max(transfers, default=0.0))
        for demand, mine, transfer in zip(demands, own, transfers, strict=True):
            if transfer < short:
                latency += on_grid(transfer * repeat)
                alone += on_grid(transfer * repeat)
                continue
            full = min([capacity[link] / count for link, count in demand.meets if binding[link]], default=0.0)
            part = FlowPart(transfer * repeat * full, tuple(flow for flow in mine.meets if binding[flow[0]]))
            parts.append(part)
            least = full if mine is demand else min([capacity[link] / count for link, count in part.flows], default=inf)
            full_rates.append(least if part.flows else inf)
            alone += on_grid(transfer * repeat) if full else 0.0
        volume = sent(self.topology, self.grid, traffic, at) * work.bytes * repeat
        is_send, slowing = isinstance(work, Send), rates.prices.slowing(work)
        if slowing is not None and (usual := rates.prices.profile.slowdown) > 1:
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


def _listed(work: Collective, prices: Prices) -> float:
    """Seconds in which the GPU copies the pieces of a list, one by one."""
    memory, bandwidth = prices.profile.memory, prices.gpu.memory_bandwidth
    return work.pieces * memory.fixed + 2 * work.bytes / (bandwidth * memory.efficiency)
