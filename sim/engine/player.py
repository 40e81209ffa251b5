"""Playing a program: its ops become tasks on the streams of devices, launched by hosts, that share a network.

As long as nothing contends the times of ops are sums and maxima, and need no events (`sim.engine.uncontended`). From the first
contention on every op is one SimPy event, more only where traffic contends or compute is slowed down. Events of equal time keep
their order of scheduling, so that runs repeat exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from simpy import Environment, Event

from sim.analysis import notes
from sim.engine.blocks.contended import ContendedBlock, played_blocks
from sim.engine.blocks.segments import Segments
from sim.engine.blocks.splitting import expand
from sim.engine.device import Compute
from sim.engine.effects import Effect
from sim.engine.folding import folded, past
from sim.engine.host import HeldLaunches, Host
from sim.engine.lanes import Lanes, Meeting
from sim.engine.network import Network
from sim.engine.perturbation import Perturbation
from sim.engine.rendezvous import Rendezvous
from sim.engine.task import Task
from sim.engine.transfer import CollectiveTransfer, Transfer
from sim.engine.uncontended import NOT_ENDED, Cost, Times
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Program
from sim.timeline import Inside, Lane, Resumption, Timeline
from topologies.links.topology import Topology
from topologies.reading import UserError


def run(program: Program, topology: Topology, prices: Prices, *, fold: bool = True, effects: Sequence[Effect] = ()) -> Timeline:
    """Play one step of `program` on `topology`, with `effects` on some of its GPUs, hosts or links.

    fold: one actor per cohort, or where ranks are not alike (tp=3 on nodes of 8 GPUs) one per kind of ranks, unless that is more
    than MAX_UNFOLDED_OPS ops; fold=False gives every rank its own: slower, with the same times for symmetric jobs.
    Raises UserError when the program waits for itself (a schedule that deadlocks), and StepHangsError when effects end it.
    """
    perturbation = Perturbation(effects, topology)
    op_costs = OpCosts(program, perturbation.topology, prices)
    whole, lane = folded(program, op_costs, perturbation)
    if whole is not program or lane is not None:
        op_costs = OpCosts(whole, perturbation.topology, prices, lane)
    op_costs.notes |= dict.fromkeys(notes.of_lanes(op_costs.alike, lane))
    lanes = Lanes(whole, op_costs)
    ended = past(lanes, perturbation)
    if not fold:
        if min(ended.end) < 0:  # ranks meet in the collectives of blocks that other traffic may slow down
            whole = expand(whole, op_costs.touched())
        lane = np.arange(program.grid.groups((), program.cohorts[0].at).size)
        op_costs = OpCosts(whole, perturbation.topology, prices, lane)
        op_costs.notes |= dict.fromkeys(notes.of_lanes(op_costs.alike, lane))
        lanes = Lanes(whole, op_costs)
        ended = past(lanes, perturbation)
    complete = min(ended.end) >= 0
    timeline = _timeline(lanes, ended, lanes.ops) if complete else Player(lanes, ended, perturbation).play()
    return _from_zero(timeline) if program.cohorts[0].steady else timeline


def _timeline(
    lanes: Lanes,
    times: Times,
    events: int,
    stretch: list[float] | None = None,
    owed: dict[int, dict[str, float]] | None = None,
    inside: Mapping[int, Inside] | None = None,
    scheduled: list[float] | None = None,
) -> Timeline:
    """The timeline of a step with these times."""
    return Timeline(
        program=lanes.program,
        lanes=lanes.every,
        offset=lanes.offset,
        start=times.start,
        end=times.end,
        stretch=stretch or [0.0] * lanes.ops,
        cost=cast(list[Cost], times.cost),
        launched=times.launched,
        events=events,
        op_costs=lanes.op_costs,
        owed=owed or {},
        resumptions=times.resumptions,
        inside=inside or {},
        scheduled=scheduled or [],
        contended=times.until,
    )


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
    """Every op that has not ended in the `past` is a task of its lane's device. network: on which others may send too; the step
    begins now.
    """

    def __init__(self, lanes: Lanes, past: Times, perturbation: Perturbation, network: Network | None = None) -> None:
        self.lanes, self.past, self.perturbation = lanes, past, perturbation
        self.program, self.op_costs = lanes.program, lanes.op_costs
        self.tasks: list[Task | None] = []  # None: ended in the past
        self.begins: list[int] = []  # by lane, before which op all have ended
        self.held: dict[HeldLaunches, int] = {}  # by what holds up a host, the op
        self.network = network or Network(Environment(), self.op_costs.capacity)
        self.env = self.network.env
        self.meetings: dict[Hashable, Rendezvous[CollectiveTransfer]] = {}
        profiles = [lanes.profile(number) for number in range(len(lanes.every))]
        self.devices = [
            perturbation.device(
                self.env, lane.rank, profile.slowdown, profile.synchronous, partial(self._slower, lane), lane.ranks
            )
            for lane, profile in zip(lanes.every, profiles, strict=True)
        ]
        if self.env.now:
            for device in self.devices:
                device.host = Host(start=self.env.now)
        perturbation.vary(self.env, self.network, self.op_costs.wiring.varying)
        self.segments = [Segments(lanes, number) for number in range(len(lanes.every))]
        for number in range(len(lanes.every)):
            self._launch(number)

    def _slower(self, lane: Lane, task: Compute, factor: float, clock: float) -> BlockCost:
        """The cost of a block whose kernels take `factor` times as long, on a GPU that runs at that part of its clock."""
        return self.op_costs.block(cast(Block, task.work), lane.cohort, factor, lane.rank, clock)

    def _launch(self, number: int) -> None:
        """A task for each op of a lane that has not ended, priced, and launched by the lane's host in program order."""
        lane, device, past = self.lanes.every[number], self.devices[number], self.past
        first, ops = self.lanes.offset[number], self.program.cohorts[lane.cohort].ops
        ends = past.end[first : first + len(ops)]
        begin = ends.index(NOT_ENDED) if NOT_ENDED in ends else len(ops)
        self.tasks += [None] * begin
        self.begins.append(begin)
        self._resume(number, begin)
        for index, op in enumerate(ops[begin:], begin):
            cost, ahead, behind = self.lanes.priced(number, op)
            if past.end[first + index] >= 0:
                if op.held:
                    self.held[device.host.resume_at(past.resumptions[first + index].time)] = first + index
                device.host.work(ahead + behind)
                self.tasks.append(None)
                continue
            past.cost[first + index] = cost
            task: Task
            if isinstance(cost, BlockCost):
                task = self._block(number, cost, cast(Block, op.work))
            elif cost.is_send:
                task = Transfer(self.env, self.network, cost.parts, cost.latency)
            else:
                meeting = self.lanes.meeting(number, index, op, cost)
                meet = partial(_rendezvous, self.meetings, meeting) if meeting else None
                task = CollectiveTransfer(self.env, self.network, cost.parts, cost.latency, device, cost.working, meet)
            self.tasks.append(task)
            device.host.launch(task, ahead, behind, op.held)
            if task.holds is not None:
                self.held[task.holds] = first + index

    def _block(self, number: int, cost: BlockCost, work: Block) -> Compute:
        """A block of a lane; item by item while it meets other traffic."""
        device = self.devices[number]
        if self.lanes.every[number].cohort in self.lanes.touched:
            segmented = self.segments[number].of(work)
            if segmented:
                return ContendedBlock(self.env, device, cost, work, self.network, segmented)
        return Compute(self.env, device, cost, work)

    def _resume(self, number: int, begin: int) -> None:
        """The host of a lane has launched the ops before its op number `begin`."""
        if not begin:
            return
        past, host, first = self.past, self.devices[number].host, self.lanes.offset[number]
        last = first + begin - 1
        held = next((op for op in range(last, first - 1, -1) if op in past.resumptions), -1) if past.resumptions else -1
        resumed = past.resumptions[held].time if held >= 0 else 0.0
        if held >= 0:
            self.held[host.resume_at(resumed)] = held
        behind = self.lanes.priced(number, self.program.cohorts[self.lanes.every[number].cohort].ops[begin - 1]).behind
        host.work(past.launched[last] - resumed + behind)

    def _connect(self) -> list[tuple[float, Task]]:
        """Let tasks wait for the one before on their stream, and for those that their op names; tasks that wait for none, and
        when what they waited for in the past has ended.
        """
        result, tasks, past = [], self.tasks, self.past.end
        for number, lane in enumerate(self.lanes.every):
            bases, streams = self.lanes.bases(number), self.devices[number]
            ops, first, begin = self.program.cohorts[lane.cohort].ops, self.lanes.offset[number], self.begins[number]
            ended = {op.stream: end for op, end in zip(ops[:begin], past[first : first + begin], strict=True)}  # its last one
            for me, op in enumerate(ops[begin:], first + begin):
                task = tasks[me]
                if task is None:
                    ended[op.stream] = past[me]
                    continue
                others = [tasks[bases[cohort] + other] for cohort, other in op.after]
                streams.stream(op.stream).add(task, [other for other in others if other is not None])
                over = max((ended.get(op.stream, 0.0), *(past[bases[cohort] + other] for cohort, other in op.after)))
                if not task.waiting:
                    result.append((over, task))
                elif over > self.env.now:
                    task.earliest = partial(_begin_later, self.network, over)
            streams.streams.clear()  # they refer to tasks, and these to their device: a circle that would outlive the player
        return result

    def begin(self) -> Event:
        """Start the step; the event of its end."""
        starting = self._connect()
        end = _End(self.env, [task for task in self.tasks if task is not None])
        self._start(starting)
        return end.reached

    def _start(self, starting: list[tuple[float, Task]]) -> None:
        for begin, task in starting:
            if begin > self.env.now:
                self.network.scheduled.append(self.env.now)
                self.env.timeout(begin - self.env.now, task).callbacks.append(_begin)
            else:
                task.ready()

    def play(self) -> Timeline:
        """Run to the end of the step. Raises UserError when tasks wait for each other."""
        if self.perturbation.effects:  # they may go on for ever
            self.perturbation.run(self.env, self.begin())
        else:
            self._start(self._connect())
            self.env.run()
        stuck = [number for number, task in enumerate(self.tasks) if task is not None and task.end is None]
        if stuck:
            self.perturbation.explain(self._held_up(stuck))
            raise UserError(f"the program waits for itself: {len(stuck)} ops never start (does the schedule deadlock?)")
        return self.timeline()

    def _held_up(self, stuck: list[int]) -> dict[int, tuple[float, float]]:
        """For each lane with `stuck` ops, by its first rank, when it began to wait in a collective, or else when its last op
        ended, and when this ended.
        """
        offset = self.lanes.offset
        lanes = np.unique(np.searchsorted(offset, stuck, side="right") - 1).tolist()
        result = {}
        for lane in lanes:
            tasks = self.tasks[offset[lane] : offset[lane + 1] if lane + 1 < len(offset) else None]
            mine = [task for task in tasks if task is not None]
            last = max((task.end for task in mine if task.end is not None), default=0.0)
            come = (task.start for task in mine if isinstance(task, CollectiveTransfer) and task.end is None and not task.waiting)
            result[self.lanes.every[lane].rank] = min(come, default=last), last
        return result

    def timeline(self) -> Timeline:
        """The timeline of the played step, by the network's clock."""
        times, stretch, owed = self.past, [0.0] * len(self.tasks), dict[int, dict[str, float]]()
        scheduled = [*self.network.scheduled, *(time for device in self.devices for time in device.scheduled)]
        events = self.tasks.count(None) + len(scheduled)
        start, end, launched = times.start, times.end, times.launched
        for number, task in enumerate(self.tasks):
            if task is None:
                continue
            assert task.end is not None
            start[number], end[number], launched[number] = task.start, task.end, task.launched
            if isinstance(task, Compute):
                stretch[number] = task.stretch
                if task.owed:
                    owed[number] = task.owed
        for holds, number in self.held.items():
            if self.tasks[number] is not None:
                before = -1 if holds.before is None else self.held[holds.before]
                times.resumptions[number] = Resumption(before, holds.busy, holds.time)
        inside = dict(played_blocks(self.lanes, self.segments, self.tasks, times))
        return _timeline(self.lanes, times, events, stretch, owed, inside, scheduled)


def _rendezvous(every: dict[Hashable, Rendezvous[CollectiveTransfer]], meeting: Meeting) -> Rendezvous[CollectiveTransfer]:
    """The rendezvous of that key that is not complete yet; cohorts meet under one label again and again."""
    rendezvous = every.get(meeting.key)
    if rendezvous is None:
        rendezvous = every[meeting.key] = Rendezvous(meeting.expected)
    if len(rendezvous.members) == meeting.expected - 1:
        del every[meeting.key]
    return rendezvous


def _begin(event: Event) -> None:
    cast(Task, event.value).ready()


def _begin_later(network: Network, over: float, task: Task) -> bool:
    """Let a task begin when what it waited for in the past has ended, if that is later than now."""
    task.earliest = None
    if over <= network.env.now:
        return False
    network.scheduled.append(network.env.now)
    network.env.timeout(over - network.env.now, task).callbacks.append(_begin)
    return True


def _from_zero(timeline: Timeline) -> Timeline:
    """A steady `timeline` with time 0 where the step begins on the lane that begins it first."""
    return since(min(timeline.begin(lane) for lane in range(len(timeline.lanes))), timeline)


def since(zero: float, timeline: Timeline) -> Timeline:
    """`timeline` with its times counted from `zero` on."""
    columns = timeline.start, timeline.end, timeline.launched
    start, end, launched = ([time - zero for time in times] for times in columns)
    inside = {number: block.later(-zero) for number, block in timeline.inside.items()}
    resumptions = {
        number: each._replace(time=each.time - zero, busy=each.busy - (zero if each.before < 0 else 0.0))
        for number, each in timeline.resumptions.items()
    }
    return replace(timeline, start=start, end=end, launched=launched, inside=inside, resumptions=resumptions)
