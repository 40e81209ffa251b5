"""Costs of ops without contention: blocks fused to three numbers, collectives and sends as in `sim.pricing.collective_costs`."""

from __future__ import annotations

import numpy as np

from sim.clock import on_grid
from sim.collectives import Ids
from sim.pricing.block_costs import BlockCost, chained, fused
from sim.pricing.collective_costs import CollectiveCosts
from sim.pricing.prices import Prices
from sim.program import Block, Collective, Item, Join, Kernel, Program, Send, Start
from topologies.topology import Topology

VIEW = 2e-6  # host seconds for a view made in Python: 2.1 us of narrow, append and get_rank (torch 2.13, on a server's CPU)


class OpCosts(CollectiveCosts):
    """Prices of one program on one topology; each distinct piece of work is priced once."""

    def __init__(self, program: Program, topology: Topology, prices: Prices, lane: Ids | None = None) -> None:
        super().__init__(program, topology, prices, lane)
        self._blocks: dict[tuple[Block, int, float], BlockCost] = {}
        self._runs: dict[tuple[int, int, float], BlockCost] = {}
        self._equal: dict[tuple[int, float, tuple[float, ...]], BlockCost] = {}

    def block(self, block: Block, cohort: int, factor: float = 1.0) -> BlockCost:
        """`block` as one sequence, its collectives at their price without contention. factor: by which kernels take longer."""
        key = (block, cohort, factor)
        cost = self._blocks.get(key)
        if cost is None:
            cost = self._blocks[key] = chained([(times, self._items(items, cohort, factor)) for times, items in block.runs])
        return cost

    def _items(self, items: tuple[Item, ...], cohort: int, factor: float) -> BlockCost:
        """One run of `items`; the layers of a stage share theirs, and stages whose collectives take as long."""
        key = (id(items), cohort, factor)
        cost = self._runs.get(key)
        if cost is None:
            equal = id(items), factor, tuple(self.collective(work, cohort).alone for work in self._collectives_in(items))
            cost = self._equal.get(equal)
            if cost is None:
                cost = self._equal[equal] = self._play(items, cohort, factor)
            self._runs[key] = cost
        return cost

    def _play(self, items: tuple[Item, ...], cohort: int, factor: float) -> BlockCost:
        profile = self.prices.profile
        ahead = profile.launching(self.program.eager) * self.program.turns
        wrapping = [self.wrapping(item) for item in items]
        if profile.synchronous or self.program.blocking:  # the host's work is the item's own
            each = profile.launch * self.program.turns if profile.synchronous else ahead
            works = [(item, self._seconds(item, cohort, factor, each + more)) for item, more in zip(items, wrapping, strict=True)]
            return fused(works, 0.0, profile.slowdown)
        return fused([(item, self._seconds(item, cohort, factor)) for item in items], ahead, profile.slowdown, wrapping)

    def _seconds(self, item: Item, cohort: int, factor: float, extra: float = 0.0) -> float:
        """Seconds of an item by itself. factor: by which a kernel takes longer; extra: seconds besides."""
        if isinstance(item, Kernel):
            self._note(item)
            return on_grid(self.prices.seconds(item) * factor + extra)
        if isinstance(item, Join):
            return 0.0
        return on_grid(self.collective(item.collective if isinstance(item, Start) else item, cohort).alone + extra)

    def wrapping(self, item: Item | Send) -> float:
        """Host seconds that PyTorch's wrapper adds to a collective when it is started: to a list a view and a copy per piece."""
        work = item.collective if isinstance(item, Start) else item
        if not isinstance(work, Collective):
            return 0.0
        measured, listed = self.prices.profile.wrapping.get(f"{work.axis}/{work.operation}"), 0.0
        if work.pieces:
            listed = work.pieces * (VIEW + self.prices.profile.launch)
        return on_grid((measured.seconds(work.bytes) + listed if measured else listed) * work.repeat)

    def _note(self, kernel: Kernel) -> None:
        outside = self.prices.extrapolation(kernel)
        if outside:
            self.notes[outside] = None

    def touched(self) -> set[int]:
        """Cohorts whose blocks contain collectives on links that other traffic may use at the same time: they must be played
        item by item.

        Collectives inside blocks of one cohort run one after the other, on its compute stream or its side stream, and cannot
        meet each other, except on another side stream. Links that change while the step runs are like those with other traffic.
        """
        users: dict[int, set[tuple[int, str, int]]] = {}
        for work, cohort, inside in self._communications:
            for kind, priced in enumerate(self.each(work, cohort)):
                for link in {link for part in priced.parts for link, _ in part.flows}:
                    users.setdefault(link, set()).add((cohort, inside, kind))
        shared = [uses for link, uses in users.items() if len(uses) > 1 or self.wiring.varying[link]]
        return {cohort for uses in shared for cohort, inside, _ in uses if inside}

    def divided(self, lane: Ids) -> set[int]:
        """Cohorts whose blocks contain collectives that do not take as long for all, or to which ranks of several lanes come:
        they must be played item by item.
        """
        result = set()
        for work, cohort, inside in self._communications:
            if inside and cohort not in result:
                group = self.groups(work, cohort)
                first = np.zeros(int(group.max()) + 1, np.int64)
                first[group] = lane
                if len(self.kinds(work, cohort)) > 1 or (first[group] != lane).any():
                    result.add(cohort)
        return result
