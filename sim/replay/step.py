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
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sim.pricing.block_costs import BlockCost
from sim.program import COMPUTE, Block, Collective, Op, Program
from sim.timeline import Timeline
from topologies.reading import UserError
from topologies.topology import Ids

Floats = NDArray[np.float64]
FACTOR = 1.125  # at which blocks are priced to know how their seconds grow with that of their kernels
Transfers = Callable[[int, int], Floats]  # (op of the step, ranks or groups) -> factors of shape (groups, samples)


class Replayed(NamedTuple):
    """steps: seconds of the step, shape (samples,); ends: when each rank is through, shape (ranks, samples)."""

    steps: Floats
    ends: Floats


@dataclass(slots=True)
class _Node:
    """One op of one cohort. Arrays have an entry per place, or one for all places."""

    cohort: int
    op: Op
    before: list[int]  # nodes that it waits for
    launched: Floats  # seconds, or since the host went on
    resumption: int  # node with which the host went on, −1: it was never held up
    busy: Floats  # seconds of a block, or of a transfer
    critical: Floats
    more: Floats  # seconds that are added to it whatever its kernels take
    busy_slope: Floats  # seconds by which it grows when its kernels take twice as long
    critical_slope: Floats
    holds: tuple[int, float] | None = None  # the node that held up the host before (−1: none), and its seconds in between


class StepReplay:
    """The graph of a played step. Raises UserError for a steady state, of which only a part is the step."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.program = timeline, timeline.program
        if self.program.cohorts[0].steady:
            raise UserError("a steady state of an asynchronous schedule is not replayed: it is a part of what was played")
        if len(timeline.op_costs.prices.members) > 1 or self.program.allotments:
            raise UserError(
                "a step on GPUs of several kinds, or of ranks with different numbers of microbatches, is not replayed"
            )
        self.places = _Places(timeline)
        self._first = np.cumsum([0, *(len(cohort.ops) for cohort in self.program.cohorts)]).tolist()
        self.nodes = [node for number in range(len(self.program.cohorts)) for node in self._cohort(number)]
        self._meetings = self._meet()
        self._order = self._sorted()

    # -- the graph -------------------------------------------------------------------------------------------------------

    def _cohort(self, number: int) -> Iterator[_Node]:
        timeline, costs = self.timeline, self.timeline.op_costs
        first, ops = self._first[number], self.program.cohorts[number].ops
        lanes = [lane for lane, each in enumerate(timeline.lanes) if each.cohort == number]
        bases = np.array([timeline.offset[lane] for lane in lanes])[self.places.lane]
        start, end, launched = timeline.start, timeline.end, timeline.launched
        last: dict[str, int] = {}
        slopes: dict[tuple[Block, int], tuple[Floats, Floats]] = {}
        resumed, resumption = np.zeros(len(bases)), -1
        for index, op in enumerate(ops):
            numbers = (bases + index).tolist()
            before = [self._first[ref.cohort] + ref.op for ref in op.after]
            if op.stream in last:
                before.append(last[op.stream])
            last[op.stream] = first + index
            holds = None
            if op.held:
                own = [timeline.resumptions[each] for each in numbers]
                holds = resumption, own[0].busy
                resumption, resumed = first + index, np.array([each.time for each in own])
            ahead = _column([launched[each] for each in numbers]) - _column(resumed)
            cost = timeline.cost[numbers[0]]
            if isinstance(cost, BlockCost):
                block = cast(Block, op.work)
                each = [cast(BlockCost, timeline.cost[each]) for each in numbers]
                if (block, number) not in slopes:
                    slower, usual = costs.block(block, number, FACTOR), costs.block(block, number)
                    slope = slower.busy - usual.busy, slower.critical - usual.critical
                    slopes[block, number] = np.array(slope[0] / (FACTOR - 1)), np.array(slope[1] / (FACTOR - 1))
                more = _column([timeline.stretch[each] + sum(timeline.owed.get(each, {}).values()) for each in numbers])
                seconds = _column([cost.busy for cost in each]), _column([cost.critical for cost in each])
                yield _Node(number, op, before, ahead, resumption, *seconds, more, *slopes[block, number], holds)
            else:
                lasting = _column([end[each] - start[each] for each in numbers])
                zero = np.zeros(())
                yield _Node(number, op, before, ahead, resumption, lasting, zero, zero, zero, zero, holds)

    def _meet(self) -> dict[int, tuple[list[int], Ids]]:
        """By node that is a collective: the nodes whose ranks meet, and the group of each of their places, node by node."""
        meetings: dict[Hashable, list[int]] = {}
        seen: Counter[Hashable] = Counter()
        for number, node in enumerate(self.nodes):
            work = node.op.work
            if not isinstance(work, Collective):
                continue
            key: Hashable = number
            if work.cohorts or work.axis in self.program.cohorts[node.cohort].at:
                seen[node.cohort, work.label, work.cohorts] += 1
                key = work.label, work.cohorts, seen[node.cohort, work.label, work.cohorts]
            meetings.setdefault(key, []).append(number)
        result: dict[int, tuple[list[int], Ids]] = {}
        for members in meetings.values():
            groups = [self.places.groups(cast(Collective, self.nodes[each].op.work), self.nodes[each].cohort) for each in members]
            ids = np.unique(np.concatenate(groups), return_inverse=True)[1].ravel()
            result |= dict.fromkeys(members, (members, ids))
        return result

    def _sorted(self) -> list[list[int]]:
        """Nodes in the order of their waits; collectives that meet come together."""
        together = [self._meetings[number][0] if number in self._meetings else [number] for number in range(len(self.nodes))]
        leader = [members[0] for members in together]
        missing: Counter[int] = Counter()
        followers: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            held = [node.holds[0]] if node.holds and node.holds[0] >= 0 else []
            for before in {*node.before, *held, *([node.resumption] if node.resumption not in (-1, number) else [])}:
                followers[before].append(leader[number])
                missing[leader[number]] += 1
        ready = [number for number in range(len(self.nodes)) if leader[number] == number and not missing[number]]
        order = []
        for number in ready:
            order.append(together[number])
            for member in together[number]:
                for follower in followers[member]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        ready.append(follower)
        return order

    # -- times -----------------------------------------------------------------------------------------------------------

    def times(self, kernels: Floats | None = None, transfers: Transfers | None = None) -> Replayed:
        """Step and ends. kernels: factors by which the kernels of each rank take longer, shape (ranks, samples); transfers: the
        factors of each collective and send.
        """
        slower = self.places.slowest(kernels)  # by cohort
        ends: dict[int, Floats] = {}
        resumed: dict[int, Floats] = {}
        for members in self._order:
            ready = [self._ready(self.nodes[number], number, ends, resumed) for number in members]
            node = self.nodes[members[0]]
            if isinstance(node.op.work, Block):
                factor = slower[node.cohort] if slower is not None else None
                ends[members[0]] = _computed(node, ready[0], self._launched(node, resumed), factor)
                continue
            arrived = [
                np.maximum(when, self._launched(self.nodes[number], resumed)) for number, when in zip(members, ready, strict=True)
            ]
            if isinstance(node.op.work, Collective):
                arrived = self._met(members, arrived)
            for number, start in zip(members, arrived, strict=True):
                lasting = self.nodes[number].busy
                if transfers is not None:
                    lasting = lasting * transfers(members[0], self.places.count)
                ends[number] = start + lasting
        shape = np.broadcast_shapes(*(end.shape for end in ends.values()))
        through = []
        for cohort in range(len(self.program.cohorts)):
            own = [ends[number] for number in range(self._first[cohort], self._first[cohort + 1])]
            most = np.broadcast_to(np.maximum.reduce(np.broadcast_arrays(*own)), (self.places.count, shape[-1]))
            through.append(self.places.of_ranks(most))
        every = self.places.by_rank(through)
        return Replayed(every.max(axis=0), every)

    def _ready(self, node: _Node, number: int, ends: dict[int, Floats], resumed: dict[int, Floats]) -> Floats:
        """When a node may start; a host that it holds up goes on."""
        ready = np.zeros((1, 1))
        for before in node.before:
            ready = np.maximum(ready, ends[before])
        if node.holds is not None:
            previous, busy = node.holds
            resumed[number] = np.maximum(ready, (resumed[previous] if previous >= 0 else 0.0) + busy)
        return ready

    @staticmethod
    def _launched(node: _Node, resumed: dict[int, Floats]) -> Floats:
        return node.launched + resumed[node.resumption] if node.resumption >= 0 else node.launched

    def _met(self, members: list[int], arrived: list[Floats]) -> list[Floats]:
        """When collectives start whose ranks have arrived."""
        groups = self._meetings[members[0]][1]
        samples = max(each.shape[1] for each in arrived)
        if all(each.shape[0] == 1 for each in arrived) and len(members) == 1:
            return arrived
        wide = np.concatenate([np.broadcast_to(each, (self.places.count, samples)) for each in arrived])
        latest = np.full((int(groups.max()) + 1, samples), -np.inf)
        order = np.argsort(groups, kind="stable")
        latest = np.maximum.reduceat(wide[order], np.searchsorted(groups[order], np.arange(len(latest))), axis=0)
        return list(latest[groups].reshape(len(members), self.places.count, samples))


class _Places:
    """Ranks of a cohort that meet inside blocks are one place. lane: of each place."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.grid = timeline, timeline.program.grid
        self.ranks = [self.grid.groups((), cohort.at).ravel() for cohort in timeline.program.cohorts]
        inside = self.grid.group_of(_axes_inside(timeline.program))
        _, self._example, self._place = np.unique(inside[self.ranks[0]], return_index=True, return_inverse=True)
        self.count = len(self._example)
        lane = timeline.op_costs.lane
        self.lane = np.zeros(self.count, np.int64) if lane is None else lane[self._example]

    def groups(self, work: Collective, cohort: int) -> Ids:
        """The group of each place of a collective that is an op."""
        return self.timeline.op_costs.groups(work, cohort)[self._example]

    def slowest(self, kernels: Floats | None) -> list[Floats] | None:
        """By cohort, the largest factor of the ranks of each place, shape (places, samples)."""
        if kernels is None:
            return None
        order = np.argsort(self._place, kind="stable")
        first = np.searchsorted(self._place[order], np.arange(self.count))
        return [np.maximum.reduceat(kernels[ranks[order]], first, axis=0) for ranks in self.ranks]

    def of_ranks(self, values: Floats) -> Floats:
        """Values of places as those of a cohort's ranks."""
        return values[self._place]

    def by_rank(self, values: list[Floats]) -> Floats:
        """Values of each cohort's ranks in the order of ranks."""
        result = np.empty((self.grid.world, values[0].shape[1]))
        for ranks, own in zip(self.ranks, values, strict=True):
            result[ranks] = own
        return result


def _computed(node: _Node, start: Floats, launched: Floats, factor: Floats | None) -> Floats:
    """When a block ends."""
    busy, critical = node.busy, node.critical
    if factor is not None:
        busy, critical = busy + (factor - 1) * node.busy_slope, critical + (factor - 1) * node.critical_slope
    return start + np.maximum(busy, launched + critical - start) + node.more


def _column(values: list[float] | Floats) -> Floats:
    """Shape (places, 1), or (1, 1) where all are equal."""
    array = np.asarray(values, np.float64).reshape(-1, 1)
    return array[:1] if (array == array[0]).all() else array


def _axes_inside(program: Program) -> tuple[str, ...]:
    """Axes along which ranks meet inside blocks."""
    axes: dict[str, None] = {}
    for cohort in program.cohorts:
        for block in {op.work: None for op in cohort.ops if op.stream == COMPUTE and isinstance(op.work, Block)}:
            for _, item in block.items():
                if isinstance(item, Collective):
                    axes |= dict.fromkeys(axis for axis in item.axes if axis not in cohort.at)
    return tuple(axes)
