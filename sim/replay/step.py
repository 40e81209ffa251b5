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
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
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
Transfers = Callable[[int, int], Floats]  # (op of the step, ranks or groups) -> factors of shape (groups, samples)


class Replayed(NamedTuple):
    """steps: seconds of the step, shape (samples,); ends: when each rank is through, shape (ranks, samples)."""

    steps: Floats
    ends: Floats


class _Times(NamedTuple):
    """Times of one node in the played step, in seconds: a number where all places have the same, or one per place."""

    launched: Column  # since the step began, or since the host went on
    block: _BlockTimes | None  # None: a transfer
    seconds: Column  # of a transfer; of a block, what is added to it whatever its kernels take
    delayed: bool  # whether anything is added
    held: float = 0.0  # of a node that holds up the host: the host's work since it went on before


@dataclass(eq=False, slots=True)
class _BlockTimes:
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


class StepReplay:
    """The graph of a played step. Raises UserError for a steady state, of which only a part is the step."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.program = timeline, timeline.program
        if self.program.cohorts[0].steady:
            raise UserError("a steady state of an asynchronous schedule is not replayed: it is a part of what was played")
        self.places = Places(timeline)
        self.graph = program_graph(self.program)
        self.blocks: list[_BlockTimes] = []
        self._times = [times for number in range(len(self.program.cohorts)) for times in self._cohort(number)]
        self._meetings = self._meet()

    # -- the played step -------------------------------------------------------------------------------------------------

    def _cohort(self, number: int) -> Iterator[_Times]:
        timeline, column = self.timeline, partial(self.places.column, number)
        lanes = [lane for lane, each in enumerate(timeline.lanes) if each.cohort == number]
        start, end, launched, costs = timeline.start, timeline.end, timeline.launched, timeline.cost
        stretch, owed = timeline.stretch, timeline.owed
        blocks: dict[Block, _BlockTimes] = {}
        resumed: Column = 0.0
        for index, op in enumerate(self.program.cohorts[number].ops):
            numbers = [timeline.offset[lane] + index for lane in lanes]
            at, held = numbers[0], 0.0
            if op.held:
                held = timeline.resumptions[at].busy
                resumed = column([timeline.resumptions[each].time for each in numbers])
            ahead = column([launched[each] for each in numbers]) - resumed
            work = op.work
            if isinstance(work, Block):
                if work not in blocks:
                    blocks[work] = self._block(number, work, lanes, [cast(BlockCost, costs[each]) for each in numbers])
                    self.blocks.append(blocks[work])
                more = [stretch[each] + sum(owed[each].values()) if each in owed else stretch[each] for each in numbers]
                yield _Times(ahead, blocks[work], column(more), any(more), held)
            else:
                yield _Times(ahead, None, column([end[each] - start[each] for each in numbers]), False, held)

    def _block(self, cohort: int, block: Block, lanes: list[int], played: list[BlockCost]) -> _BlockTimes:
        costs, column = self.timeline.op_costs, partial(self.places.column, cohort)
        ranks = [self.timeline.lanes[lane].rank for lane in lanes]
        slower, usual = ([costs.block(block, cohort, factor, rank=rank) for rank in ranks] for factor in (FACTOR, 1.0))
        busy, critical = (
            column([(getattr(more, name) - getattr(less, name)) / (FACTOR - 1) for more, less in zip(slower, usual, strict=True)])
            for name in ("busy", "critical")
        )
        return _BlockTimes(
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

    def times(self, kernels: Floats | None = None, transfers: Transfers | None = None) -> Replayed:
        """Step and ends. kernels: factors by which the kernels of each rank take longer, shape (ranks, samples); transfers: the
        factors of each collective and send.
        """
        factors = self.places.slowest(kernels)
        blocks = {block: block.with_factors(factors) for block in self.blocks}
        every, maximum = self._times, np.maximum
        ends: list[Any] = [None] * len(every)
        resumed: dict[int, Floats] = {}
        for members, over in zip(self.graph.order, self.graph.used_last, strict=True):
            number = members[0]
            arrived = [self._arrived(each, ends, resumed) for each in members]
            block = every[number].block
            if block is not None:
                (ready, launched), (busy, critical) = arrived[0], blocks[block]
                end = maximum(ready + busy, launched + critical)  # the GPU or the host is through with it, whichever is later
                ends[number] = end + every[number].seconds if every[number].delayed else end
            else:
                starts = [maximum(ready, launched) for ready, launched in arrived]
                if number in self._meetings:
                    starts = self._meetings[number].latest(starts)
                for each, start in zip(members, starts, strict=True):
                    lasting = every[each].seconds
                    ends[each] = start + (lasting if transfers is None else lasting * transfers(number, self.places.count))
            for done in over:
                ends[done] = None
        return self._through(ends)

    def computing(self, kernels: Floats) -> list[Floats]:
        """By cohort, the seconds in which the GPUs of each place compute, shape (places, samples). kernels: see `times`."""
        factors = self.places.slowest(kernels)
        result = []
        for first, end in pairwise(self.graph.first):
            counts = Counter(times.block for times in self._times[first:end] if times.block is not None)
            total = np.zeros((self.places.count, kernels.shape[1]))
            for block, count in counts.items():
                total += count * block.with_factors(factors)[0]
            result.append(total)
        return result

    def _arrived(self, number: int, ends: list[Any], resumed: dict[int, Floats]) -> tuple[Floats, Column]:
        """When what a node waits for has ended, and when it is launched; a host that it holds up goes on."""
        node, times = self.graph.nodes[number], self._times[number]
        ready = ORIGIN
        for before in node.before:
            ready = ends[before] if ready is ORIGIN else np.maximum(ready, ends[before])
        if node.op.held:
            resumed[number] = np.maximum(ready, (resumed[node.held_before] if node.held_before >= 0 else 0.0) + times.held)
        return ready, times.launched + resumed[node.resumption] if node.resumption >= 0 else times.launched

    def _through(self, ends: list[Floats]) -> Replayed:
        """When each rank has ended all of its ops."""
        through = []
        for last in self.graph.last:
            most = ORIGIN
            for number in last:
                most = np.maximum(most, ends[number])
            through.append(most)
        samples = max(most.shape[1] for most in through)
        wide = [np.broadcast_to(most, (self.places.count, samples)) for most in through]
        every = self.places.by_rank([self.places.of_ranks(most) for most in wide])
        return Replayed(every.max(axis=0), every)
