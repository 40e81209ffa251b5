"""What a program's work costs before anything contends: blocks fused to three numbers, collectives to bytes per link and latency.

The host launches kernels one after the other; the GPU runs each when it is launched and the one before has ended. For any
sequence of kernels that is a max-plus map: with the GPU free at g and the host at h, the sequence ends at max(g + busy,
h + critical) and leaves the host at h + host. Sequences compose, so a stage of any number of layers is three numbers and one
event, and small kernels make a model launch-bound by themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from sim import notes
from sim.clock import on_grid
from sim.collectives import offered
from sim.merging import wire
from sim.network import Part
from sim.prices import Prices
from sim.program import Block, Collective, Kernel, Program, Send
from sim.protocols import SIMPLE, Shape, collective_seconds, considered, own_piece, rates, split, usable
from sim.tables import CollectiveTable
from sim.wiring import Traffic, alike, applicable, fullest, members, sent
from topologies.reading import UserError
from topologies.topology import Topology

SHORT = 16  # a stretch that takes less than 1/SHORT of a collective's time on links is not a flow of its own


class Fused(NamedTuple):
    """Kernels in sequence as a max-plus map; parts: (phase or axis, label) -> seconds on the GPU, adding up to `busy` exactly.

    kernels: the part of `busy` that is not communication, which slows down while other communication runs.
    """

    busy: float
    critical: float
    host: float
    parts: dict[tuple[str, str], float]
    kernels: float


@dataclass(frozen=True, slots=True)
class Priced:
    """A collective or send on merged links."""

    traffic: Traffic
    parts: tuple[Part, ...]
    latency: float  # seconds, of all its rounds
    sent: float  # bytes that one rank sends
    alone: float  # seconds without contention
    is_send: bool  # from one rank to another, needing nobody else to come
    protocol: str  # NCCL's name of how data are handed over


class Pricing:
    """Prices of one program on one topology; each distinct piece of work is priced once."""

    def __init__(self, program: Program, topology: Topology, prices: Prices, fold: bool = True) -> None:
        self.program, self.topology, self.prices = program, topology, prices
        self.notes: dict[str, None] = {}  # what a reader must know about these prices
        self.notes |= dict.fromkeys(notes.of_machine(prices, topology, program.grid.world))
        self._blocks: dict[tuple[int, int], Fused] = {}
        self._runs: dict[tuple[int, int], Fused] = {}
        self._collectives: dict[tuple[int, int, int], Priced] = {}
        profile = prices.profile
        self._rates = {
            name: rates(protocol.base, protocol.links, topology.kinds, profile.copy_rate)
            for name, protocol in profile.every_protocol().items()
        }
        # what is cheapest does not depend on the rest of the program: it is remembered for the next one with the same prices
        self._chosen = prices.choices.setdefault((topology, program.grid), {})
        self._values: dict[Hashable, Priced] = {}
        self._trials: dict[Traffic, Pricing] = {}
        self._at = [tuple(cohort.at.items()) for cohort in program.cohorts]
        self._communications = list(_communications(program))
        traffics = {self._choose(work, cohort)[0]: None for work, cohort, _ in self._communications}
        self.alike = all(alike(topology, program.grid, traffic) for traffic in traffics)
        if not fold:
            traffics |= {group: None for traffic in traffics for group in _groups(program, traffic)}
        self._lay(tuple(traffics))

    def _lay(self, traffics: tuple[Traffic, ...]) -> None:
        """Find out what each link carries."""
        self.wiring = wire(self.topology, self.program.grid, traffics)
        links = self.prices.profile.links
        pairs = zip(self.wiring.shared_capacity, self.wiring.shared_kind, strict=True)
        self.capacity = [nominal * links[kind].efficiency for nominal, kind in pairs]  # bytes per second that traffic reaches
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
        pairs = [(traffic, protocol) for traffic in able for protocol in usable(traffic.algorithm, asked, self._rates)]
        if not pairs and asked == "auto":  # an algorithm of hardware that the profile does not price
            pairs = [(traffic, SIMPLE) for traffic in able]
        if not pairs:
            raise UserError(
                f"protocol '{asked}': not for these algorithms, or not priced by the profile, which has {', '.join(self._rates)}"
            )
        return [self._alone(traffic)._price(work, traffic, protocol) for traffic, protocol in pairs]

    def shapes(self, work: Collective | Send, cohort: int) -> dict[str, Shape]:
        """What each algorithm that may run `work` asks of the links, by its full name."""
        return {traffic.algorithm: self._alone(traffic).shape(traffic) for traffic in self._applicable(work, cohort)}

    def _applicable(self, work: Collective | Send, cohort: int) -> list[Traffic]:
        """Candidates that work for these members; a single one that does not says why when it is laid."""
        candidates = self._candidates(work, cohort)
        return [one for one in candidates if applicable(self.topology, self.program.grid, one)] or candidates[:1]

    def _alone(self, traffic: Traffic) -> Pricing:
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
            value = (self._key(work, cohort), group)  # equal work under other labels has the same price
            found = self._values.get(value)
            if found is None:
                traffic, protocol = self._choose(work, cohort)
                table = self._table(traffic.algorithm.split("/")[0], traffic)
                said = notes.of_collective(self.prices, table, traffic.algorithm, self._extent(traffic), work.bytes)
                self.notes |= dict.fromkeys(said)
                found = self._values[value] = self._price(work, traffic if group < 0 else traffic._replace(group=group), protocol)
            self._collectives[key] = found
        return found

    def _key(self, work: Collective | Send, cohort: int) -> Hashable:
        """What the price of `work` depends on."""
        if isinstance(work, Send):
            return "send", work.bytes, self._at[cohort], self._at[work.to]
        pair = work.cohorts and (self._at[work.cohorts[0]], self._at[work.cohorts[1]])
        at = pair or _across(self._at[cohort], work.axes)
        return work.operation, work.bytes, work.repeat, work.axes, work.algorithm, work.counts, at

    def _table(self, operation: str, traffic: Traffic) -> CollectiveTable | None:
        """The measured prices of `operation` among such groups."""
        if not self.prices.profile.tables:
            return None
        return self.prices.table(operation, *self._extent(traffic))

    def _extent(self, traffic: Traffic) -> tuple[int, int]:
        """(ranks, nodes) of the first group."""
        first = members(self.program.grid, traffic._replace(group=max(0, traffic.group)))[0]
        return len(first), len(set(self.topology.node_of(first).tolist()))

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
            n = members(self.program.grid, traffic).shape[1]
            own = own_piece(traffic.algorithm.split("/")[0], n)
            found = self._shapes[traffic] = Shape(tuple(hops), sum(demand.wire for demand in demands), tuple(loads), own)
        return found

    def _price(self, work: Collective | Send, traffic: Traffic, protocol: str) -> Priced:
        """A protocol that reaches less of the links than they have is as many more bytes on them.

        Stretches that are short beside the others (the first piece on its way down a tree) are over before they could be shared:
        they count as latency, so that a collective is a few flows however many ranks it has.
        """
        repeat = work.repeat if isinstance(work, Collective) else 1
        demands, binding, capacity = self.wiring.demands[traffic], self._binding, self.capacity
        latency, transfers = collective_seconds(self._rates[protocol], self.shape(traffic), work.bytes) if demands else (0.0, [])
        operation, algorithm = traffic.algorithm.split("/")
        table = self._table(operation, traffic) if demands else None
        if table and algorithm == table.algorithm:  # the formula says how the time divides, the measurement how much it is
            scale = table.seconds(work.bytes) / (latency + sum(transfers))
            latency, transfers = latency * scale, [transfer * scale for transfer in transfers]
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
        volume = sent(self.topology, self.program.grid, traffic) * work.bytes * repeat
        return Priced(traffic, tuple(parts), latency, volume, alone, isinstance(work, Send), protocol)

    def block(self, block: Block, cohort: int) -> Fused:
        """`block` as one sequence, its collectives at their price without contention."""
        key = (id(block), cohort)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._fuse(block, cohort)
        return found

    def _fuse(self, block: Block, cohort: int) -> Fused:
        busy = critical = host = kernels = 0.0
        parts: dict[tuple[str, str], float] = {}
        for times, items in block.runs:
            once = self._items(items, cohort)
            for key, seconds in once.parts.items():
                parts[key] = parts.get(key, 0.0) + times * seconds
            kernels += times * once.kernels
            repeated = (times * once.busy, once.critical + (times - 1) * max(once.busy, once.host), times * once.host)
            busy, critical, host = _then((busy, critical, host), repeated)
        return Fused(busy, on_grid(critical), on_grid(host), parts, kernels)

    def _items(self, items: tuple[Kernel | Collective, ...], cohort: int) -> Fused:
        """One run of `items`; the layers of a stage share theirs."""
        key = (id(items), cohort)
        found = self._runs.get(key)
        if found is None:
            usual, synchronous = self.prices.profile.launch * self.program.turns, self.prices.profile.synchronous
            state, kernels = (0.0, 0.0, 0.0), 0.0
            parts: dict[tuple[str, str], float] = {}
            for item in items:
                launch = usual + self.wrapping(item)
                if isinstance(item, Kernel):
                    self._note(item)
                    part, seconds = (item.phase, item.label), self.prices.seconds(item)
                else:
                    part, seconds = (item.axis, item.label), self.collective(item, cohort).alone
                seconds = on_grid(seconds + launch if synchronous else seconds)
                kernels += seconds if isinstance(item, Kernel) else 0.0
                parts[part] = parts.get(part, 0.0) + seconds
                state = _then(state, (seconds, seconds, 0.0) if synchronous else (seconds, launch + seconds, launch))
            found = self._runs[key] = Fused(*state, parts, kernels)
        return found

    def wrapping(self, work: Kernel | Collective | Send) -> float:
        """Host seconds that PyTorch's wrapper adds to a collective."""
        found = self.prices.profile.wrapping.get(f"{work.axis}/{work.operation}") if isinstance(work, Collective) else None
        return found.seconds(work.bytes) * work.repeat if found and isinstance(work, Collective) else 0.0

    def _note(self, kernel: Kernel) -> None:
        outside = self.prices.extrapolation(kernel)
        if outside:
            self.notes[outside] = None

    def touched(self) -> set[int]:
        """Cohorts whose blocks contain collectives on links that other traffic may use at the same time: they must be played
        item by item.

        Everything inside blocks of one cohort runs on its compute stream, one after the other, and cannot meet itself.
        """
        users: dict[int, set[tuple[int, bool]]] = {}
        for work, cohort, inside in self._communications:
            for part in self.collective(work, cohort).parts:
                for link, _ in part.flows:
                    users.setdefault(link, set()).add((cohort, inside))
        return {cohort for those in users.values() if len(those) > 1 for cohort, inside in those if inside}


def _across(at: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Coordinates of everybody that a collective along `axes` brings together."""
    return tuple((name, place) for name, place in at if name not in axes)


def _then(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float, float]:
    """Max-plus composition of (busy, critical, host)."""
    return first[0] + second[0], max(first[1] + second[0], first[2] + second[1]), first[2] + second[2]


def _communications(program: Program) -> Iterator[tuple[Collective | Send, int, bool]]:
    """Distinct communications: work, cohort, whether it is inside a block."""
    for number, cohort in enumerate(program.cohorts):
        seen: set[int] = set()
        for op in cohort.ops:
            if id(op.work) in seen:
                continue
            seen.add(id(op.work))
            if isinstance(op.work, Block):
                yield from ((work, number, True) for work in op.work.collectives())
            else:
                yield op.work, number, False


def _groups(program: Program, traffic: Traffic) -> list[Traffic]:
    """`traffic` group by group."""
    grid, at = program.grid, dict(traffic.at)
    count = grid.groups((), at).size if traffic.to else len(grid.groups(traffic.axes, at))
    return [traffic._replace(group=group) for group in range(count)]
