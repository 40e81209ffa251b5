"""The times of a step as long as nothing contends, and when something does for the first time.

Where no two transfers share a link and no collective runs beside kernels that it slows down, an op starts when the last of what
it waits for has ended and takes its price, whatever else happens meanwhile: times are max-plus sums, and need no events. Up to
the first moment at which something contends these are the player's times, to the bit; from there on it plays the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from math import inf
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sim.engine.lanes import Lanes, Meeting
from sim.engine.network import ROUNDING
from sim.pricing.block_costs import BlockCost
from sim.pricing.transfers.transfer_cost import Demands, TransferCost
from sim.program import Block, Op, Work
from sim.replay.program_levels import ProgramLevels, program_levels
from sim.timeline import Resumption

Floats = NDArray[np.float64]
NOT_ENDED = -1.0


class _Known(NamedTuple):
    """A distinct piece of work on a stream of a lane: kernels take `seconds` from their start, and end no earlier than `critical`
    after their launch; a transfer takes `seconds`. ahead, behind: of the host; ops: that do it.
    """

    work: Work
    cost: Cost
    transfer: TransferCost | None  # its cost, where it is no block
    seconds: float
    critical: float
    ahead: float
    behind: float
    ops: list[int]


Cost = BlockCost | TransferCost


@dataclass
class Times:
    """Columns over the ops of all lanes, and when hosts that were held up went on. end: −1 of an op that never starts; until:
    up to when nothing contends.
    """

    start: list[float]
    end: list[float]
    launched: list[float]
    cost: list[Cost | None]
    resumptions: dict[int, Resumption] = field(default_factory=dict)
    until: float = 0.0

    @classmethod
    def none(cls, ops: int) -> Times:
        """Of so many ops none has ended."""
        return cls([0.0] * ops, [NOT_ENDED] * ops, [0.0] * ops, [None] * ops)

    def by(self, time: float) -> Times:
        """Only what has ended by `time`."""
        end = [each if each <= time else NOT_ENDED for each in self.end]
        resumptions = {op: each for op, each in self.resumptions.items() if end[op] >= 0}
        return Times(self.start, end, self.launched, self.cost, resumptions, time)


class Uncontended:
    """The step of `lanes` if nothing contends.

    times: of all ops; until: when something contends for the first time: what has ended by then has ended at these times.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, count = lanes, lanes.ops
        self.times = Times.none(count)
        self._works: list[dict[str, dict[Work, _Known]]] = [{} for _ in lanes.every]  # by stream
        self._blocked: dict[int, list[int]] = {}  # by op, the lanes that wait for it
        self._come: dict[Hashable, list[tuple[int, int, float]]] = {}  # (lane, op, seconds) by rendezvous that is not complete
        self._carried: set[int] = set()  # ops whose bytes another member of their rendezvous puts on the network
        self._demanded: dict[Hashable, Demands] = {}  # of blocks, by cohort and collectives
        self._alike = True  # whether the members of each rendezvous take equally long
        self._free = list(range(len(lanes.every)))  # lanes that can go on
        levels = program_levels(lanes.program) if lanes.op_costs.lane is None else None
        if levels is not None:
            self._by_levels(levels)
        complete = (levels is not None or self._run()) and self._alike
        self.until = self._first_contention() if complete else -1.0

    def _by_levels(self, levels: ProgramLevels) -> None:
        """Work out all lanes at once."""
        priced, hosts, costs = [], [], list[Cost]()
        for number, columns in enumerate(levels.columns):
            for op in columns.kinds:
                streams = self._works[number].setdefault(op.stream, {})
                known = streams.get(op.work)
                if known is None:
                    known = streams[op.work] = self._know(number, op)
                costs.append(known.cost)
                priced.append((known.seconds, known.critical, known.transfer is None))
                hosts.append((known.ahead, known.behind))
            for op, numbers in zip(columns.kinds, columns.by_kind(), strict=True):
                self._works[number][op.stream][op.work].ops.extend((self.lanes.offset[number] + numbers).tolist())
        hosting, launched = np.array(hosts), np.empty(len(levels.kind))
        for first, end in pairwise(levels.first.tolist()):
            launched[first:end] = hosting[levels.kind[first:end]].ravel().cumsum()[::2]
        seconds, critical, is_block = (np.array(each)[levels.kind] for each in zip(*priced, strict=True))
        soonest = np.where(is_block, 0.0, launched), np.where(is_block, launched + critical, 0.0)
        for members in levels.meetings:
            self._alike = self._alike and len(set(seconds[members].tolist())) == 1
            self._carried.update(members[:-1])
        times = levels.graph.times(seconds, soonest=soonest)
        self.times.start, self.times.end, self.times.launched = times.start.tolist(), times.end.tolist(), launched.tolist()
        self.times.cost = np.array(costs, object)[levels.kind].tolist()

    def _run(self) -> bool:
        """Work out every lane in program order; whether none is stuck."""
        lanes, left = [self._lane(number) for number in self._free], len(self._free)
        while self._free:
            left -= next(lanes[self._free.pop()], True)
        return not left

    def _lane(self, number: int) -> Generator[bool]:
        """Work out a lane; yields False when it waits for another."""
        lane, first = self.lanes.every[number], self.lanes.offset[number]
        start, end, launched, costs = self.times.start, self.times.end, self.times.launched, self.times.cost
        bases, blocked, streams = self.lanes.bases(number), self._blocked, self._works[number]
        idle: dict[str, float] = {}  # since when each stream is
        resumed = busy = 0.0  # when the host went on that was held up, and its seconds of work since then
        held = -1
        for op_number, op in enumerate(self.lanes.program.cohorts[lane.cohort].ops, first):
            stream = op.stream
            works = streams.get(stream)
            if works is None:
                works, idle[stream] = streams.setdefault(stream, {}), 0.0
            ready = idle[stream]
            for cohort, place in op.after:
                awaited = bases[cohort] + place
                while (over := end[awaited]) < 0:
                    blocked.setdefault(awaited, []).append(number)
                    yield False
                if over > ready:
                    ready = over
            known = works.get(op.work)
            if known is None:
                known = works[op.work] = self._know(number, op)
            _, costs[op_number], transfer, seconds, critical, ahead, behind, ops = known
            ops.append(op_number)
            if op.held:
                self.times.resumptions[op_number] = Resumption(held, busy, max(ready, resumed + busy))
                resumed, busy, held = max(ready, resumed + busy), 0.0, op_number
            busy += ahead
            launch = launched[op_number] = resumed + busy
            busy += behind
            if transfer is None:
                late = launch + critical - ready
                if late > seconds:
                    seconds = late
            else:
                if launch > ready:
                    ready = launch
                if not transfer.is_send:
                    meeting = self.lanes.meeting(number, op_number - first, op, transfer)
                    if meeting is not None:
                        start[op_number] = ready
                        if not self._come_to(meeting, number, op_number, seconds):
                            yield False
                        ready = start[op_number]
            start[op_number] = ready
            end[op_number] = idle[stream] = ready + seconds
            if op_number in blocked:
                self._free += blocked.pop(op_number)

    def _know(self, lane: int, op: Op) -> _Known:
        cost, ahead, behind = self.lanes.priced(lane, op)
        if isinstance(cost, BlockCost):
            return _Known(op.work, cost, None, cost.busy, cost.critical, ahead, behind, [])
        return _Known(op.work, cost, cost, cost.seconds, 0.0, ahead, behind, [])

    def _come_to(self, meeting: Meeting, lane: int, op: int, seconds: float) -> bool:
        """A lane comes to a rendezvous; whether it was the last one, with which all of them start."""
        come = self._come.setdefault(meeting.key, [])
        come.append((lane, op, seconds))
        self._alike = self._alike and seconds == come[0][2]
        if len(come) < meeting.expected:
            return False
        del self._come[meeting.key]
        begin = max(self.times.start[each] for _, each, _ in come)
        for other, each, _ in come:
            self.times.start[each] = begin
            if other != lane:
                self._free.append(other)
                self._carried.add(each)
        return True

    def _first_contention(self) -> float:
        start, end = np.array(self.times.start), np.array(self.times.end)
        return min(self._on_links(start, end), self._beside_kernels(start, end))

    def _on_links(self, start: Floats, end: Floats) -> float:
        """When a link gets more traffic than it carries, if each transfer goes at the rate that it has alone.

        A block is on the links of its collectives from its start to its end.
        """
        every: dict[tuple[int, str, int], tuple[Demands, list[_Known]]] = {}  # works of a stream, by what they put on links
        for lane, streams in enumerate(self._works):
            for stream, works in streams.items():
                for known in works.values():
                    own = self._demands(lane, known)
                    every.setdefault((lane, stream, id(own)), (own, []))[1].append(known)
        most: dict[int, dict[tuple[int, str, str], float]] = {}  # by link; transfers of one stream follow each other
        for (lane, stream, _), (own, _) in every.items():
            for (link, inside), rate in own.items():
                rates, place = most.setdefault(link, {}), (lane, stream, inside)
                rates[place] = max(rate, rates.get(place, 0.0))
        capacity = self.lanes.op_costs.capacity
        crowded: dict[int, list[tuple[int, float]]] = {  # with the numbers of its users, and the part that each takes
            link: [] for link, rates in most.items() if len(rates) > 1 and sum(rates.values()) > capacity[link] * (1 + ROUNDING)
        }
        for number, (own, _) in enumerate(every.values()):
            for (link, _), rate in own.items():
                if link in crowded:
                    crowded[link].append((number, rate / capacity[link]))
        links = list(dict.fromkeys(map(tuple, crowded.values())))  # those with the same traffic are one
        if not links:
            return inf
        everyone = [works for _, works in every.values()]
        using = list(dict.fromkeys(number for link in links for number, _ in link))
        users = dict(zip(using, self._on_the_wire([everyone[number] for number in using], start, end), strict=True))
        return _overloaded([[(users[number], part) for number, part in link] for link in links])

    def _on_the_wire(self, users: list[list[_Known]], start: Floats, end: Floats) -> list[tuple[Floats, Floats]]:
        """When pieces of work of each of `users` begin to send, and when their last bytes are sent."""
        works, carried = list(chain.from_iterable(users)), self._carried
        ops = [[op for op in known.ops if op not in carried] if carried else known.ops for known in works]
        latencies = [known.transfer.latency if known.transfer else 0.0 for known in works]
        numbers, counts = list(chain.from_iterable(ops)), list(map(len, ops))
        bounds = [0, *accumulate(counts)]
        begin, over = start[numbers], end[numbers] - np.repeat(latencies, counts)
        edges = [bounds[place] for place in accumulate(map(len, users), initial=0)]
        return [(begin[first:last], over[first:last]) for first, last in pairwise(edges)]

    def _demands(self, lane: int, known: _Known) -> Demands:
        """What a piece of work puts on links; one object for transfers over equal links, and for blocks of a lane with equal
        collectives.
        """
        if known.transfer:
            return known.transfer.demands
        if self.lanes.op_costs.lane is not None:
            return {}
        cohort, block = self.lanes.every[lane].cohort, cast(Block, known.work)
        key = cohort, block.meetings
        own = self._demanded.get(key)
        return own if own is not None else self._demanded.setdefault(key, self._inside(block, cohort))

    def _inside(self, block: Block, cohort: int) -> Demands:
        """The most that one of its collectives puts on each link, by stream."""
        demands: Demands = {}
        for transfer, stream in self.lanes.op_costs.inside(block, cohort):
            for (link, _), rate in transfer.demands.items():
                demands[link, stream] = max(demands.get((link, stream), 0.0), rate)
        return demands

    def _beside_kernels(self, start: Floats, end: Floats) -> float:
        """When a collective is beside kernels that it slows down."""
        first = inf
        for lane, works in enumerate(self._works):
            if self.lanes.profile(lane).slowdown == 1:
                continue
            every = [known for each in works.values() for known in each.values()]
            collectives = [op for known in every if known.transfer and not known.transfer.is_send for op in known.ops]
            if collectives:
                blocks = np.array(sorted([op for known in every if not known.transfer for op in known.ops]), np.int64)
                begin, through = start[collectives], end[collectives]
                place = np.searchsorted(end[blocks], begin, side="right")  # the first block that ends after a collective begins
                there = place < len(blocks)
                place, begin, through = place[there], begin[there], through[there]
                beside = start[blocks][place] < through
                first = min(first, float(np.maximum(begin, start[blocks][place])[beside].min(initial=inf)))
        return first


def _overloaded(links: Sequence[Sequence[tuple[tuple[Floats, Floats], float]]]) -> float:
    """When there is first more traffic on one of `links` than it carries. links: from when until when its users send, and the
    part of it that each takes.
    """
    time = np.concatenate([times[edge] for edge in (0, 1) for users in links for times, _ in users])
    counts = [len(times[0]) for users in links for times, _ in users]
    change = np.repeat([part for users in links for _, part in users], counts)
    link = np.repeat([number for number, users in enumerate(links) for _ in users], counts)
    change, link = np.concatenate([change, -change]), np.concatenate([link, link])
    order = np.lexsort((change, time, link))  # what ends makes room for what begins then
    over = change[order].cumsum() > 1 + 2 * ROUNDING
    return float(time[order][over].min(initial=inf))
