"""What collectives and sends cost before anything contends: bytes per link, and latency."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self

from sim import notes
from sim.clock import on_grid
from sim.collectives import offered
from sim.merging import wire
from sim.network import Part
from sim.prices import Prices
from sim.program import BESIDE, Block, Collective, Item, Join, Program, Send, Start
from sim.protocols import SIMPLE, Shape, collective_seconds, considered, own_piece, rates, split, usable
from sim.tables import CollectiveTable
from sim.wiring import Traffic, alike, applicable, extent, fullest, ranks_of, sent
from topologies.reading import UserError
from topologies.topology import Topology

COPY = "copy"  # the protocol of copies to and from the host
SHORT = 16  # a stretch that takes less than 1/SHORT of a collective's time on links is not a flow of its own


@dataclass(frozen=True, slots=True)
class Priced:
    """A collective or send on merged links."""

    traffic: Traffic
    parts: tuple[Part, ...]
    latency: float  # seconds, of all its rounds
    sent: float  # bytes that one rank of the cohort sends
    alone: float  # seconds without contention
    is_send: bool  # from one rank to another, needing nobody else to come
    protocol: str  # NCCL's name of how data are handed over
    working: float = 1.0  # part of its time in which it takes what compute beside it needs; in the rest it waits for others


class Communication:
    """Prices of what the ranks of one program send on one topology; each distinct collective or send is priced once."""

    def __init__(self, program: Program, topology: Topology, prices: Prices, fold: bool = True) -> None:
        self.program, self.topology, self.prices = program, topology, prices
        self.notes: dict[str, None] = {}  # what a reader must know about these prices
        self.notes |= dict.fromkeys(notes.of_machine(prices, topology, program.grid.world))
        self._inside: dict[int, tuple[Collective, ...]] = {}
        self._collectives: dict[tuple[int, int, int], Priced] = {}
        profile = prices.profile
        self._rates = {
            name: rates(protocol.base, protocol.links, topology.kinds, profile.copy_rate)
            for name, protocol in profile.every_protocol().items()
        }
        # a copy has no steps: its links carry what Simple reaches on them
        kinds, simple = len(topology.kinds), self._rates[SIMPLE]
        self._copies = simple._replace(base=0.0, latency=(0.0,) * kinds, fill=(0.0,) * kinds, copy=float("inf"))
        # what is cheapest does not depend on the rest of the program: it is remembered for the next one with the same prices
        self._chosen = prices.choices.setdefault((topology, program.grid), {})
        self._values: dict[Hashable, Priced] = {}
        self._trials: dict[Traffic, Self] = {}
        self._at = [tuple(cohort.at.items()) for cohort in program.cohorts]
        self._communications = list(self._distinct())
        traffics = {self._choose(work, cohort)[0]: None for work, cohort, _ in self._communications}
        self.alike = all(alike(topology, program.grid, traffic) for traffic in traffics)
        if not fold:
            traffics |= {group: None for traffic in traffics for group in _groups(program, traffic)}
        self._lay(tuple(traffics))

    def _distinct(self) -> Iterator[tuple[Collective | Send, int, str]]:
        """Distinct communications: work, cohort, and inside a block the stream that it is on or keeps in step with."""
        for number, cohort in enumerate(self.program.cohorts):
            seen: set[int] = set()
            for op in cohort.ops:
                if id(op.work) in seen:
                    continue
                seen.add(id(op.work))
                if not isinstance(op.work, Block):
                    yield op.work, number, ""
                    continue
                streams = _streams(op.work)
                for _, work in self.talk(op.work):
                    if id(work) not in seen:
                        seen.add(id(work))
                        yield work, number, streams.get(id(work), BESIDE)

    def _lay(self, traffics: tuple[Traffic, ...]) -> None:
        """Find out what each link carries."""
        self.wiring = wire(self.topology, self.program.grid, traffics)
        price = self.prices.profile.link
        pairs = zip(self.wiring.shared_capacity, self.wiring.shared_kind, strict=True)
        self.capacity = [nominal * price(kind).efficiency for nominal, kind in pairs]  # bytes per second that traffic reaches
        self._binding = self._binding_links()
        self._shapes = self.wiring.shapes

    def _choose(self, work: Collective | Send, cohort: int) -> tuple[Traffic, str]:
        """The cheapest algorithm and protocol for `work` on its own. Raises NotApplicable when there is none."""
        key = self._key(work, cohort)
        found = self._chosen.get(key)
        if found is None:
            best = min(self.options(work, cohort), key=lambda priced: priced.alone)
            found = self._chosen[key] = best.traffic, best.protocol
        return found

    def options(self, work: Collective | Send, cohort: int) -> list[Priced]:
        """`work` on its own by every algorithm and protocol that it may use. Raises UserError when there is none."""
        asked = split(work.algorithm, work.operation)[1] if isinstance(work, Collective) else "auto"
        able = self._applicable(work, cohort)
        if isinstance(work, Send) and work.route:
            return [self._alone(traffic)._price(work, traffic, COPY, cohort) for traffic in able]
        pairs = [(traffic, protocol) for traffic in able for protocol in usable(traffic.algorithm, asked, self._rates)]
        if not pairs and asked == "auto":  # an algorithm of hardware that the profile does not price
            pairs = [(traffic, SIMPLE) for traffic in able]
        if not pairs:
            raise UserError(
                f"protocol '{asked}': not for these algorithms, or not priced by the profile, which has {', '.join(self._rates)}"
            )
        return [self._alone(traffic)._price(work, traffic, protocol, cohort) for traffic, protocol in pairs]

    def shapes(self, work: Collective | Send, cohort: int) -> dict[str, Shape]:
        """What each algorithm that may run `work` asks of the links, by its full name."""
        return {traffic.algorithm: self._alone(traffic).shape(traffic) for traffic in self._applicable(work, cohort)}

    def _applicable(self, work: Collective | Send, cohort: int) -> list[Traffic]:
        """Candidates that work for these members; a single one that does not says why when it is laid."""
        candidates = self._candidates(work, cohort)
        return [one for one in candidates if applicable(self.topology, self.program.grid, one)] or candidates[:1]

    def _alone(self, traffic: Traffic) -> Self:
        """The same prices with only `traffic` on the links: what other algorithms would load them with does not matter."""
        found = self._trials.get(traffic)
        if found is None:
            found = self._trials[traffic] = copy(self)
            found._lay((traffic,))
        return found

    def _binding_links(self) -> list[bool]:
        """Of links that always carry the same, only the one of least capacity can ever limit anything."""
        least: dict[int, int] = {}
        for link, twin in enumerate(self.wiring.twin):
            if twin not in least or self.capacity[link] < self.capacity[least[twin]]:
                least[twin] = link
        return [least[twin] == link for link, twin in enumerate(self.wiring.twin)]

    def _candidates(self, work: Collective | Send, cohort: int) -> list[Traffic]:
        """Every algorithm that may run `work`."""
        at = self._at
        if isinstance(work, Send) and work.route:
            return [Traffic(f"copy/{'/'.join(work.route)}", (), at[cohort])]
        if isinstance(work, Send):
            return [Traffic("send/direct", (), at[cohort], at[work.to])]
        names = offered(work.operation, split(work.algorithm, work.operation)[0])
        one = Traffic("", work.axes, _across(at[cohort], work.axes), counts=work.counts)
        if work.cohorts:
            one = Traffic("", (), at[work.cohorts[0]], at[work.cohorts[1]], counts=work.counts)
        each = fullest(self.topology, self.program.grid, one)
        priced = self.prices.profile.protocols
        if names == offered(work.operation):
            names = considered(work.operation, names, priced, each)
            table = self._table(work.operation, one)
            names = (table.algorithm,) if table else names
        return [one._replace(algorithm=f"{work.operation}/{name}") for name in names]

    def collective(self, work: Collective | Send, cohort: int, group: int = -1) -> Priced:
        """`work` by its cheapest algorithm and protocol: of all sibling groups together, or of one of them."""
        key = (id(work), cohort, group)
        found = self._collectives.get(key)
        if found is None:
            value = (self._key(work, cohort), group, self._at[cohort])  # equal work under other labels has the same price
            found = self._values.get(value)
            if found is None:
                traffic, protocol = self._choose(work, cohort)
                table = self._table(traffic.algorithm.partition("/")[0], traffic)
                said = notes.of_collective(self.prices, table, traffic.algorithm, self._extent(traffic), work.bytes)
                self.notes |= dict.fromkeys((*said, *notes.of_sockets(self.prices, self._kinds(traffic))))
                group_of = traffic if group < 0 else traffic._replace(group=group)
                found = self._values[value] = self._price(work, group_of, protocol, cohort)
            self._collectives[key] = found
        return found

    def transport(self, work: Collective, cohort: int) -> tuple[tuple[int, int], set[str]]:
        """(ranks, nodes) of a group of `work`, and the kinds of links that it takes."""
        traffic = self.collective(work, cohort).traffic
        return self._extent(traffic), self._kinds(traffic)

    def _key(self, work: Collective | Send, cohort: int) -> Hashable:
        """What the price of `work` depends on."""
        if isinstance(work, Send):
            return "send", work.bytes, work.route, self._at[cohort], self._at[work.to]
        pair = work.cohorts and (self._at[work.cohorts[0]], self._at[work.cohorts[1]])
        at = pair or _across(self._at[cohort], work.axes)
        return work.operation, work.bytes, work.repeat, work.axes, work.algorithm, work.counts, work.pieces, at

    def _kinds(self, traffic: Traffic) -> set[str]:
        """The kinds of links that `traffic` takes."""
        return {self.wiring.kind[link] for demand in self.wiring.demands[traffic] for link, _ in demand.flows}

    def _table(self, operation: str, traffic: Traffic) -> CollectiveTable | None:
        """The measured prices of `operation` among such groups."""
        if not self.prices.profile.tables:
            return None
        return self.prices.table(operation, *self._extent(traffic))

    def _extent(self, traffic: Traffic) -> tuple[int, int]:
        return extent(self.topology, self.program.grid, traffic)

    def shape(self, traffic: Traffic) -> Shape:
        """What `traffic` asks of the links, for `sim.protocols`."""
        found = self._shapes.get(traffic)
        if found is None:
            wiring, loads, hops = self.wiring, [], [0.0] * len(self.wiring.kinds)
            demands = wiring.demands[traffic]
            for demand in demands:
                hops = [total + more for total, more in zip(hops, demand.steps, strict=True)]
                busiest: dict[int, float] = {}
                for link, flows in demand.flows:
                    kind = wiring.kinds.index(wiring.kind[link])
                    busiest[kind] = max(busiest.get(kind, 0.0), demand.share * flows / wiring.capacity[link])
                loads.append(tuple(busiest.items()) or ((0, 0.0),))
            own = own_piece(traffic.algorithm.partition("/")[0], ranks_of(self.program.grid, traffic))
            found = self._shapes[traffic] = Shape(tuple(hops), sum(demand.wire for demand in demands), tuple(loads), own)
        return found

    def _price(self, work: Collective | Send, traffic: Traffic, protocol: str, cohort: int) -> Priced:
        """A protocol that reaches less of the links than they have is as many more bytes on them.

        Stretches that are short beside the others (the first piece on its way down a tree) are over before they could be shared:
        they count as latency, so that a collective is a few flows however many ranks it has.
        """
        repeat = work.repeat if isinstance(work, Collective) else 1
        price = self._copies if protocol == COPY else self._rates[protocol]
        demands, binding, capacity = self.wiring.demands[traffic], self._binding, self.capacity
        latency, transfers = collective_seconds(price, self.shape(traffic), work.bytes) if demands else (0.0, [])
        operation, _, algorithm = traffic.algorithm.partition("/")
        table, working = self._table(operation, traffic) if demands else None, 1.0
        if table and algorithm == table.algorithm:  # the formula says how the time divides, the measurement how much it is
            scale = table.seconds(work.bytes) / (latency + sum(transfers))
            latency, transfers = latency * scale, [transfer * scale for transfer in transfers]
            working = table.working(work.bytes)
        elif (more := self._wire(operation, traffic)) != 1.0:
            latency, transfers = latency * more, [transfer * more for transfer in transfers]
        if isinstance(work, Collective) and work.pieces:
            latency += self._listed(work)
        alone = latency = on_grid(repeat * latency)
        parts, short = [], sum(transfers) / SHORT
        for demand, transfer in zip(demands, transfers, strict=True):
            if transfer < short:
                latency += on_grid(transfer * repeat)
                alone += on_grid(transfer * repeat)
                continue
            flows = tuple(flow for flow in demand.meets if binding[flow[0]])
            full = min([capacity[link] / count for link, count in flows], default=0.0)
            parts.append(Part(transfer * repeat * full, flows))
            alone += on_grid(transfer * repeat) if flows else 0.0
        volume = sent(self.topology, self.program.grid, traffic, self._at[cohort]) * work.bytes * repeat
        return Priced(traffic, tuple(parts), latency, volume, alone, isinstance(work, Send), protocol, working)

    def _listed(self, work: Collective) -> float:
        """Seconds in which the GPU copies the pieces of a list, one by one."""
        memory, bandwidth = self.prices.profile.memory, self.prices.gpu.memory_bandwidth
        return work.pieces * memory.fixed + 2 * work.bytes / (bandwidth * memory.efficiency)

    def _wire(self, operation: str, traffic: Traffic) -> float:
        """How many times as long as needed the library keeps links busy."""
        factors = self.prices.profile.wire
        if not factors:
            return 1.0
        return factors.get(f"{operation}/{self._extent(traffic)[0]}", factors.get(operation, 1.0))

    def talk(self, block: Block) -> Iterator[tuple[int, Collective]]:
        """The collectives of a block, each with how often it runs."""
        for times, items in block.runs:
            for work in self._collectives_in(items):
                yield times, work

    def _collectives_in(self, items: tuple[Item, ...]) -> tuple[Collective, ...]:
        found = self._inside.get(id(items))
        if found is None:
            works = (item.collective if isinstance(item, Start) else item for item in items if not isinstance(item, Join))
            found = self._inside[id(items)] = tuple(work for work in works if isinstance(work, Collective))
        return found


def _streams(block: Block) -> dict[int, str]:
    """The stream of each collective that a block starts beside, by its object."""
    items = (item for run in block.runs for item in run.items)
    return {id(item.collective): item.stream for item in items if isinstance(item, Start)}


def _across(at: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Coordinates of everybody that a collective along `axes` brings together."""
    return tuple((name, place) for name, place in at if name not in axes)


def _groups(program: Program, traffic: Traffic) -> list[Traffic]:
    """`traffic` group by group."""
    grid, at = program.grid, dict(traffic.at)
    count = grid.groups((), at).size if traffic.to else len(grid.groups(traffic.axes, at))
    return [traffic._replace(group=group) for group in range(count)]
