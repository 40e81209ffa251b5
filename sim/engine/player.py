"""Playing a program: its ops become tasks on the streams of devices, launched by hosts, that share a network.

Every op is one SimPy event, more only where traffic contends or compute is slowed down. Events of equal time keep their order
of scheduling, so that runs repeat exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from simpy import Environment, Event

from sim.analysis import notes
from sim.clock import on_grid
from sim.collectives import Ids
from sim.engine.block_splitting import expand
from sim.engine.device import Compute
from sim.engine.effects import Effect
from sim.engine.host import Host
from sim.engine.network import Network
from sim.engine.perturbation import Perturbation
from sim.engine.rendezvous import Rendezvous
from sim.engine.task import Task, start
from sim.engine.transfer import CollectiveTransfer, Transfer
from sim.pricing.algorithm_choice import TransferCost
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Collective, Op, Program, Send, Work
from sim.timeline import Lane, Resumption, Timeline
from topologies.reading import UserError
from topologies.topology import Topology

MAX_PERTURBED_OPS = 2_000_000  # ops of all lanes up to which ranks are played that effects make unlike
MAX_UNFOLDED_OPS = 500_000  # ops of all lanes up to which ranks that are not alike have lanes of their own


def run(program: Program, topology: Topology, prices: Prices, *, fold: bool = True, effects: Sequence[Effect] = ()) -> Timeline:
    """Play one step of `program` on `topology`, with `effects` on some of its GPUs, hosts or links.

    fold: one actor per cohort, or where ranks are not alike (tp=3 on nodes of 8 GPUs) one per kind of ranks, unless that is more
    than MAX_UNFOLDED_OPS ops; fold=False gives every rank its own: slower, with the same times for symmetric jobs.
    Raises UserError when the program waits for itself (a schedule that deadlocks), and StepHangsError when effects end it.
    """
    perturbation = Perturbation(effects, topology)
    op_costs = OpCosts(program, perturbation.topology, prices)
    whole, lane = folded(program, op_costs, perturbation)
    if not fold:
        lane = np.arange(program.grid.groups((), program.cohorts[0].at).size)
    if whole is not program or lane is not None:
        op_costs = OpCosts(whole, perturbation.topology, prices, lane)
    op_costs.notes |= dict.fromkeys(notes.of_lanes(op_costs.alike, lane))
    player = Player(whole, op_costs, perturbation)
    player.play()
    return player.timeline()


def folded(
    program: Program, op_costs: OpCosts, perturbation: Perturbation, others: frozenset[int] = frozenset()
) -> tuple[Program, Ids | None]:
    """`program` with its blocks cut where they must be played item by item, and the lane of each rank (None: one for all).

    others: links that other jobs use.
    Raises UserError when effects make so many ranks unlike that they cannot be played.
    """
    touched = op_costs.touched(others)
    unlike = perturbation.unlike(program)
    perturbed = bool(unlike.any())
    most = MAX_PERTURBED_OPS if perturbed else MAX_UNFOLDED_OPS
    lane = None if op_costs.alike and not perturbed else op_costs.lanes(unlike, most // _ops(program))
    if lane is not None:
        whole = expand(program, touched | op_costs.divided(lane))
        if _ops(whole) * (int(lane.max()) + 1) <= most:
            return whole, lane
    if perturbed:
        number = "more" if lane is None else f"{int(lane.max()) + 1} of each stage"
        raise UserError(f"effects and nodes make too many ranks unlike ({number}): more than {most:,} ops; name fewer GPUs")
    return expand(program, touched) if touched else program, None


def _ops(program: Program) -> int:
    return sum(len(cohort.ops) for cohort in program.cohorts)


class _End(Task):
    """The end of a step: when all tasks have ended."""

    __slots__ = ("reached",)

    def __init__(self, env: Environment, tasks: list[Task]) -> None:
        super().__init__(env)
        self.reached = env.event()
        for task in [task for task in tasks if not task.followers]:
            self.wait_for(task)

    def begin(self) -> None:
        """The step is over."""
        self.reached.succeed()


class Player:
    """Every op of every lane is a task of the lane's device. network: on which others may send too; the step begins now."""

    def __init__(self, program: Program, op_costs: OpCosts, perturbation: Perturbation, network: Network | None = None) -> None:
        self.program, self.op_costs, self.perturbation = program, op_costs, perturbation
        self.network = network or Network(Environment(), op_costs.capacity)
        self.env = self.network.env
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
        _, example, sizes = np.unique(lane, return_index=True, return_counts=True)
        allotments = np.array(self.program.allotments or np.zeros(len(lane), np.int64))[example]
        self.place: list[int] = []  # of the first rank of each lane among its cohort's ranks
        self.offset: list[int] = []
        total = 0
        for number, cohort in enumerate(self.program.cohorts):
            ranks = self.program.grid.groups((), cohort.at).ravel()
            self.first.append(len(self.lanes))
            mine = np.flatnonzero(allotments == cohort.allotment)
            self.place += example[mine].tolist()
            for rank, size in zip(ranks[example[mine]].tolist(), sizes[mine].tolist(), strict=True):
                self.lanes.append(Lane(number, rank, size))
                self.offset.append(total)
                total += len(cohort.ops)
        profiles = [self.op_costs.on(lane.rank).profile for lane in self.lanes]
        self.devices = [
            self.perturbation.device(self.env, lane.rank, profile.slowdown, profile.synchronous, partial(self._slower, lane))
            for lane, profile in zip(self.lanes, profiles, strict=True)
        ]
        if self.env.now:
            for device in self.devices:
                device.host = Host(start=self.env.now)
        self.perturbation.vary(self.env, self.network, self.op_costs.wiring.varying)

    def _slower(self, lane: Lane, task: Compute, factor: float) -> BlockCost:
        """The cost of a block whose kernels take `factor` times as long."""
        return self.op_costs.block(cast(Block, task.work), lane.cohort, factor, lane.rank)

    def _launch(self, number: int) -> None:
        """A task for each op of a lane, priced, and launched by the lane's host in program order."""
        lane, device = self.lanes[number], self.devices[number]
        example = self.place[number] if self.op_costs.lane is not None else -1
        profile, met = self.op_costs.on(lane.rank).profile, Counter[tuple[str, ...]]()
        # by work: its cost, and the host's seconds before and after the launch
        known: dict[Work, tuple[BlockCost | TransferCost, float, float]] = {}
        launch = on_grid(profile.launching(self.program.eager) * self.program.turns)
        for index, op in enumerate(self.program.cohorts[lane.cohort].ops):
            priced = known.get(op.work)
            if priced is None:
                priced = known[op.work] = self._priced(op.work, lane, example, launch)
            cost, ahead, behind = priced
            task: Task
            if isinstance(cost, BlockCost):
                task = Compute(self.env, device, cost, cast(Block, op.work))
            elif cost.is_send:
                task = Transfer(self.env, self.network, cost.parts, cost.latency)
            else:
                turn = index
                if self.program.allotments:  # ops of one number are others in programs with more microbatches
                    axes = cast(Collective, op.work).axes
                    turn = met[axes] = met[axes] + 1
                task = CollectiveTransfer(
                    self.env, self.network, cost.parts, cost.latency, device, cost.working, self._meeting(lane, turn, op, cost)
                )
            self.tasks.append(task)
            self.cost.append(cost)
            device.host.launch(task, ahead, behind, op.held)

    def _priced(
        self, work: Block | Collective | Send, lane: Lane, example: int, launch: float
    ) -> tuple[BlockCost | TransferCost, float, float]:
        """Work of a lane with the seconds of the host before its launch and after it. example: the place of its rank in its
        cohort, −1: it is that of all.
        """
        cohort, prices = lane.cohort, self.op_costs.on(lane.rank)
        if isinstance(work, Block):
            fused = self.op_costs.block(work, cohort, rank=lane.rank)
            return fused, 0.0, fused.host
        wrapping = on_grid(self.op_costs.wrapping(work, prices))
        priced = self.op_costs.collective(work, cohort, -1 if example < 0 else int(self.op_costs.groups(work, cohort)[example]))
        if not prices.profile.synchronous:
            return priced, launch + wrapping, 0.0
        if wrapping:  # a CPU waits for its own work
            priced = replace(priced, latency=priced.latency + wrapping)
        return priced, 0.0, 0.0

    def _meeting(self, lane: Lane, turn: int, op: Op, cost: TransferCost) -> Callable[[], Rendezvous[CollectiveTransfer]] | None:
        """Where a lane meets the other ranks of a collective, its op number `turn` or the collective of this turn along its axes;
        None: it has them all.
        """
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
            expected, key = cost.lanes, (tuple(self.program.cohorts[lane.cohort].at.items()), turn, where)
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

    def begin(self) -> Event:
        """Start the step; the event of its end."""
        end = _End(self.env, self.tasks)
        start(self.tasks)
        return end.reached

    def play(self) -> None:
        """Run to the end of the step."""
        end = _End(self.env, self.tasks) if self.perturbation.effects else None
        start(self.tasks)
        if end is None:
            self.env.run()
        else:  # effects may go on for ever
            self.perturbation.run(self.env, end.reached)
        stuck = [number for number, task in enumerate(self.tasks) if task.end is None]
        if stuck:
            self.perturbation.explain(self._held_up(stuck))
            raise UserError(f"the program waits for itself: {len(stuck)} ops never start (does the schedule deadlock?)")

    def _held_up(self, stuck: list[int]) -> dict[int, float]:
        """For each lane with `stuck` ops, by its first rank, when its last op ended."""
        lanes = np.unique(np.searchsorted(self.offset, stuck, side="right") - 1).tolist()
        ends = {}
        for lane in lanes:
            tasks = self.tasks[self.offset[lane] : self.offset[lane + 1] if lane + 1 < len(self.offset) else None]
            ends[self.lanes[lane].rank] = max((task.end for task in tasks if task.end is not None), default=0.0)
        return ends

    def _resumptions(self) -> dict[int, Resumption]:
        held = {id(task.holds): number for number, task in enumerate(self.tasks) if task.holds is not None}
        return {
            number: Resumption(held[id(holds.before)] if holds.before else -1, holds.busy, holds.time)
            for number in held.values()
            for holds in [self.tasks[number].holds]
        }

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
            owed={number: task.owed for number, task in enumerate(self.tasks) if isinstance(task, Compute) and task.owed}
            if self.perturbation.effects
            else {},
            resumptions=self._resumptions(),
        )
        return _from_zero(played) if self.program.cohorts[0].steady else played


def _from_zero(timeline: Timeline) -> Timeline:
    """A steady `timeline` with time 0 where the step begins on the lane that begins it first."""
    zero = min(timeline.begin(lane) for lane in range(len(timeline.lanes)))
    columns = timeline.start, timeline.end, timeline.launched
    start, end, launched = ([time - zero for time in times] for times in columns)
    return replace(timeline, start=start, end=end, launched=launched)
