"""Playing a program: ops start when their stream, their dependencies and the host let them, and end when their work is done.

Every op is one SimPy event, more only where traffic contends or compute is slowed down. Events of equal time keep their order
of scheduling, so that runs repeat exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from simpy import Environment, Event

from sim.clock import on_grid
from sim.network import Network
from sim.prices import Prices
from sim.pricing import Fused, Priced, Pricing
from sim.program import Block, Cohort, Collective, Op, Program, Ref, Run, Send
from sim.timeline import Lane, Timeline
from topologies.topology import Topology


def run(program: Program, topology: Topology, prices: Prices, *, fold: bool = True) -> Timeline:
    """Play one step of `program` on `topology`.

    fold: one actor per cohort; fold=False gives every rank its own: slower, with the same times for symmetric jobs.
    Raises RuntimeError when the program waits for itself (a schedule that deadlocks).
    """
    pricing = Pricing(program, topology, prices, fold)
    touched = pricing.touched()
    if touched:
        program = expand(program, touched)
        pricing = Pricing(program, topology, prices, fold)
    player = _Player(program, pricing, fold)
    player.play()
    return player.timeline()


def expand(program: Program, cohorts: set[int]) -> Program:
    """`program` with the blocks of `cohorts` cut at their collectives, so that these meet other traffic on the network."""
    where = {number: _cut(program.cohorts[number]) for number in cohorts}
    result = []
    for number, cohort in enumerate(program.cohorts):
        ops = where[number][0] if number in cohorts else cohort.ops
        moved = [
            replace(op, after=tuple(Ref(c, where[c][1][o]) if c in cohorts else Ref(c, o) for c, o in op.after)) for op in ops
        ]
        result.append(replace(cohort, ops=moved))
    return replace(program, cohorts=result)


def _cut(cohort: Cohort) -> tuple[list[Op], list[int]]:
    """Ops with their blocks cut, and for each old op the number of its last piece."""
    ops: list[Op] = []
    last: list[int] = []
    pieces: dict[int, list[Block | Collective]] = {}
    for op in cohort.ops:
        works: list[Block | Collective | Send] = [op.work]
        if isinstance(op.work, Block):
            if id(op.work) not in pieces:
                pieces[id(op.work)] = _pieces(op.work)
            works = list(pieces[id(op.work)])
        for number, work in enumerate(works):
            first, end = number == 0, number == len(works) - 1
            ops.append(replace(op, work=work, after=op.after if first else (), allocate=op.allocate if first else (),
                               free=op.free if end else ()))  # fmt: skip
        last.append(len(ops) - 1)
    return ops, last


def _pieces(block: Block) -> list[Block | Collective]:
    """Kernels between collectives, and the collectives, in order."""
    result: list[Block | Collective] = []
    for times, items in block.runs:
        if not any(isinstance(item, Collective) for item in items):
            result.append(Block(block.name, (Run(times, items),)))
            continue
        once: list[Block | Collective] = []
        kernels: list = []  # type: ignore[type-arg]
        for item in items:
            if isinstance(item, Collective):
                if kernels:
                    once.append(Block(block.name, (Run(1, tuple(kernels)),)))
                once.append(item)
                kernels = []
            else:
                kernels.append(item)
        if kernels:
            once.append(Block(block.name, (Run(1, tuple(kernels)),)))
        result += once * times
    return result


@dataclass(slots=True)
class _Compute:
    """A block that is running: nominal seconds left at `since`, and how many collectives slow it down."""

    op: int
    left: float
    since: float
    slow: bool
    event: Event


class _Player:
    def __init__(self, program: Program, pricing: Pricing, fold: bool) -> None:
        self.program, self.pricing, self.fold = program, pricing, fold
        self.env = Environment()
        self.network = Network(self.env, pricing.capacity)
        self.slowdown = pricing.prices.profile.slowdown
        self.events = 0
        self._lay_out()
        self._connect()
        self._price()
        self.meetings: dict[tuple[object, ...], list[int]] = {}
        self.communicating = [0] * len(self.lanes)
        self.computing: dict[int, _Compute] = {}

    def _lay_out(self) -> None:
        """One lane per actor: a cohort, or each of its ranks. Ops of lane a are numbered from offset[a]."""
        self.lanes: list[Lane] = []
        self.first: list[int] = []  # first lane of each cohort
        self.offset: list[int] = []
        total = 0
        for number, cohort in enumerate(self.program.cohorts):
            ranks = self.program.grid.groups((), cohort.at).ravel()
            self.first.append(len(self.lanes))
            for rank in ranks[:1] if self.fold else ranks:
                self.lanes.append(Lane(number, int(rank), len(ranks) if self.fold else 1))
                self.offset.append(total)
                total += len(cohort.ops)
        self.start_time = [0.0] * total
        self.end_time = [0.0] * total
        self.stretch = [0.0] * total  # seconds added by slower compute

    def _connect(self) -> None:
        self.lane_of: list[int] = []
        self.waiting: list[int] = []
        self.followers: list[list[int]] = [[] for _ in self.start_time]
        for number, lane in enumerate(self.lanes):
            base, index = self.offset[number], number - self.first[lane.cohort]
            ops = self.program.cohorts[lane.cohort].ops
            last: dict[str, int] = {}
            self.lane_of += [number] * len(ops)
            for position, op in enumerate(ops):
                me = base + position
                before = {self.offset[self.first[cohort] + index] + other for cohort, other in op.after}
                if op.stream in last:
                    before.add(last[op.stream])
                last[op.stream] = me
                self.waiting.append(len(before))
                for other in before:
                    self.followers[other].append(me)

    def _price(self) -> None:
        """Price every op, and find when the host has launched it: the host runs through the program in order and never waits."""
        self.work: list[Fused | Priced] = []
        self.launched: list[float] = []
        launch = 0.0 if self.pricing.prices.profile.synchronous else self.pricing.prices.profile.launch
        for number, lane in enumerate(self.lanes):
            groups = {} if self.fold else self._groups_of(number)
            host = 0.0
            for op in self.program.cohorts[lane.cohort].ops:
                if isinstance(op.work, Block):
                    fused = self.pricing.block(op.work, lane.cohort)
                    self.launched.append(host)
                    self.work.append(fused)
                    host += fused.host
                else:
                    host += on_grid(launch)
                    self.launched.append(host)
                    axis = "" if isinstance(op.work, Send) or op.work.cohorts else op.work.axis
                    self.work.append(self.pricing.collective(op.work, lane.cohort, groups.get(axis, -1)))

    def _groups_of(self, number: int) -> dict[str, int]:
        """Which sibling group the rank of this lane belongs to, by axis; "" for sends and pairs of cohorts."""
        lane = self.lanes[number]
        grid, at = self.program.grid, self.program.cohorts[lane.cohort].at
        result = {"": number - self.first[lane.cohort]}
        for axis, _ in grid.sizes:
            groups = grid.groups((axis,), at)
            result[axis] = int(np.argwhere(groups == lane.rank)[0][0])
        return result

    def play(self) -> None:
        """Run to the end of the step."""
        for op in [op for op, count in enumerate(self.waiting) if not count]:
            self._start(op)
        self.env.run()
        stuck = [op for op, count in enumerate(self.waiting) if count > 0]
        if stuck or any(self.meetings.values()):
            raise RuntimeError(f"the program waits for itself: {len(stuck)} ops never start")

    def _start(self, op: int) -> None:
        work = self.work[op]
        now = self.start_time[op] = self.env.now
        if isinstance(work, Fused):
            end = max(now + work.busy, self.launched[op] + work.critical)
            self._compute(op, end - now)
        elif self.launched[op] > now:
            self.events += 1
            self.env.timeout(self.launched[op] - now).callbacks.append(lambda _: self._meet(op, work))
        else:
            self._meet(op, work)

    # -- compute ---------------------------------------------------------------------------------------------------------

    def _compute(self, op: int, seconds: float) -> None:
        lane = self.lane_of[op]
        slow = self.slowdown > 1 and self.communicating[lane] > 0
        event = self._timeout(on_grid(seconds * self.slowdown) if slow else seconds, op)
        if self.slowdown > 1:
            self.computing[lane] = _Compute(op, seconds, self.env.now, slow, event)

    def _timeout(self, seconds: float, op: int) -> Event:
        self.events += 1
        event = self.env.timeout(seconds, op)
        event.callbacks.append(self._computed)
        return event

    def _computed(self, event: Event) -> None:
        op = cast(int, event.value)
        work = self.work[op]
        if self.slowdown > 1:
            del self.computing[self.lane_of[op]]
            assert isinstance(work, Fused)
            nominal = max(work.busy, self.launched[op] + work.critical - self.start_time[op])
            self.stretch[op] = self.env.now - self.start_time[op] - nominal
        self._end(op)

    def _communicates(self, lane: int, change: int) -> None:
        """A collective starts or ends on this lane's GPUs: compute that is running there slows down or recovers."""
        self.communicating[lane] += change
        compute = self.computing.get(lane)
        slow = self.communicating[lane] > 0
        if compute is None or slow == compute.slow:
            return
        elapsed = self.env.now - compute.since
        compute.left = max(0.0, compute.left - (elapsed / self.slowdown if compute.slow else elapsed))
        compute.since, compute.slow = self.env.now, slow
        compute.event.callbacks = []
        compute.event = self._timeout(on_grid(compute.left * self.slowdown if slow else compute.left), compute.op)

    # -- communication ---------------------------------------------------------------------------------------------------

    def _meet(self, op: int, work: Priced) -> None:
        """A collective starts when all of its ranks have come to it."""
        lane = self.lane_of[op]
        those, expected, key = self._meeting(op, lane, work)
        if expected > 1:
            those = self.meetings.setdefault(key, [])
            those.append(op)
            if len(those) < expected:
                return
            del self.meetings[key]
        now = self.env.now
        slows = self.slowdown > 1 and not work.traffic.algorithm.startswith("send")
        for other in those:
            self.start_time[other] = now
            if slows:
                self._communicates(self.lane_of[other], 1)
        self.network.start(work.parts, work.latency, lambda: self._communicated(those, slows))

    def _meeting(self, op: int, lane: int, work: Priced) -> tuple[list[int], int, tuple[object, ...]]:
        """Who takes part: the ops so far, how many must come, and the key by which they find each other."""
        cohort = self.lanes[lane].cohort
        one = self.program.cohorts[cohort].ops[op - self.offset[lane]].work
        if isinstance(one, Send):
            return [op], 1, ()
        assert isinstance(one, Collective)
        if one.cohorts:
            return [op], 2, (one.label, work.traffic)
        size = 1 if self.fold else self.program.grid.degree(one.axis)
        return [op], size, (cohort, op - self.offset[lane], work.traffic.group)

    def _communicated(self, those: list[int], slows: bool) -> None:
        for op in those:
            if slows:
                self._communicates(self.lane_of[op], -1)
            self._end(op)

    def _end(self, op: int) -> None:
        self.end_time[op] = self.env.now
        waiting = self.waiting
        for follower in self.followers[op]:
            waiting[follower] -= 1
            if not waiting[follower]:
                self._start(follower)

    def timeline(self) -> Timeline:
        """What happened."""
        events = self.events + self.network.events
        times = self.start_time, self.end_time, self.stretch
        return Timeline(self.program, self.lanes, self.offset, *times, self.work, self.launched, events, self.pricing)
