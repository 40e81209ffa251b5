"""A played step whose ops take other times: worked out anew for every rank and sample, without playing it again.

The played step is a graph: an op starts when the one before on its stream and those that it waits for have ended, a collective
when its ranks have come, kernels when they are launched. Its times are max-plus sums. Here every op is one numpy operation over
ranks × samples, in the order of the waits, so that 16,384 ranks that all differ cost no more than the ops of one step.

What stays as it was played: which traffic shares links, and by how much collectives slow down kernels beside them. With nothing
perturbed the times are the player's to the bit; where perturbed ops would contend otherwise, the player decides. Ranks that meet
inside blocks (tensor parallelism) are as slow as the slowest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from sim.pricing.block_costs import BlockCost
from sim.program import Block, Collective
from sim.replay.places import Column, Floats, Groups, Places
from sim.replay.program_graph import program_graph
from sim.timeline import Timeline
from topologies.reading import UserError

ORIGIN = np.zeros((1, 1))  # when the step begins
FACTOR = 1.125  # at which blocks are priced to know how their seconds grow with that of their kernels
Factors = Floats | list[Floats]
Transfers = Callable[[int, int], Floats]  # (op of the step, ranks or groups) -> factors of shape (groups, samples)


class Replayed:
    """The step worked out anew. through: by cohort, when its places are, shape (places, samples)."""

    def __init__(self, places: Places, through: list[Floats]) -> None:
        self.places = places
        samples = max(most.shape[1] for most in through)
        self.through = [np.broadcast_to(most, (places.count, samples)) for most in through]

    @cached_property
    def steps(self) -> Floats:
        """Seconds of the step, shape (samples,)."""
        return self.places.latest(self.through)

    @cached_property
    def ends(self) -> Floats:
        """When each rank is through, shape (ranks, samples)."""
        return self.places.by_rank(self.through)


class NodeTimes(NamedTuple):
    """Times of one node in the played step, in seconds: a number where all places have the same, or one per place."""

    launched: Column  # since the step began, or since the host went on
    block: BlockTimes | None  # None: a transfer
    seconds: Column  # of a transfer; of a block, what is added to it whatever its kernels take
    delayed: bool  # whether anything is added
    held: Column = 0.0  # of a node that holds up the host: the host's work since it went on before


@dataclass(eq=False, slots=True)
class BlockTimes:
    """A block of a cohort as a max-plus map (`sim.pricing.block_costs`), and how it grows when its kernels take twice as long."""

    cohort: int
    busy: Column
    critical: Column
    busy_slope: Column
    critical_slope: Column

    def with_factors(self, factors: list[Floats] | None) -> tuple[Column, Column]:
        """busy and critical of kernels that take `factors` as long, by cohort."""
        if factors is None:
            return self.busy, self.critical
        more = factors[self.cohort] - 1
        return self.busy + more * self.busy_slope, self.critical + more * self.critical_slope


class _Drawn:
    """A block whose kernels take other times: busy and critical, the least that it is busy, and the most of critical."""

    __slots__ = ("busy", "critical", "late", "least")

    def __init__(self, busy: Column, critical: Column) -> None:
        self.busy, self.critical = busy, critical
        self.least, self.late = float(np.min(busy)), float(np.max(critical))


def replay_of(timeline: Timeline) -> StepReplay:
    """The replay of a timeline, which is kept with it. Raises UserError as `StepReplay` does."""
    if timeline.replay is None:
        timeline.replay = StepReplay(timeline)
    return cast(StepReplay, timeline.replay)


class StepReplay:
    """The graph of a played step. Raises UserError for a steady state, of which only a part is the step."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.program = timeline, timeline.program
        if self.program.cohorts[0].steady:
            raise UserError("a steady state of an asynchronous schedule is not replayed: it is a part of what was played")
        self.places = Places(timeline)
        self.graph = program_graph(self.program)
        self.blocks: list[BlockTimes] = []
        self.nodes = [times for number in range(len(self.program.cohorts)) for times in self._cohort(number)]
        self._meetings = self._meet()

    # -- the played step -------------------------------------------------------------------------------------------------

    def _cohort(self, number: int) -> Iterator[NodeTimes]:
        timeline = self.timeline
        lanes = [lane for lane, each in enumerate(timeline.lanes) if each.cohort == number]
        first = [timeline.offset[lane] for lane in lanes]
        several = partial(self.places.column, number)
        stretch, owed = timeline.stretch, timeline.owed
        launched, seconds = (self._columns(number, times) for times in (timeline.launched, timeline.ends - timeline.starts))
        blocks: dict[Block, BlockTimes] = {}
        resumed: Column = 0.0
        for index, op in enumerate(self.program.cohorts[number].ops):
            held, work = 0.0, op.work
            if op.held:
                each = [timeline.resumptions[at + index] for at in first]
                held, resumed = each[0].busy, several([resumption.time for resumption in each])
            ahead = launched[index] - resumed
            if isinstance(work, Block):
                block = blocks.get(work)
                if block is None:
                    played = [cast(BlockCost, timeline.cost[at + index]) for at in first]
                    block = blocks[work] = self._block(number, work, lanes, played)
                    self.blocks.append(block)
                more = [stretch[at + index] for at in first]
                if owed:
                    more = [each + sum(owed.get(at + index, {}).values()) for at, each in zip(first, more, strict=True)]
                yield NodeTimes(ahead, block, several(more), any(more), held)
            else:
                yield NodeTimes(ahead, None, seconds[index], False, held)

    def _columns(self, cohort: int, times: Sequence[float] | Floats) -> list[Column]:
        """Times of the ops of a cohort's lanes: see `Places.column`."""
        count = len(self.program.cohorts[cohort].ops)
        first = [self.timeline.offset[lane] for lane, each in enumerate(self.timeline.lanes) if each.cohort == cohort]
        table = [np.asarray(times[at : at + count]).tolist() for at in first]
        if len(table) == 1:
            return cast(list[Column], table[0])
        return [self.places.column(cohort, list(each)) for each in zip(*table, strict=True)]

    def _block(self, cohort: int, block: Block, lanes: list[int], played: list[BlockCost]) -> BlockTimes:
        costs, column = self.timeline.op_costs, partial(self.places.column, cohort)
        ranks = [self.timeline.lanes[lane].rank for lane in lanes]
        slower, usual = ([costs.block(block, cohort, factor, rank=rank) for rank in ranks] for factor in (FACTOR, 1.0))
        busy, critical = (
            column([(getattr(more, name) - getattr(less, name)) / (FACTOR - 1) for more, less in zip(slower, usual, strict=True)])
            for name in ("busy", "critical")
        )
        return BlockTimes(
            cohort, column([cost.busy for cost in played]), column([cost.critical for cost in played]), busy, critical
        )

    def _meet(self) -> dict[int, Groups]:
        """By first node of those whose ranks meet, their groups; without meetings of every place with itself."""
        known: dict[Hashable, Groups | None] = {}
        result = {}
        for members in self.graph.order:
            nodes = [self.graph.nodes[number] for number in members]
            works = [node.op.work for node in nodes]
            if isinstance(works[0], Collective):
                collectives = [(node.cohort, cast(Collective, work)) for node, work in zip(nodes, works, strict=True)]
                key = tuple((cohort, () if work.cohorts else work.axes) for cohort, work in collectives)
                if key not in known:
                    known[key] = Groups.of([self.places.groups(work, cohort) for cohort, work in collectives])
                if (groups := known[key]) is not None:
                    result[members[0]] = groups
        return result

    # -- times -----------------------------------------------------------------------------------------------------------

    def times(self, kernels: Factors | None = None, transfers: Transfers | None = None) -> Replayed:
        """Step and ends. kernels: factors by which the kernels of each rank take longer, shape (ranks, samples), or by cohort
        those of each place; transfers: the factors of each collective and send.
        """
        factors = self.places.slowest(kernels) if isinstance(kernels, np.ndarray) else kernels
        blocks = {block: _Drawn(*block.with_factors(factors)) for block in self.blocks}
        every, nodes, maximum = self.nodes, self.graph.nodes, np.maximum
        ends: list[Any] = [None] * len(every)
        soonest = [0.0] * len(every)  # no place ends before
        resumed: dict[int, Floats] = {}
        for members, over in zip(self.graph.order, self.graph.used_last, strict=True):
            starts = []
            for number in members:
                ready, least, times = ORIGIN, 0.0, every[number]
                for before in nodes[number].before:
                    ready = ends[before] if ready is ORIGIN else maximum(ready, ends[before])
                    if soonest[before] > least:
                        least = soonest[before]
                launched = self._launched(number, ready, resumed)
                most = launched if isinstance(launched, float) else float(launched.max())
                if times.block is not None:
                    drawn = blocks[times.block]
                    end = ready + drawn.busy
                    least += drawn.least
                    if most + drawn.late > least:  # the GPU or the host is through with it, whichever is later
                        end = maximum(end, launched + drawn.critical)
                    if times.delayed:
                        end, least = end + times.seconds, least + float(np.min(times.seconds))
                    ends[number] = end
                else:
                    starts.append(maximum(ready, launched) if most > least else ready)
                soonest[number] = least
            if starts:
                if members[0] in self._meetings:
                    starts = self._meetings[members[0]].latest(starts)
                for number, start in zip(members, starts, strict=True):
                    lasting = every[number].seconds
                    ends[number] = start + (lasting if transfers is None else lasting * transfers(members[0], self.places.count))
            for done in over:
                ends[done] = None
        return self._through(ends)

    def computing(self, kernels: Factors) -> list[Floats]:
        """By cohort, the seconds in which the GPUs of each place compute, shape (places, samples). kernels: see `times`."""
        factors = kernels if isinstance(kernels, list) else self.places.slowest(kernels)
        result = []
        for first, end in pairwise(self.graph.first):
            counts = Counter(times.block for times in self.nodes[first:end] if times.block is not None)
            total = np.zeros((self.places.count, factors[0].shape[1]))
            for block, count in counts.items():
                total += count * block.with_factors(factors)[0]
            result.append(total)
        return result

    def _launched(self, number: int, ready: Floats, resumed: dict[int, Floats]) -> Column:
        """When a node is launched, whose waits are over at `ready`; a host that it holds up goes on."""
        node, times = self.graph.nodes[number], self.nodes[number]
        if node.op.held:
            resumed[number] = np.maximum(ready, (resumed[node.held_before] if node.held_before >= 0 else 0.0) + times.held)
        return times.launched + resumed[node.resumption] if node.resumption >= 0 else times.launched

    def _through(self, ends: list[Floats]) -> Replayed:
        """When each rank has ended all of its ops."""
        through = []
        for last in self.graph.last:
            most = ORIGIN
            for number in last:
                most = np.maximum(most, ends[number])
            through.append(most)
        return Replayed(self.places, through)
