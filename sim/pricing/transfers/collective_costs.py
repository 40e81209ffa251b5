"""Costs of the collectives and sends of one program, in the sibling groups that are played together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from sim.analysis import notes
from sim.collectives import Ids
from sim.pricing.prices import Prices
from sim.pricing.transfers.algorithm_choice import AlgorithmChoice, Choice
from sim.pricing.transfers.link_merging import Wiring
from sim.pricing.transfers.protocols import Shape
from sim.pricing.transfers.sibling_groups import Membership, lanes, together
from sim.pricing.transfers.traffic import Traffic, members
from sim.pricing.transfers.transfer_cost import TransferCost, cost_key
from sim.pricing.transfers.transfer_prices import At
from sim.pricing.transfers.wiring import link_rates
from sim.program import SIDE_STREAM, Block, Collective, Program, Send
from sim.remembered import kept, remembered
from topologies.links.sums import distinct
from topologies.links.topology import Topology, Values

REMEMBERED = 512  # prices of transfers on one wiring


class Communication(NamedTuple):
    """A distinct collective or send of a cohort. inside: of one inside a block the stream that it is on or keeps in step with;
    siblings: all of its groups, by no algorithm yet.
    """

    work: Collective | Send
    cohort: int
    inside: str
    siblings: Traffic


class _Shared(NamedTuple):
    """Sibling groups that are played together, and how many lanes of a cohort take part; kind: all groups of their kind."""

    traffic: Traffic
    kind: Traffic
    protocol: str
    lanes: int = 1


class CollectiveCosts(AlgorithmChoice):
    """Prices of what the ranks of one program send on one topology; each distinct collective or send is priced once.

    lane: of each rank of a cohort, None: one for all. Cohorts have equally many ranks, and ranks that share all other coordinates
    share a lane in every cohort or in none.
    """

    def __init__(self, program: Program, topology: Topology, prices: Prices, lane: Ids | None = None) -> None:
        super().__init__(topology, program.grid, prices)
        self.program, self.lane = program, lane
        self.notes: dict[str | notes.Note, None] = {}  # caveats of these prices, for the reader
        self._remarking = True  # whether there are notes on collectives
        for member in prices.members:
            self.notes |= dict.fromkeys(notes.of_machine(member, topology, program.grid.world))
        self._collectives: dict[tuple[Collective | Send, int, int], TransferCost] = {}
        self._every: dict[tuple[Collective | Send, int], list[TransferCost]] = {}
        self._kinds_of: dict[tuple[Collective | Send, int], tuple[Choice, ...]] = {}
        self._shared: dict[Hashable, tuple[_Shared, ...]] = {}
        self._groups: dict[tuple[tuple[str, ...], int], Ids] = {}
        self._lying_alike: dict[tuple[Traffic, tuple[int, ...]], list[Ids]] = {}
        self._at: list[At] = [tuple(cohort.at.items()) for cohort in program.cohorts]
        self._communications = communications(program)
        traffics: dict[Traffic, None] = {}
        self.alike = True  # no sibling groups differ
        for work, cohort, _, siblings in self._communications:
            choices = self._kinds_of[work, cohort] = self.choose(work, siblings)
            self.alike = self.alike and len(choices) == 1
            traffics |= {choice.traffic: None for choice in choices}
        for work, cohort, _, _ in self._communications if lane is not None else ():
            traffics |= {shared.traffic: None for shared in self._share(work, cohort)}
        self.traffics = tuple(traffics)
        self._lay(self.traffics)
        # prices do not depend on the program: they are remembered for the next one with the same links
        self._values: dict[Hashable, tuple[Any, ...]] = prices.transfers.setdefault(self.wiring, {})

    def lay_beside(self, wiring: Wiring) -> None:
        """Price everything anew on links that other jobs use too. wiring: of `traffics`, see `wire_together`."""
        self._collectives.clear()
        self._every.clear()
        self._values = {}
        self._lay_on(wiring)

    def under(self, prices: Prices) -> Self:
        """The same under other prices of the same GPUs, without notes: algorithms and protocols stay as they were chosen."""
        other = copy(self)
        other.prices, other.notes, other._remarking = prices, {}, False
        other._known, alike = other._known_of(prices), prices.transfers is self.prices.transfers
        other._collectives, other._every = (dict(self._collectives), dict(self._every)) if alike else ({}, {})
        other._values = prices.transfers.setdefault(self.wiring, {})
        other._lay_on(self.wiring)
        return other

    def siblings(self, work: Collective | Send, cohort: int) -> Traffic:
        """All groups of `work`, by no algorithm yet."""
        return _siblings(work, self._at[cohort], self._at)

    def kinds(self, work: Collective | Send, cohort: int) -> tuple[Choice, ...]:
        """The algorithm, protocol and price of each kind of sibling groups of `work`."""
        key = work, cohort
        kinds = self._kinds_of.get(key)
        if kinds is None:
            kinds = self._kinds_of[key] = self.choose(work, self.siblings(work, cohort))
        return kinds

    def options(self, work: Collective | Send, cohort: int) -> list[TransferCost]:
        """`work` on its own by every algorithm and protocol that the slowest kind of its sibling groups may use, first the
        ones that do. Raises UserError when there is none.
        """
        job = _longest(self.kinds(work, cohort))
        runs = job.traffic.algorithm, job.protocol
        return sorted(self.ways(work, self._slowest(work, cohort)), key=lambda way: (way.traffic.algorithm, way.protocol) != runs)

    def shapes(self, work: Collective | Send, cohort: int) -> dict[str, Shape]:
        """The load on links of each algorithm that may run `work`, by its full name."""
        return {traffic.algorithm: self.alone(traffic).shape(traffic) for traffic in self._slowest(work, cohort)}

    def _slowest(self, work: Collective | Send, cohort: int) -> list[Traffic]:
        groups = _longest(self.kinds(work, cohort)).traffic.groups
        return self.able(work, self.siblings(work, cohort)._replace(groups=groups))

    def collective(self, work: Collective | Send, cohort: int, group: int = -1) -> TransferCost:
        """`work` by its cheapest algorithm and protocol: of the sibling groups that are played together with number `group`, or
        −1: of all, or where they differ of the slowest kind.
        """
        key = (work, cohort, group)
        cost = self._collectives.get(key)
        if cost is None:
            if group >= 0:
                cost = self._played(work, cohort, self._share(work, cohort)[group])
            else:
                cost = max(self.each(work, cohort), key=lambda priced: priced.alone)
            self._collectives[key] = cost
        return cost

    def each(self, work: Collective | Send, cohort: int) -> list[TransferCost]:
        """`work` of each kind of sibling groups."""
        key = work, cohort
        every = self._every.get(key)
        if every is None:
            kinds = self.kinds(work, cohort)
            # equal work under other labels has the same choices, which are kept
            alike = id(kinds), self._at[cohort], self._remarking
            known = self._values.get(alike)
            if known is None:
                priced = [self._price_among(work, cohort, _Shared(kind.traffic, *kind[:2])) for kind in kinds]
                remarks = [remark for _, each in priced for remark in each]
                known = kept(self._values, alike, ([cost for cost, _ in priced], remarks, kinds), REMEMBERED)
            every = self._every[key] = known[0]
            self.notes |= dict.fromkeys(known[1])
        return every

    def transport(self, work: Collective | Send, cohort: int) -> tuple[tuple[int, int], dict[str, float]]:
        """(ranks, nodes) of a group of `work`, and the kinds of links that it takes, with the rates that `link_rates` knows."""
        traffic = self.collective(work, cohort).traffic
        return self._extent(traffic), dict.fromkeys(sorted(self._kinds(traffic)), 0.0) | self._link_rates(traffic)

    def _link_rates(self, traffic: Traffic) -> dict[str, float]:
        """See `wiring.link_rates`."""
        return link_rates(self.topology, self.grid, traffic._replace(algorithm="", groups=traffic.groups[:1]))

    def _played(self, work: Collective | Send, cohort: int, shared: _Shared) -> TransferCost:
        key = cost_key(work), shared, self._at[cohort], self._remarking
        known = self._values.get(key)
        if known is None:
            known = kept(self._values, key, self._price_among(work, cohort, shared), REMEMBERED)
        self.notes |= dict.fromkeys(known[1])
        cost: TransferCost = known[0]
        return cost

    def _price_among(self, work: Collective | Send, cohort: int, shared: _Shared) -> tuple[TransferCost, list[str | notes.Note]]:
        """The cost of `work` in these groups, and caveats of it."""
        cost = self.price(work, shared.kind, shared.protocol, self._at[cohort], shared.traffic)
        remarks = list(self._remarks(work, shared.traffic)) if self._remarking else []
        return replace(cost, lanes=shared.lanes) if shared.lanes > 1 else cost, remarks

    def _remarks(self, work: Collective | Send, traffic: Traffic) -> Iterator[str | notes.Note]:
        """Caveats of the price of `work` in these groups."""
        operation, prices, kinds = traffic.algorithm.partition("/")[0], self._of(traffic).prices, self._kinds(traffic)
        table = self._table(operation, traffic)
        yield from notes.of_collective(prices, table, traffic.algorithm, self._extent(traffic), work.bytes)
        yield from notes.of_sockets(prices, kinds)
        yield from notes.of_network(prices, operation, kinds)
        yield from notes.of_rates(prices, self._link_rates(traffic))

    def _share(self, work: Collective | Send, cohort: int) -> tuple[_Shared, ...]:
        """For each sibling group, the groups that it is played with: groups of its kind with ranks of the same lanes."""
        key = cost_key(work), self.siblings(work, cohort), cohort
        result = self._shared.get(key)
        if result is None:
            assert self.lane is not None
            meeting: list[set[int]] = []
            for group, lane in zip(self.groups(work, cohort).tolist(), self.lane.tolist(), strict=True):
                meeting += [set() for _ in range(group + 1 - len(meeting))]
                meeting[group].add(lane)
            shared: dict[int, _Shared] = {}
            for traffic, protocol, _ in self.kinds(work, cohort):
                numbers = traffic.groups or range(len(meeting))
                for positions in together([frozenset(meeting[group]) for group in numbers]):
                    groups = tuple(numbers[position] for position in positions)
                    played = traffic._replace(groups=traffic.groups if len(groups) == len(numbers) else groups)
                    shared |= dict.fromkeys(groups, _Shared(played, traffic, protocol, len(meeting[groups[0]])))
            result = self._shared[key] = tuple(shared[group] for group in range(len(meeting)))
        return result

    def soonest(self, work: Collective | Send, cohort: int) -> Values:
        """Seconds of `work` in each of its sibling groups, at least: with nothing else on the links, and none on the spine, where
        groups of one kind may differ.
        """
        siblings = self.siblings(work, cohort)
        every = [(kind, alike) for kind in self.kinds(work, cohort) for alike in self._lying(siblings, kind.traffic.groups)]
        result = np.empty(sum(len(alike) for _, alike in every))
        for kind, alike in every:
            result[alike] = self._undisturbed(work, cohort, kind, int(alike[0]))
        return result

    def _lying(self, siblings: Traffic, groups: tuple[int, ...]) -> list[Ids]:
        """Some of the sibling groups by where they lie: siblings lie alike around their first members."""
        lying = self._lying_alike.get((siblings, groups))
        if lying is None:
            first = members(self.grid, siblings)[:, 0]
            place = first - np.searchsorted(self.topology.node_of(np.arange(self.topology.gpus)), self.topology.node_of(first))
            numbers = np.array(groups or range(len(first)))
            lying = [numbers[place[numbers] == where] for where in distinct(place[numbers]).tolist()]
            self._lying_alike[siblings, groups] = lying
        return lying

    def _undisturbed(self, work: Collective | Send, cohort: int, kind: Choice, group: int) -> float:
        alone = kind.traffic._replace(groups=(group,))
        laid = self.laid(kind.traffic, alone)
        priced = laid.price(work, kind.traffic, kind.protocol, self._at[cohort], alone)
        return priced.latency + sum(
            part.bytes
            * max(
                (count / laid.capacity[link] for link, count in part.flows if laid.wiring.shared_kind[link] != "spine"),
                default=0.0,
            )
            for part in priced.parts
        )

    def least(self, work: Collective | Send, cohort: int) -> float:
        """Seconds of `work` in the sibling group that is done first, at least."""
        return float(self.soonest(work, cohort).min())

    def groups(self, work: Collective | Send, cohort: int) -> Ids:
        """The number of the sibling group of each rank of a cohort."""
        axes = () if isinstance(work, Send) or work.cohorts else work.axes
        group_of = self._groups.get((axes, cohort))
        if group_of is None:
            group_of = self._groups[axes, cohort] = self.grid.numbers(axes, dict(self._at[cohort]))
        return group_of

    def lanes(self, unlike: Ids, most: int) -> Ids | None:
        """See `sibling_groups.lanes`. unlike: of each rank of a cohort, equal numbers where effects are equal."""
        memberships: dict[Hashable, Membership] = {}
        for work, cohort, _, _ in self._communications:
            group = self.groups(work, cohort)
            kind = np.zeros(int(group.max()) + 1, np.int64)
            for number, choice in enumerate(self.kinds(work, cohort)):
                kind[list(choice.traffic.groups)] = number
            memberships[group.tobytes(), kind.tobytes()] = Membership(group, kind)
        return lanes(list(memberships.values()), unlike, most)


@remembered
def communications(program: Program) -> list[Communication]:
    """Those of a program."""
    every: list[At] = [tuple(cohort.at.items()) for cohort in program.cohorts]
    result = dict[tuple[Collective | Send, int, bool], Communication]()
    for number, (cohort, at) in enumerate(zip(program.cohorts, every, strict=True)):
        for op_work in dict.fromkeys(op.work for op in cohort.kinds):
            works: list[tuple[Collective | Send, str]] = []
            if isinstance(op_work, Block):
                works += [(work, op_work.beside.get(work, SIDE_STREAM)) for work in op_work.meetings]
            else:
                works.append((op_work, ""))
            for work, stream in works:
                if (key := (work, number, bool(stream))) not in result:
                    result[key] = Communication(work, number, stream, _siblings(work, at, every))
    return list(result.values())


def _siblings(work: Collective | Send, at: At, every: list[At]) -> Traffic:
    """See `Communication`. at: coordinates that its ranks share; every: those of all cohorts."""
    if isinstance(work, Send) and work.route:
        return Traffic(f"copy/{'/'.join(work.route)}", (), at)
    if isinstance(work, Send):
        return Traffic("send/direct", (), at, every[work.to])
    if work.cohorts:
        return Traffic("", (), every[work.cohorts[0]], every[work.cohorts[1]], counts=work.counts)
    return Traffic("", work.axes, _across(at, work.axes), counts=work.counts)


def _across(at: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The coordinates that all ranks of a collective along `axes` share."""
    return tuple((name, place) for name, place in at if name not in axes)


def _longest(kinds: tuple[Choice, ...]) -> Choice:
    return max(kinds, key=lambda choice: choice.alone)
