"""The actors of a step: which ranks are played as one, what their ops cost, and where they meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sim.clock import on_grid
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Profile
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import COMPUTE, Block, Cohort, Collective, Op, Program, Work
from sim.timeline import Lane


class Priced(NamedTuple):
    """What an op costs, and the seconds of the host before it is launched and after that."""

    cost: BlockCost | TransferCost
    ahead: float
    behind: float


class Meeting(NamedTuple):
    """A rendezvous of `expected` lanes; those that come with an equal key meet."""

    expected: int
    key: Hashable


class Lanes:
    """One lane per actor: a cohort, or some of its ranks. Ops of lane a are numbered from offset[a]; first: by cohort its first
    lane.
    """

    def __init__(self, program: Program, op_costs: OpCosts) -> None:
        self.program, self.op_costs = program, op_costs
        self.every: list[Lane] = []
        self.first: list[int] = []
        self.offset: list[int] = []
        self._place: list[int] = []  # of the first rank of each lane among its cohort's ranks
        self.ops = 0  # of all lanes
        for number, cohort in enumerate(program.cohorts):
            self.first.append(len(self.every))
            for place, rank, size in self._actors(cohort):
                self.every.append(Lane(number, rank, size))
                self.offset.append(self.ops)
                self._place.append(place)
                self.ops += cohort.count
        self._known: list[dict[Work, Priced]] = [{} for _ in self.every]
        self._turns: dict[int, list[int]] = {}  # by cohort

    def _actors(self, cohort: Cohort) -> Iterator[tuple[int, int, int]]:
        """The first rank of each lane of a cohort, its place among the cohort's ranks, and how many share the lane."""
        lane, grid, allotments = self.op_costs.lane, self.program.grid, self.program.allotments
        if lane is None and not allotments:
            yield 0, grid.first(cohort.at), grid.count(cohort.at)
            return
        ranks = grid.groups((), cohort.at).ravel()
        _, example, sizes = np.unique(np.zeros(len(ranks)) if lane is None else lane, return_index=True, return_counts=True)
        mine = np.array(allotments or np.zeros(len(ranks), np.int64))[example] == cohort.allotment
        yield from zip(example[mine].tolist(), ranks[example[mine]].tolist(), sizes[mine].tolist(), strict=True)

    def profile(self, lane: int) -> Profile:
        """What the GPUs of a lane cost."""
        return self.op_costs.on(self.every[lane].rank).profile

    def priced(self, lane: int, op: Op) -> Priced:
        """An op of a lane; each distinct piece of work is priced once."""
        known = self._known[lane].get(op.work)
        if known is None:
            known = self._known[lane][op.work] = self._price(lane, op)
        return known

    def _price(self, number: int, op: Op) -> Priced:
        lane, work = self.every[number], op.work
        if isinstance(work, Block):
            fused = self.op_costs.block(work, lane.cohort, rank=lane.rank)
            return Priced(fused, 0.0, fused.host)
        prices, group = self.op_costs.on(lane.rank), -1
        if self.op_costs.lane is not None:
            group = int(self.op_costs.groups(work, lane.cohort)[self._place[number]])
        graphed = self.program.graphed
        launch = 0.0 if graphed else self.op_costs.launching(prices.profile)
        wrapping = 0.0 if graphed else on_grid(self.op_costs.wrapping(work, prices))
        cost = self.op_costs.collective(work, lane.cohort, group)
        if self.program.blocking and op.stream == COMPUTE:  # it is launched when the kernel before has ended
            return Priced(replace(cost, latency=cost.latency + launch + wrapping), 0.0, 0.0)
        if not prices.profile.synchronous:
            return Priced(cost, launch + wrapping, 0.0)
        if wrapping:  # a CPU waits for its own work
            cost = replace(cost, latency=cost.latency + wrapping)
        return Priced(cost, 0.0, 0.0)

    @cached_property
    def touched(self) -> set[int]:
        """Cohorts whose blocks meet other traffic on the links of their collectives, where those of all ranks are alike."""
        return self.op_costs.touched() if self.op_costs.lane is None else set()

    def meeting(self, number: int, index: int, op: Op, cost: TransferCost) -> Meeting | None:
        """Where a lane meets the other ranks of a collective, op number `index` of its program; None: it has them all."""
        collective, lane, traffic = op.work, self.every[number], cost.traffic
        assert isinstance(collective, Collective)
        at = self.program.cohorts[lane.cohort].at
        if cost.lanes == 1 and not collective.cohorts and collective.axis not in at:
            return None
        where = traffic.axes, traffic.at, traffic.to, traffic.groups[:1]
        if collective.cohorts:
            return Meeting(2, (collective.label, where))
        if collective.axis in at:
            meeting = Meeting(self.program.grid.degree(collective.axis), (collective.label, where))
        else:
            meeting = Meeting(cost.lanes, (tuple(at.items()), self._turn(lane.cohort, index), where))
        return meeting if meeting.expected > 1 else None

    def _turn(self, cohort: int, index: int) -> int:
        """A number of a collective, equal on all lanes that meet there: that of its op, or where ranks have several programs
        that among the collectives along the same axes.
        """
        if not self.program.allotments:
            return index
        if cohort not in self._turns:
            met = Counter[tuple[str, ...]]()
            turns = self._turns[cohort] = []
            for op in self.program.cohorts[cohort].ops:
                axes = op.work.axes if isinstance(op.work, Collective) else ()
                met[axes] += 1
                turns.append(met[axes])
        return self._turns[cohort][index]

    def bases(self, number: int) -> list[int]:
        """By cohort, the number of the first op of the lane that lane `number` waits for there; −1 where there is none."""
        index = number - self.first[self.every[number].cohort]
        return [self.offset[first + index] if first + index < len(self.offset) else -1 for first in self.first]
