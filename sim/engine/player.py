"""Playing a program: ops start when their stream, their dependencies and the host let them, and end when their work is done.

Every op is one SimPy event, more only where traffic contends or compute is slowed down. Events of equal time keep their order
of scheduling, so that runs repeat exactly.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np
from simpy import Environment, Event

from sim.analysis import notes
from sim.clock import on_grid
from sim.collectives import Ids
from sim.engine.block_splitting import expand
from sim.engine.network import Network
from sim.pricing.algorithm_choice import TransferCost
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Collective, Program, Send, Work
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
    """Every op of every lane has a number; an op starts when the ops that it waits for have ended."""

    def __init__(self, program: Program, op_costs: OpCosts) -> None:
        self.program, self.op_costs = program, op_costs
        self.env = Environment()
        self.network = Network(self.env, op_costs.capacity)
        self.slowdown = op_costs.prices.profile.slowdown
        self.events = 0
        self._lay_out()
        self._connect()
        self._price()
        self.meetings: dict[Hashable, list[int]] = {}
        self.communicating: list[list[float]] = [[] for _ in self.lanes]  # `working` of collectives that run on the lane's GPUs
        # what runs on each lane's compute stream: the event of its end, nominal seconds left at `since`, whether it is slowed
        self.running: list[Event | None] = [None] * len(self.lanes)
        self.left, self.since, self.slow = [0.0] * len(self.lanes), [0.0] * len(self.lanes), [0.0] * len(self.lanes)

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
        self.start_time = [0.0] * total
        self.end_time = [0.0] * total
        self.stretch = [0.0] * total  # seconds added by slower compute

    def _connect(self) -> None:
        self.lane_of: list[int] = []
        self.waiting = waiting = [0] * len(self.start_time)
        self.followers: list[list[int]] = [[] for _ in self.start_time]
        followers = self.followers
        for number, lane in enumerate(self.lanes):
            me, index = self.offset[number], number - self.first[lane.cohort]
            base = [self.offset[first + index] if first + index < len(self.offset) else -1 for first in self.first]
            ops = self.program.cohorts[lane.cohort].ops
            last: dict[str, int] = {}
            self.lane_of += [number] * len(ops)
            for op in ops:
                previous = last.get(op.stream)
                last[op.stream] = me
                if op.after:
                    before = {base[cohort] + other for cohort, other in op.after}
                    if previous is not None:
                        before.add(previous)
                    waiting[me] = len(before)
                    for other in before:
                        followers[other].append(me)
                elif previous is not None:
                    waiting[me] = 1
                    followers[previous].append(me)
                me += 1

    def _price(self) -> None:
        """Price every op, and find when the host has launched it: the host runs through the program in order and waits for
        nothing but ops that hold it up.
        """
        profile = self.op_costs.prices.profile
        launch = on_grid(profile.launching(self.program.eager) * self.program.turns)
        self.cost: list[BlockCost | TransferCost] = []
        self.launched: list[float] = []  # since the latest op before, or this one, that holds up the host
        # such ops: the one before, the host's seconds from that one to this, and the ops that are launched from this one on
        self.held: dict[int, tuple[int, float, range]] = {}
        self.resumed: dict[int, float] = {}  # when the host went on
        for number, lane in enumerate(self.lanes):
            example = int(self.example[number - self.first[lane.cohort]]) if self.op_costs.lane is not None else -1
            host, before, ops = 0.0, -1, self.program.cohorts[lane.cohort].ops
            # by work: its cost, and the host's seconds before and after the launch
            known: dict[Work, tuple[BlockCost | TransferCost, float, float]] = {}
            stops = [self.offset[number] + place for place, op in enumerate(ops) if op.held]
            ends = dict(pairwise([*stops, self.offset[number] + len(ops)]))
            for op in ops:
                me = len(self.launched)
                if op.held:
                    self.held[me] = before, host, range(me, ends[me])
                    host, before = 0.0, me
                priced = known.get(op.work)
                if priced is None:
                    priced = known[op.work] = self._priced(op.work, lane.cohort, example, launch)
                cost, ahead, behind = priced
                host += ahead
                self.launched.append(host)
                self.cost.append(cost)
                host += behind

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

    def play(self) -> None:
        """Run to the end of the step."""
        for op in [op for op, count in enumerate(self.waiting) if not count]:
            self._start(op)
        self.env.run()
        stuck = sum(count > 0 for count in self.waiting)
        if stuck or self.meetings:
            raise UserError(f"the program waits for itself: {stuck} ops never start (does the schedule deadlock?)")

    def _start(self, op: int) -> None:
        if op in self.held:
            self._resume(op)
        cost, launched = self.cost[op], self.launched[op]
        now = self.start_time[op] = self.env.now
        if isinstance(cost, BlockCost):
            self._compute(op, max(cost.busy, launched + cost.critical - now))
        elif launched > now:
            self.events += 1
            self.env.timeout(launched - now).callbacks.append(lambda _: self._meet(op, cost))
        else:
            self._meet(op, cost)

    def _resume(self, op: int) -> None:
        """The host has seen the end of what `op` waits for, and goes on to launch it."""
        before, host, ops = self.held[op]
        time = self.resumed[op] = max(self.env.now, self.resumed.get(before, 0.0) + host)
        for later in ops:
            self.launched[later] += time

    def _end(self, op: int) -> None:
        self.end_time[op] = self.env.now
        waiting = self.waiting
        for follower in self.followers[op]:
            waiting[follower] -= 1
            if not waiting[follower]:
                self._start(follower)

    # -- compute ---------------------------------------------------------------------------------------------------------

    def _compute(self, op: int, seconds: float) -> None:
        lane = self.lane_of[op]
        slow = self.slow[lane] = min(1.0, sum(self.communicating[lane]))
        self.left[lane], self.since[lane] = seconds, self.env.now
        self._expect(lane, op, on_grid(seconds * self._factor(op, slow)) if slow else seconds)

    def _factor(self, op: int, slow: float) -> float:
        """The factor by which the op takes longer beside collectives that work for a part `slow` of the time: its kernels take
        longer, its own collectives and launches do not.
        """
        cost = cast(BlockCost, self.cost[op])
        nominal = max(cost.busy, self.launched[op] + cost.critical - self.start_time[op])
        return 1 + slow * (self.slowdown - 1) * cost.kernels / nominal if nominal else 1.0

    def _expect(self, lane: int, op: int, seconds: float) -> None:
        self.events += 1
        event = self.running[lane] = self.env.timeout(seconds, op)
        event.callbacks.append(self._computed)

    def _computed(self, event: Event) -> None:
        op = cast(int, event.value)
        lane = self.lane_of[op]
        self.running[lane] = None
        if self.slow[lane] or self.since[lane] != self.start_time[op]:
            cost, start = cast(BlockCost, self.cost[op]), self.start_time[op]
            self.stretch[op] = self.env.now - start - max(cost.busy, self.launched[op] + cost.critical - start)
        self._end(op)

    def _communicates(self, op: int, begins: bool) -> None:
        """A collective starts or ends on its lane's GPUs: compute that is running there slows down or recovers."""
        lane, working = self.lane_of[op], cast(TransferCost, self.cost[op]).working
        busy = self.communicating[lane]
        (busy.append if begins else busy.remove)(working)
        event, slow, before = self.running[lane], min(1.0, sum(busy)), self.slow[lane]
        if event is None or slow == before:
            return
        now, op = self.env.now, cast(int, event.value)
        elapsed = (now - self.since[lane]) / self._factor(op, before)
        left = self.left[lane] = max(0.0, self.left[lane] - elapsed)
        self.since[lane], self.slow[lane] = now, slow
        event.callbacks = []  # cancelled
        self._expect(lane, op, on_grid(left * self._factor(op, slow)))

    # -- communication ---------------------------------------------------------------------------------------------------

    def _meet(self, op: int, cost: TransferCost) -> None:
        """A collective starts when all of its ranks have arrived."""
        ops = [op]
        if not cost.is_send:
            expected, key = self._meeting(op, cost)
            if expected > 1:
                ops = self.meetings.setdefault(key, [])
                ops.append(op)
                if len(ops) < expected:
                    return
                del self.meetings[key]
            now = self.env.now
            for member in ops:
                self.start_time[member] = now
                self._communicates(member, True)
            self.network.start(cost.parts, cost.latency, lambda: self._communicated(ops))
        else:
            self.start_time[op] = self.env.now
            self.network.start(cost.parts, cost.latency, lambda: self._end(op))

    def _meeting(self, op: int, cost: TransferCost) -> tuple[int, Hashable]:
        """The number of ranks of a rendezvous, and its key."""
        lane = self.lane_of[op]
        cohort = self.lanes[lane].cohort
        collective = cast(Collective, self.program.cohorts[cohort].ops[op - self.offset[lane]].work)
        traffic = cost.traffic
        where = traffic.axes, traffic.at, traffic.to, traffic.groups[:1]
        if collective.cohorts:
            return 2, (collective.label, where)
        if collective.axis in self.program.cohorts[cohort].at:
            return self.program.grid.degree(collective.axis), (collective.label, where)
        return cost.lanes, (cohort, op - self.offset[lane], where)

    def _communicated(self, ops: list[int]) -> None:
        for op in ops:
            self._communicates(op, False)
            self._end(op)

    def timeline(self) -> Timeline:
        """The timeline of the played step."""
        events = self.events + self.network.events
        times = self.start_time, self.end_time, self.stretch
        played = Timeline(self.program, self.lanes, self.offset, *times, self.cost, self.launched, events, self.op_costs)
        return _from_zero(played) if self.program.cohorts[0].steady else played


def _from_zero(timeline: Timeline) -> Timeline:
    """A steady `timeline` with time 0 where the step begins on the lane that begins it first."""
    zero = min(timeline.begin(lane) for lane in range(len(timeline.lanes)))
    columns = timeline.start, timeline.end, timeline.launched
    start, end, launched = ([time - zero for time in times] for times in columns)
    return replace(timeline, start=start, end=end, launched=launched)
