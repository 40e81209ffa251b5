"""Playing a program: its ops become tasks on the streams of devices, launched by hosts, that share a network.

Every op is one SimPy event, more only where traffic contends or compute is slowed down. Events of equal time keep their order
of scheduling, so that runs repeat exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from simpy import Environment

from sim.analysis import notes
from sim.clock import on_grid
from sim.collectives import Ids
from sim.engine.block_splitting import expand
from sim.engine.device import Compute, Device
from sim.engine.host import Host
from sim.engine.network import Network
from sim.engine.rendezvous import Rendezvous
from sim.engine.task import Task
from sim.engine.transfer import CollectiveTransfer, Transfer
from sim.pricing.algorithm_choice import TransferCost
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Collective, Op, Program, Send, Work
from sim.timeline import Lane, Timeline
from topologies.reading import UserError
from topologies.topology import Topology

MAX_UNFOLDED_OPS = 500_000  # ops of all lanes up to which ranks that are not alike have lanes of their own


def run(program: Program, topology: Topology, prices: Prices, *, fold: bool = True) -> Timeline:
    """Play one step of `program` on `topology`.

    fold: one actor per cohort, or where ranks are not alike (tp=3 on nodes of 8 GPUs) one per kind of ranks, unless that is more
    than MAX_UNFOLDED_OPS ops; fold=False gives every rank its own: slower, with the same times for symmetric jobs.
    Raises UserError when the program waits for itself (a schedule that deadlocks).
    """
    op_costs = OpCosts(program, topology, prices)
    whole, lane = _folded(program, op_costs)
    if not fold:
        lane = np.arange(program.grid.groups((), program.cohorts[0].at).size)
    if whole is not program or lane is not None:
        op_costs = OpCosts(whole, topology, prices, lane)
    op_costs.notes |= dict.fromkeys(notes.of_lanes(op_costs.alike, lane))
    player = _Player(whole, op_costs)
    player.play()
    return player.timeline()


def _folded(program: Program, op_costs: OpCosts) -> tuple[Program, Ids | None]:
    """`program` with its blocks cut where they must be played item by item, and the lane of each rank (None: one for all)."""
    touched = op_costs.touched()
    lane = None if op_costs.alike else op_costs.lanes(MAX_UNFOLDED_OPS // _ops(program))
    if lane is not None:
        whole = expand(program, touched | op_costs.divided(lane))
        if _ops(whole) * (int(lane.max()) + 1) <= MAX_UNFOLDED_OPS:
            return whole, lane
    return expand(program, touched) if touched else program, None


def _ops(program: Program) -> int:
    return sum(len(cohort.ops) for cohort in program.cohorts)


class _Player:
    """Every op of every lane is a task of the lane's device."""

    def __init__(self, program: Program, op_costs: OpCosts) -> None:
        self.program, self.op_costs = program, op_costs
        self.env = Environment()
        self.network = Network(self.env, op_costs.capacity)
        self.meetings: dict[Hashable, Rendezvous[CollectiveTransfer]] = {}
        self._lay_out()
        self.tasks: list[Task] = []
        self.cost: list[BlockCost | TransferCost] = []
        for number in range(len(self.lanes)):
            self._launch(number)
        self._connect()

    def _lay_out(self) -> None:
        """One lane per actor: a cohort, or some of its ranks. Ops of lane a are numbered from offset[a]."""
        self.lanes: list[Lane] = []
        self.first: list[int] = []  # first lane of each cohort
        lane = self.op_costs.lane
        if lane is None:
            lane = np.zeros(self.program.grid.groups((), self.program.cohorts[0].at).size, np.int64)
        # the place among its cohort's ranks of the first rank of each lane, and how many share the lane
        _, self.example, sizes = np.unique(lane, return_index=True, return_counts=True)
        self.offset: list[int] = []
        total = 0
        for number, cohort in enumerate(self.program.cohorts):
            ranks = self.program.grid.groups((), cohort.at).ravel()
            self.first.append(len(self.lanes))
            for rank, size in zip(ranks[self.example].tolist(), sizes.tolist(), strict=True):
                self.lanes.append(Lane(number, rank, size))
                self.offset.append(total)
                total += len(cohort.ops)
        slowdown = self.op_costs.prices.profile.slowdown
        self.devices = [Device(self.env, slowdown) for _ in self.lanes]

    def _launch(self, number: int) -> None:
        """A task for each op of a lane, priced, and launched by the lane's host in program order."""
        lane, device, host = self.lanes[number], self.devices[number], Host()
        example = int(self.example[number - self.first[lane.cohort]]) if self.op_costs.lane is not None else -1
        # by work: its cost, and the host's seconds before and after the launch
        known: dict[Work, tuple[BlockCost | TransferCost, float, float]] = {}
        launch = on_grid(self.op_costs.prices.profile.launching(self.program.eager) * self.program.turns)
        for index, op in enumerate(self.program.cohorts[lane.cohort].ops):
            priced = known.get(op.work)
            if priced is None:
                priced = known[op.work] = self._priced(op.work, lane.cohort, example, launch)
            cost, ahead, behind = priced
            task: Task
            if isinstance(cost, BlockCost):
                task = Compute(self.env, device, cost)
            elif cost.is_send:
                task = Transfer(self.env, self.network, cost.parts, cost.latency)
            else:
                task = CollectiveTransfer(
                    self.env, self.network, cost.parts, cost.latency, device, cost.working, self._meeting(lane, index, op, cost)
                )
            self.tasks.append(task)
            self.cost.append(cost)
            host.launch(task, ahead, behind, op.held)

    def _priced(
        self, work: Block | Collective | Send, cohort: int, example: int, launch: float
    ) -> tuple[BlockCost | TransferCost, float, float]:
        """Work of rank number `example` of a cohort (−1: of all) with the seconds of the host before its launch and after it."""
        if isinstance(work, Block):
            fused = self.op_costs.block(work, cohort)
            return fused, 0.0, fused.host
        wrapping = on_grid(self.op_costs.wrapping(work))
        priced = self.op_costs.collective(work, cohort, -1 if example < 0 else int(self.op_costs.groups(work, cohort)[example]))
        if not self.op_costs.prices.profile.synchronous:
            return priced, launch + wrapping, 0.0
        if wrapping:  # a CPU waits for its own work
            priced = replace(priced, latency=priced.latency + wrapping)
        return priced, 0.0, 0.0

    def _meeting(self, lane: Lane, index: int, op: Op, cost: TransferCost) -> Callable[[], Rendezvous[CollectiveTransfer]] | None:
        """Where a lane meets the other ranks of op number `index`, a collective; None: it has them all."""
        collective = op.work
        assert isinstance(collective, Collective)
        traffic = cost.traffic
        where = traffic.axes, traffic.at, traffic.to, traffic.groups[:1]
        key: Hashable
        if collective.cohorts:
            expected, key = 2, (collective.label, where)
        elif collective.axis in self.program.cohorts[lane.cohort].at:
            expected, key = self.program.grid.degree(collective.axis), (collective.label, where)
        else:
            expected, key = cost.lanes, (lane.cohort, index, where)
        return partial(self._rendezvous, expected, key) if expected > 1 else None

    def _rendezvous(self, expected: int, key: Hashable) -> Rendezvous[CollectiveTransfer]:
        """The rendezvous of that key that is not complete yet; cohorts meet under one label again and again."""
        rendezvous = self.meetings.get(key)
        if rendezvous is None:
            rendezvous = self.meetings[key] = Rendezvous(expected)
        if len(rendezvous.members) == expected - 1:
            del self.meetings[key]
        return rendezvous

    def _connect(self) -> None:
        """Let tasks wait for the one before on their stream, and for those that their op names."""
        for number, lane in enumerate(self.lanes):
            me, index, streams = self.offset[number], number - self.first[lane.cohort], self.devices[number]
            base = [self.offset[first + index] if first + index < len(self.offset) else -1 for first in self.first]
            for op in self.program.cohorts[lane.cohort].ops:
                after = tuple(self.tasks[base[cohort] + other] for cohort, other in op.after) if op.after else ()
                streams.stream(op.stream).add(self.tasks[me], after)
                me += 1

    def play(self) -> None:
        """Run to the end of the step."""
        for task in [task for task in self.tasks if not task.waiting]:
            task.ready()
        self.env.run()
        stuck = sum(task.end is None for task in self.tasks)
        if stuck:
            raise UserError(f"the program waits for itself: {stuck} ops never start (does the schedule deadlock?)")

    def timeline(self) -> Timeline:
        """The timeline of the played step."""
        played = Timeline(
            program=self.program,
            lanes=self.lanes,
            offset=self.offset,
            start=[task.start for task in self.tasks],
            end=[cast(float, task.end) for task in self.tasks],
            stretch=[task.stretch if isinstance(task, Compute) else 0.0 for task in self.tasks],
            cost=self.cost,
            launched=[task.launched for task in self.tasks],
            events=self.network.events + sum(device.events for device in self.devices),
            op_costs=self.op_costs,
        )
        return _from_zero(played) if self.program.cohorts[0].steady else played


def _from_zero(timeline: Timeline) -> Timeline:
    """A steady `timeline` with time 0 where the step begins on the lane that begins it first."""
    zero = min(timeline.begin(lane) for lane in range(len(timeline.lanes)))
    columns = timeline.start, timeline.end, timeline.launched
    start, end, launched = ([time - zero for time in times] for times in columns)
    return replace(timeline, start=start, end=end, launched=launched)
