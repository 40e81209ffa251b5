"""A block as a sequence of segments: kernels in a row, a collective, or kernels with the collectives that run beside them.

Between segments no collective of the block is under way. A segment is a graph of pieces, which can be played by themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from sim.engine.blocks.splitting import grouped
from sim.engine.lanes import Lanes
from sim.pricing.block_costs import SLOWDOWN, BlockCost
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import COMPUTE, SIDE_STREAM, Block, Collective, Item, Join, Kernel, Op, Run, SharedItems, Start


class Piece(NamedTuple):
    """Kernels in a row, or a collective, on a stream; it begins when the pieces `waits` of its segment have ended.

    seconds: from its start, with nothing beside it; launch: seconds from the launch of the segment to its own; critical: seconds
    from its launch to its end, at least.
    """

    stream: str
    work: Block | Collective
    cost: BlockCost | TransferCost
    waits: tuple[int, ...]
    seconds: float
    launch: float
    critical: float

    @property
    def axis(self) -> str:
        """Of a collective."""
        return self.work.axis if isinstance(self.work, Collective) else ""


class Segment(NamedTuple):
    """Pieces in the order of their launches, and what they cost as a block. slowed: seconds by which their collectives lengthen
    their kernels.
    """

    cost: BlockCost
    pieces: tuple[Piece, ...]
    slowed: float

    @property
    def links(self) -> frozenset[int]:
        """Links that its collectives are on."""
        return frozenset().union(*(piece.cost.links for piece in self.pieces if isinstance(piece.cost, TransferCost)))


class Rest(NamedTuple):
    """A segment, seconds from the launch of its block to its own, and the cost of it and all that follow, from the launch of the
    block on.
    """

    segment: Segment
    launch: float
    cost: BlockCost


NOTHING = BlockCost(0.0, -inf, 0.0, {}, 0.0)


def _ahead_of(segment: Segment, launch: float, later: BlockCost) -> BlockCost:
    """The cost of a segment and what follows it, from the launch of their block on. launch: seconds from that to its own."""
    cost = segment.cost
    critical = max(later.critical, launch + cost.critical + later.busy)
    return BlockCost(later.busy + cost.busy, critical, 0.0, {}, later.kernels + cost.kernels)


class SegmentedBlock:
    """The segments of a block of a lane, and the links of its collectives. Most blocks are never cut: segments are worked out
    when they are first asked for.
    """

    def __init__(self, lane: _Segmentation, block: Block, links: tuple[int, ...]) -> None:
        self.links, self._lane, self._block = links, lane, block
        self._costs: dict[tuple[int, int], BlockCost] = {}  # of the segments from one number to before another

    @cached_property
    def segments(self) -> tuple[Rest, ...]:
        """In order."""
        return self._lane.cut(self._block)

    @cached_property
    def _using(self) -> dict[int, list[int]]:
        """By link, the numbers of the segments whose collectives are on it."""
        result: dict[int, list[int]] = {}
        for number, rest in enumerate(self.segments):
            for link in rest.segment.links:
                result.setdefault(link, []).append(number)
        return result

    def ahead_of(self, first: int, links: Iterable[int]) -> int:
        """The number of the first segment from number `first` on that is on one of `links`; how many segments there are if none
        is.
        """
        last = len(self.segments)
        for using in (self._using.get(link, ()) for link in links):
            place = bisect_left(using, first)
            if place < len(using):
                last = min(last, using[place])
        return last

    def cost(self, first: int, last: int) -> BlockCost:
        """Of the segments from number `first` to before `last`, from the launch of the block on."""
        known = self._costs.get((first, last))
        if known is None:
            cost = NOTHING
            for segment, launch, _ in reversed(self.segments[first:last]):
                cost = _ahead_of(segment, launch, cost)
            known = self._costs[first, last] = cost
        return known


class Segments:
    """The segmented blocks of one lane."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self._lane = _Segmentation(lanes, number)
        self._blocks: dict[Block, SegmentedBlock | None] = {}

    def of(self, block: Block) -> SegmentedBlock | None:
        """The segments of a block; None where its collectives take no links."""
        if block not in self._blocks:
            links = self._lane.links(block)
            self._blocks[block] = SegmentedBlock(self._lane, block, links) if links else None
        return self._blocks[block]


class _Segmentation:
    """How the blocks of one lane are segmented; equal items are segmented once. It knows no block that was, which refer to it."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self.lanes, self.number = lanes, number
        self._runs: dict[SharedItems, list[Segment]] = {}

    def links(self, block: Block) -> tuple[int, ...]:
        """The links that the collectives of a block take."""
        inside = self.lanes.op_costs.inside(block, self.lanes.every[self.number].cohort)
        return tuple({link: None for cost, _ in inside for link in sorted(cost.links)})

    def cut(self, block: Block) -> tuple[Rest, ...]:
        """See `SegmentedBlock.segments`."""
        sequence: list[Segment] = []
        for times, items in block.runs:
            if all(isinstance(item, Kernel) for item in items):
                sequence.append(self._segment(block.name, times, items))
            else:
                if items not in self._runs:
                    self._runs[items] = [self._segment(block.name, 1, each) for each in _cut(items)]
                sequence += self._runs[items] * times
        launches = [0.0]
        for segment in sequence:
            launches.append(launches[-1] + segment.cost.host)
        cost = NOTHING
        rests: list[Rest] = []
        for segment, launch in zip(reversed(sequence), reversed(launches[:-1]), strict=True):
            cost = _ahead_of(segment, launch, cost)
            rests.append(Rest(segment, launch, cost))
        return tuple(reversed(rests))

    def _segment(self, name: str, times: int, items: SharedItems) -> Segment:
        lane = self.lanes.every[self.number]
        cost = self.lanes.op_costs.block(_part(name, times, items), lane.cohort, rank=lane.rank)
        slowed = sum(seconds for (part, _), seconds in cost.parts.items() if part == SLOWDOWN)
        return Segment(cost, tuple(self._pieces(name, times, items)), slowed)

    def _pieces(self, name: str, times: int, items: SharedItems) -> Iterator[Piece]:
        """The pieces of a segment, each waiting for those before it as ops on streams would."""
        launched = 0.0
        computed: tuple[int, ...] = ()  # the latest piece of the compute stream
        beside: dict[str, tuple[int, ...]] = {}  # the latest collective of each stream beside
        started: dict[Collective, list[int]] = {}
        joins: tuple[int, ...] = ()
        number = 0
        for item in _grouped(items):
            if isinstance(item, Join):
                joins = (*joins, started[item.collective].pop(0))
                continue
            work: Block | Collective
            if isinstance(item, Start):
                stream, work = item.stream, item.collective
                waits = (*computed, *beside.get(stream, ()))
                beside[stream] = (number,)
                started.setdefault(work, []).append(number)
            else:
                stream, waits = COMPUTE, (*computed, *joins)
                work = item if isinstance(item, Collective) else _part(name, times, item)
                if isinstance(item, Collective):
                    waits += beside.get(SIDE_STREAM, ())
                computed, joins = (number,), ()
            cost, ahead, behind = self.lanes.priced(self.number, Op(stream, work))
            launched += ahead
            if isinstance(cost, BlockCost):
                yield Piece(stream, work, cost, waits, cost.busy, launched, cost.critical)
            else:
                seconds = cost.seconds
                yield Piece(stream, work, cost, waits, seconds, launched, seconds)
            launched += behind
            number += 1


@lru_cache(maxsize=4096)  # one object for all lanes and plays: prices are remembered by it
def _part(name: str, times: int, items: SharedItems) -> Block:
    return Block(name, (Run(times, items),))


@lru_cache(maxsize=4096)
def _grouped(items: SharedItems) -> tuple[SharedItems | Collective | Start | Join, ...]:
    """Kernels in a row as one."""
    return tuple(SharedItems(item) if isinstance(item, tuple) else item for item in grouped(items))


@lru_cache(maxsize=1024)  # lanes whose layers share their items share their prices, too
def _cut(items: SharedItems) -> tuple[SharedItems, ...]:
    """The items of each segment: collectives that were started are joined in it."""
    segments: list[list[Item]] = []
    under_way = 0
    for item in items:
        if not segments or not (under_way or (isinstance(item, Kernel) and isinstance(segments[-1][-1], Kernel))):
            segments.append([])
        segments[-1].append(item)
        under_way += isinstance(item, Start) - isinstance(item, Join)
    return tuple(map(SharedItems, segments))
