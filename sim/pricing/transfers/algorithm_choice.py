"""The choice of algorithm and protocol for a collective or send.

NCCL chooses for each communicator by itself: sibling groups whose members are spread over nodes in other ways may run by others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from sim.collectives import offered
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.transfers.nccl_tuning import ESTIMATED, by_estimate, communicator, limits_of
from sim.pricing.transfers.protocols import SIMPLE, considered, split, usable
from sim.pricing.transfers.sibling_groups import first_alike, kinds, placements, together
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.transfer_cost import TransferCost, cost_key
from sim.pricing.transfers.transfer_prices import COPY, TransferPrices
from sim.pricing.transfers.wiring import applicable, fullest
from sim.program import Collective, Send
from topologies.links.impaired import ImpairedTopology
from topologies.links.topology import Topology
from topologies.reading import UserError

NEAR = 0.01  # groups whose times differ by less than this part are of one kind


class Choice(NamedTuple):
    """The cheapest algorithm and protocol for equivalent sibling groups."""

    traffic: Traffic
    protocol: str
    alone: float  # seconds without contention


class AlgorithmChoice(TransferPrices):
    """Prices of collectives and sends by the algorithms and protocols that are cheapest with nothing else on the links."""

    def __init__(self, topology: Topology, grid: Grid, prices: Prices) -> None:
        super().__init__(topology, grid, prices)
        self._chosen: dict[Hashable, tuple[Choice, ...]] = self._known.chosen

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
                yield Choice(alike, protocol, self.alone(alike).seconds(work, alike, protocol))

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
        pairs = self._left(work, self._pairs(work, able))
        return min((Choice(*pair, self.alone(pair[0]).seconds(work, *pair)) for pair in pairs), key=lambda choice: choice.alone)

    def _left(self, work: Collective | Send, pairs: list[tuple[Traffic, str]]) -> list[tuple[Traffic, str]]:
        """Those of `pairs` among which NCCL's own estimate leaves the choice."""
        traffic, prices = pairs[0][0], self._of(pairs[0][0]).prices
        profile = prices.profile
        if len(pairs) == 1 or isinstance(work, Send) or work.operation not in ESTIMATED or "ll" not in profile.protocols:
            return pairs
        group = communicator(self.topology, self.grid, traffic._replace(algorithm=""), limits_of(prices.gpu))
        if group is None or (group.nodes > 1 and profile.tuner):
            return pairs
        by_name = {(each.algorithm, protocol): (each, protocol) for each, protocol in pairs}
        return [by_name[way] for way in by_estimate(group, list(by_name), work.bytes, profile.sends_ll)]

    def ways(self, work: Collective | Send, able: list[Traffic]) -> list[TransferCost]:
        """The cost of `work` on its own by each algorithm of `able` and each usable protocol. Raises UserError when there is
        none.
        """
        pairs = self._pairs(work, able)
        return [self.alone(traffic).price(work, traffic, protocol, traffic.at) for traffic, protocol in pairs]

    def _pairs(self, work: Collective | Send, able: list[Traffic]) -> list[tuple[Traffic, str]]:
        """Algorithms and protocols; see `ways`."""
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
        return pairs

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
