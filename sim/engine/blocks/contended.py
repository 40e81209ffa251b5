"""A block whose collectives are on links that other traffic uses.

As long as nothing else is on these links the block is one event. When a transfer, or another such block, comes to one of them,
the block goes on piece by piece, its collectives as flows on the network, until what it does next is alone on its links again:
all segments before the next one on a link that others use are one event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from typing import NamedTuple

from simpy import Environment

from sim.clock import on_grid
from sim.engine.blocks.played import Passage, PlayedBlock, Span, alone
from sim.engine.blocks.segments import Piece, Rest, SegmentedBlock, Segments
from sim.engine.device import Compute, Device
from sim.engine.lanes import Lanes
from sim.engine.network import FlowPart, Network
from sim.engine.task import Task, start
from sim.engine.transfer import CollectiveTransfer
from sim.engine.uncontended import Times
from sim.pricing.block_costs import Beside, BlockCost
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Block

NOTHING = FlowPart(0.0, ())


class ContendedBlock(Compute):
    """A block that shares links with other traffic."""

    __slots__ = ("_lengthened", "_passages", "_place", "_whole", "network", "segmented")

    def __init__(
        self, env: Environment, device: Device, cost: BlockCost, work: Block, network: Network, segmented: SegmentedBlock
    ) -> None:
        super().__init__(env, device, cost, work)
        self.network, self.segmented = network, segmented
        self._place = 0  # of the segment that runs
        self._whole: _Whole | None = None  # this segment and later ones, as long as they are one event
        self._lengthened: dict[str, float] = {}  # seconds by which collectives took longer, by axis
        self._passages: list[Passage] = []

    @property
    def played(self) -> PlayedBlock:
        """Its pieces, when it has ended."""
        return PlayedBlock(self.segmented, tuple(self._passages), self.launched, self.device.slowdown)

    def begin(self) -> None:
        """Come to the links."""
        self.network.visit(self, self.segmented.links)
        self._go_on()

    def _go_on(self) -> None:
        """Play what is left of the block, in one go as far as nothing else is on its links."""
        first, last, cost = self._place, None, self.cost
        busy = self.network.busy(self.segmented.links)
        if busy or first or self.device.beside_collectives:
            last = first if self.device.beside_collectives else self.segmented.ahead_of(first, busy)
            if first == last:
                rest = self.segmented.segments[first]
                self._play(rest, [_State(0.0, piece.seconds) for piece in rest.segment.pieces], ())
                return
            cost = self.segmented.cost(first, last)
        self._run(cost, last, self.env.now)

    def _run(self, cost: BlockCost, last: int | None, start: float) -> None:
        """Play the segments up to number `last` as one event, which began at `start`."""
        self._whole = _Whole(self, cost, last)
        self._whole.start, self._whole.launched = start, self.launched
        self.device.compute(self._whole)

    def _end(self) -> None:
        """The last segment is over."""
        self.network.leave(self, self.segmented.links)
        self._settle()
        self.finish()

    def _play(self, rest: Rest, states: Sequence[_State], spans: Sequence[Span]) -> None:
        """Play a segment as tasks: what is left of its pieces. spans: theirs without other traffic, where some have begun."""
        tasks: list[Task | None] = []
        over = _Over(self, rest, states, spans)
        for piece, state in zip(rest.segment.pieces, states, strict=True):
            task = self._task(piece, state.left) if state.left else None
            tasks.append(task)
            if task is not None:
                task.launched = self.launched + rest.launch + piece.launch
                over.wait_for(task)
                for each in piece.waits:
                    other = tasks[each]
                    if other is not None:
                        task.wait_for(other)
        over.tasks = tasks
        if over.waiting:
            start(task for task in tasks if task is not None)
        else:
            over.begin()

    def _task(self, piece: Piece, left: float) -> Task:
        """What is left of a piece that has begun, or all of it."""
        cost = piece.cost
        if isinstance(cost, BlockCost):
            if left < piece.seconds:  # it is launched
                cost = BlockCost(left, -inf, 0.0, {}, cost.kernels * left / piece.seconds)
            return Compute(self.env, self.device, cost, self.work)
        parts, latency = self._rest_of(cost, piece.seconds - left) if left < piece.seconds else (cost.parts, cost.latency)
        return CollectiveTransfer(self.env, self.network, parts, latency, self.device, cost.working, None)

    def _rest_of(self, cost: TransferCost, passed: float) -> tuple[tuple[FlowPart, ...], float]:
        """What a collective has to send yet, and its latency, when it was alone for `passed` seconds."""
        for number, seconds in enumerate(self.network.alone(cost.parts)):
            if passed < seconds:
                part = cost.parts[number]
                return (part._replace(bytes=part.bytes * (1 - passed / seconds)), *cost.parts[number + 1 :]), cost.latency
            passed -= seconds
        return (NOTHING,), cost.latency - passed

    def ended(self, over: _Over) -> None:
        """A segment is over."""
        rest, states, tasks = over.rest, over.states, over.tasks
        self._passages.append(Passage(self._place, self._place + 1, self.env.now, self.env.now, tuple(over.played())))
        self._place += 1
        self.stretch -= rest.segment.slowed
        for piece, state, task in zip(rest.segment.pieces, states, tasks, strict=True):
            self.stretch += state.slowed
            if isinstance(task, Compute):
                self.stretch += task.stretch
            elif task is not None:
                more = (task.end or 0.0) - task.start - state.left
                self._lengthened[piece.axis] = self._lengthened.get(piece.axis, 0.0) + more
        over.tasks = ()  # they refer to it: a circle that would outlive the player
        self._go_on_from(self._place)

    def _go_on_from(self, place: int | None) -> None:
        """Play what is left from the segment of that number on; None: nothing is."""
        if place is None or place == len(self.segmented.segments):
            self._end()
        else:
            self._place = place
            self._go_on()

    def computed(self, whole: _Whole) -> None:
        """All that was one event is over."""
        self.stretch += whole.stretch
        self._passages.append(Passage(self._place, whole.last, whole.start, self.env.now))
        self._whole = None
        self._go_on_from(whole.last)

    def disturb(self, link: int | None = None) -> None:
        """Something comes to a link, or a collective beside the kernels: go on piece by piece, or stop ahead of the next segment
        that is on the link.
        """
        whole, segments = self._whole, self.segmented.segments
        if whole is None:
            return
        first, (place, begin) = self._place, self._under_way(whole)
        last = place if link is None else self.segmented.ahead_of(place, (link,))
        if last >= (len(segments) if whole.last is None else whole.last):
            return
        undelayed = self.device.is_undelayed
        self.device.stop()
        if last > place and undelayed:
            self._run(self.segmented.cost(first, last), last, whole.start)
            return
        self._whole, self._place = None, place
        if place > first:
            self._passages.append(Passage(first, place, whole.start, begin))
        rest, now, slowdown = segments[place], self.env.now, self.device.slowdown
        spans = alone(rest, begin, self.launched + rest.launch, slowdown)
        self._play(rest, _states(rest, spans, begin, now, slowdown), spans)

    def _under_way(self, whole: _Whole) -> tuple[int, float]:
        """The number of the segment that runs, and when it began; of none, what comes behind the last."""
        segments, begin, place, now = self.segmented.segments, whole.start, self._place, self.env.now
        left = segments[place].cost.busy - (now - begin)
        if self.device.duration(whole) == whole.cost.busy:  # no kernel waited for its launch
            place = max(place, bisect_left(segments, -left, key=lambda rest: -rest.cost.busy) - 1)
            begin += segments[self._place].cost.busy - segments[place].cost.busy
        for segment, launch, _ in segments[place : whole.last]:
            end = max(begin + segment.cost.busy, self.launched + launch + segment.cost.critical)
            if end > now:
                break
            begin, place = end, place + 1
        return place, begin

    def _settle(self) -> None:
        """Say what lengthened the block: other traffic its collectives, besides what slowed down its kernels."""
        more = self.env.now - self.start - self.device.duration(self) - self.stretch
        if more and self._lengthened:
            owed = {f"{axis} exposed": seconds for axis, seconds in self._lengthened.items()}
            largest = max(owed, key=lambda name: owed[name])
            self.owed = owed | {largest: owed[largest] + more - sum(owed.values())}


def played_blocks(
    lanes: Lanes, segments: Sequence[Segments], tasks: Sequence[Task | None], times: Times
) -> Iterator[tuple[int, PlayedBlock]]:
    """What ran inside the blocks of cohorts that share links with other traffic, by op. tasks: of all ops, None of those that had
    ended before anything contended.
    """
    for number, lane in enumerate(lanes.every):
        if lane.cohort not in lanes.touched:
            continue
        for op, at in zip(lanes.program.cohorts[lane.cohort].ops, count(lanes.offset[number]), strict=False):
            task = tasks[at]
            if isinstance(task, ContendedBlock):
                yield at, task.played
            elif task is None and isinstance(op.work, Block) and (segmented := segments[number].of(op.work)):
                whole = Passage(0, None, times.start[at], times.end[at])
                yield at, PlayedBlock(segmented, (whole,), times.launched[at], lanes.profile(number).slowdown)


class _State(NamedTuple):
    """Of a piece: seconds by which collectives have slowed it down, and seconds left, were nothing beside it; 0: it is over."""

    slowed: float
    left: float


def _states(rest: Rest, spans: Sequence[Span], begin: float, now: float, slowdown: float) -> list[_State]:
    """How far the pieces of a segment are at `now` that began at `begin` and, with nothing else on its links, take `spans`."""
    states: list[_State] = []
    beside = Beside(slowdown)
    for piece, (first, end) in zip(rest.segment.pieces, spans, strict=True):
        slowed = 0.0
        if isinstance(piece.cost, BlockCost):
            slowed = beside.slowed(piece.seconds, first)
        else:
            beside.add(end, piece.cost.slowing)
        if end <= now:
            states.append(_State(slowed, 0.0))
        elif first >= now:
            states.append(_State(0.0, piece.seconds))
        else:
            spent = min(slowed, on_grid((now - first) * (1 - 1 / beside.slowdown)))
            states.append(_State(spent, min(piece.seconds, end - now - (slowed - spent))))
    return states


class _Over(Task):
    """The end of a segment."""

    __slots__ = ("block", "rest", "spans", "states", "tasks")

    def __init__(self, block: ContendedBlock, rest: Rest, states: Sequence[_State], spans: Sequence[Span]) -> None:
        super().__init__(block.env)
        self.block, self.rest, self.states, self.spans = block, rest, states, spans
        self.tasks: Sequence[Task | None] = ()

    def begin(self) -> None:
        """The block goes on."""
        self.block.ended(self)

    def played(self) -> Iterator[Span]:
        """From when to when each piece ran."""
        for number, (piece, state, task) in enumerate(zip(self.rest.segment.pieces, self.states, self.tasks, strict=True)):
            if task is None:
                yield self.spans[number]
            else:
                yield self.spans[number][0] if state.left < piece.seconds else task.start, task.end or 0.0


class _Whole(Compute):
    """What is left of a block up to its segment number `last` (None: to its end), as one event."""

    __slots__ = ("block", "last")

    def __init__(self, block: ContendedBlock, cost: BlockCost, last: int | None) -> None:
        super().__init__(block.env, block.device, cost, block.work)
        self.block, self.last = block, last

    def disturb(self) -> None:
        """A collective comes beside the kernels."""
        self.block.disturb()

    def finish(self) -> None:
        """The block goes on."""
        self.block.computed(self)
