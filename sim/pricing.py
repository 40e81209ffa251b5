"""What a program's work costs before anything contends: blocks fused to three numbers, collectives to bytes per link and latency.

The host launches kernels one after the other; the GPU runs each when it is launched and the one before has ended. For any
sequence of
kernels that is a max-plus map: with the GPU free at g and the host at h, the sequence ends at max(g + busy, h + critical) and
leaves
the host at h + host. Sequences compose, so a stage of any number of layers is three numbers and one event, and small kernels
make a model launch-bound by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from sim.clock import on_grid
from sim.collectives import offered
from sim.network import Part
from sim.prices import Prices
from sim.program import Block, Collective, Kernel, Program, Send
from sim.wiring import Traffic, alike, applicable, sent, wire
from topologies.hardware import nominal_latency
from topologies.topology import Topology


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


class Pricing:
    """Prices of one program on one topology; each distinct piece of work is priced once."""

    def __init__(self, program: Program, topology: Topology, prices: Prices, fold: bool = True) -> None:
        self.program, self.topology, self.prices = program, topology, prices
        self.notes: dict[str, None] = {}  # what a reader must know about these prices
        self._note_profile()
        self._blocks: dict[tuple[int, int], Fused] = {}
        self._runs: dict[tuple[int, int], Fused] = {}
        self._collectives: dict[tuple[int, int, int], Priced] = {}
        self._chosen: dict[tuple[int, int], Traffic] = {}
        self._trials: dict[Traffic, Pricing] = {}
        self._at = [tuple(cohort.at.items()) for cohort in program.cohorts]
        self._communications = list(_communications(program))
        traffics = {self._choose(work, cohort): None for work, cohort, _ in self._communications}
        self.alike = all(alike(topology, program.grid, traffic) for traffic in traffics)
        if not fold:
            traffics |= {group: None for traffic in traffics for group in _groups(program, traffic)}
        self._lay(tuple(traffics))

    def _lay(self, traffics: tuple[Traffic, ...]) -> None:
        """Find out what each link carries."""
        self.wiring = wire(self.topology, self.program.grid, traffics)
        links = self.prices.profile.links
        pairs = zip(self.wiring.capacity, self.wiring.kind, strict=True)
        self.capacity = [nominal * links[kind].efficiency for nominal, kind in pairs]  # bytes per second that traffic reaches
        # A measured step includes the catalogue's wire latency; this cluster's own is counted link by link.
        self._binding = self._binding_links()
        self._latency = [max(0.0, links[kind].latency - nominal_latency(kind)) for kind in self.wiring.kinds]

    def _choose(self, work: Collective | Send, cohort: int) -> Traffic:
        """The cheapest algorithm for `work` on its own. Raises NotApplicable when there is none."""
        key = (id(work), cohort)
        found = self._chosen.get(key)
        if found is None:
            candidates = self._candidates(work, cohort)
            possible = [traffic for traffic in candidates if applicable(self.topology, self.program.grid, traffic)]
            if len(candidates) > 1 and possible:
                found = min(possible, key=lambda traffic: self._alone(traffic)._price(work, traffic).alone)
            else:
                found = candidates[0]
            self._chosen[key] = found
        return found

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
        names = offered(work.operation, work.algorithm)
        one = Traffic("", (work.axis,), at[cohort], counts=work.counts)
        if work.cohorts:
            one = Traffic("", (), at[work.cohorts[0]], at[work.cohorts[1]], counts=work.counts)
        return [one._replace(algorithm=f"{work.operation}/{name}") for name in names]

    def collective(self, work: Collective | Send, cohort: int, group: int = -1) -> Priced:
        """`work` by its cheapest algorithm: of all sibling groups together, or of one of them."""
        key = (id(work), cohort, group)
        found = self._collectives.get(key)
        if found is None:
            traffic = self._choose(work, cohort)
            found = self._price(work, traffic if group < 0 else traffic._replace(group=group))
            self._collectives[key] = found
        return found

    def _price(self, work: Collective | Send, traffic: Traffic) -> Priced:
        repeat = work.repeat if isinstance(work, Collective) else 1
        demands = self.wiring.demands[traffic]
        binding = self._binding
        parts = tuple(
            Part(demand.share * work.bytes * repeat, tuple(flow for flow in demand.flows if binding[flow[0]]))
            for demand in demands
        )
        steps = sum(
            demand.wire + sum(count * latency for count, latency in zip(demand.steps, self._latency, strict=True))
            for demand in demands
        )
        latency = on_grid(repeat * (steps + (self.prices.profile.collective_launch if demands else 0.0)))
        capacity = self.capacity
        transfer = sum(on_grid(p.bytes / min(capacity[link] / count for link, count in p.flows)) for p in parts if p.flows)
        volume = sent(self.topology, self.program.grid, traffic) * work.bytes * repeat
        return Priced(traffic, parts, latency, volume, latency + transfer, isinstance(work, Send))

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
            launch, synchronous = self.prices.profile.launch, self.prices.profile.synchronous
            state, kernels = (0.0, 0.0, 0.0), 0.0
            parts: dict[tuple[str, str], float] = {}
            for item in items:
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

    def _note_profile(self) -> None:
        profile, gpu = self.prices.profile, self.prices.gpu.name
        if gpu != profile.gpu:
            self.notes[f"profile {profile.name} was made for {profile.gpu}, and is used here for {gpu}"] = None

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
