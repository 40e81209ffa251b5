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
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from sim.pricing.block_costs import BlockCost
from sim.program import COMPUTE, Block, Cohort, Collective, Op, Program
from sim.timeline import Timeline
from topologies.reading import UserError
from topologies.topology import Ids

Floats = NDArray[np.float64]
Column = float | Floats  # a number, or shape (places, 1)
ORIGIN = np.zeros((1, 1))  # when the step begins
FACTOR = 1.125  # at which blocks are priced to know how their seconds grow with that of their kernels
Transfers = Callable[[int, int], Floats]  # (op of the step, ranks or groups) -> factors of shape (groups, samples)


class Replayed(NamedTuple):
    """steps: seconds of the step, shape (samples,); ends: when each rank is through, shape (ranks, samples)."""

    steps: Floats
    ends: Floats


class _Node(NamedTuple):
    """One op of one cohort in a program's graph."""

    cohort: int
    op: Op
    before: tuple[int, ...]  # nodes that it waits for
    resumption: int  # node with which the host that launches it went on, −1: it was never held up
    held_before: int  # of a node that holds up the host: the one that held it up before (−1: none)


class _Graph:
    """What the replays of all plays of a program share: nodes, which of them meet, and the order of their waits."""

    def __init__(self, program: Program) -> None:
        self.first = np.cumsum([0, *(len(cohort.ops) for cohort in program.cohorts)]).tolist()
        self.nodes = [node for number in range(len(program.cohorts)) for node in self._cohort(program.cohorts[number], number)]
        self.together = self._meet(program)
        self.order = self._sorted()
        self.last = self._last()
        self.used_last = self._used_last()

    def _cohort(self, cohort: Cohort, number: int) -> Iterator[_Node]:
        first = self.first
        last: dict[str, int] = {}
        resumption = -1
        for index, op in enumerate(cohort.ops, first[number]):
            before = [first[ref.cohort] + ref.op for ref in op.after]
            if op.stream in last:
                before.append(last[op.stream])
            last[op.stream] = index
            previous = resumption
            if op.held:
                resumption = index
            yield _Node(number, op, tuple(before), resumption, previous)

    def _meet(self, program: Program) -> dict[int, list[int]]:
        """By node that is a collective, the nodes whose ranks meet."""
        meetings: dict[Hashable, list[int]] = {}
        seen: Counter[Hashable] = Counter()
        for number, node in enumerate(self.nodes):
            work = node.op.work
            if not isinstance(work, Collective):
                continue
            key: Hashable = number
            if work.cohorts or work.axis in program.cohorts[node.cohort].at:
                seen[node.cohort, work.label, work.cohorts] += 1
                key = work.label, work.cohorts, seen[node.cohort, work.label, work.cohorts]
            meetings.setdefault(key, []).append(number)
        return {each: members for members in meetings.values() for each in members}

    def _sorted(self) -> list[list[int]]:
        """Nodes in the order of their waits; collectives that meet come together."""
        together = [self.together.get(number) or [number] for number in range(len(self.nodes))]
        leader = [members[0] for members in together]
        missing = [0] * len(self.nodes)
        followers: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            hosts = {node.held_before if node.op.held else node.resumption} - {-1, number}
            for before in hosts.union(node.before):
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

    def _last(self) -> list[list[int]]:
        """By cohort, the nodes that no other node of it waits for."""
        waited = {before for number, node in enumerate(self.nodes) for before in node.before if self._same(before, number)}
        every = zip(self.first, self.first[1:], strict=False)
        return [[number for number in range(first, end) if number not in waited] for first, end in every]

    def _same(self, number: int, other: int) -> bool:
        return self.nodes[number].cohort == self.nodes[other].cohort

    def _used_last(self) -> list[list[int]]:
        """By turn, the nodes that nobody waits for after it, without those of `last`."""
        kept = {number for numbers in self.last for number in numbers}
        turn = {before: at for at, members in enumerate(self.order) for member in members for before in self.nodes[member].before}
        result: list[list[int]] = [[] for _ in self.order]
        for number, at in turn.items():
            if number not in kept:
                result[at].append(number)
        return result


_GRAPHS: WeakKeyDictionary[Program, _Graph] = WeakKeyDictionary()


def _graph(program: Program) -> _Graph:
    known = _GRAPHS.get(program)
    if known is None:
        known = _GRAPHS[program] = _Graph(program)
    return known


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
        if self.program.allotments:
            raise UserError("a step of ranks with different numbers of microbatches is not replayed")
        self.places = _Places(timeline)
        self.graph = _graph(self.program)
        self.blocks: list[_BlockTimes] = []
        self._times = [times for number in range(len(self.program.cohorts)) for times in self._cohort(number)]
        self._meetings = self._meet()

    # -- the played step -------------------------------------------------------------------------------------------------

    def _cohort(self, number: int) -> Iterator[_Times]:
        timeline, column = self.timeline, self.places.column
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
        ranks, costs, column = [self.timeline.lanes[lane].rank for lane in lanes], self.timeline.op_costs, self.places.column
        slower, usual = ([costs.block(block, cohort, factor, rank=rank) for rank in ranks] for factor in (FACTOR, 1.0))
        busy, critical = (
            column([(getattr(more, name) - getattr(less, name)) / (FACTOR - 1) for more, less in zip(slower, usual, strict=True)])
            for name in ("busy", "critical")
        )
        return _BlockTimes(
            cohort, column([cost.busy for cost in played]), column([cost.critical for cost in played]), busy, critical
        )

    def _meet(self) -> dict[int, _Groups]:
        """By first node of those whose ranks meet, their groups; without meetings of every place with itself."""
        known: dict[Hashable, _Groups | None] = {}
        result = {}
        for members in self.graph.order:
            nodes = [self.graph.nodes[number] for number in members]
            works = [node.op.work for node in nodes]
            if isinstance(works[0], Collective):
                collectives = [(node.cohort, cast(Collective, work)) for node, work in zip(nodes, works, strict=True)]
                key = tuple((cohort, () if work.cohorts else work.axes) for cohort, work in collectives)
                if key not in known:
                    known[key] = _Groups.of([self.places.groups(work, cohort) for cohort, work in collectives])
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


class _Groups(NamedTuple):
    """The groups in which the places of one or several cohorts meet. order: places by group, where there are several."""

    group: Ids
    order: Ids | None
    first: Ids

    @classmethod
    def of(cls, ids: list[Ids]) -> _Groups | None:
        """None where every place is a group by itself."""
        group = np.unique(np.concatenate(ids), return_inverse=True)[1].ravel()
        count = int(group.max()) + 1
        if count == len(group):
            return None
        order = np.argsort(group, kind="stable") if count > 1 else None
        return cls(group, order, np.searchsorted(group[order], np.arange(count)) if order is not None else group[:1])

    def latest(self, arrived: list[Floats]) -> list[Floats]:
        """The time of each group's last, for all of its places."""
        if self.order is None:
            most = arrived[0].max(axis=0, keepdims=True)
            for other in arrived[1:]:
                most = np.maximum(most, other.max(axis=0, keepdims=True))
            return [most] * len(arrived)
        samples = max(each.shape[1] for each in arrived)
        places = len(self.group) // len(arrived)
        wide = np.concatenate([np.broadcast_to(each, (places, samples)) for each in arrived])
        latest = np.maximum.reduceat(wide[self.order], self.first, axis=0)
        return list(latest[self.group].reshape(len(arrived), places, samples))


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

    def column(self, values: list[float]) -> Column:
        """Values of a cohort's lanes: a number where all are equal, else of shape (places, 1)."""
        first = values[0]
        if len(values) == 1 or values.count(first) == len(values):
            return first
        return np.array(values)[self.lane].reshape(-1, 1)

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


def _axes_inside(program: Program) -> tuple[str, ...]:
    """Axes along which ranks meet inside blocks."""
    axes: dict[str, None] = {}
    for cohort in program.cohorts:
        for block in {op.work: None for op in cohort.ops if op.stream == COMPUTE and isinstance(op.work, Block)}:
            for _, item in block.items():
                if isinstance(item, Collective):
                    axes |= dict.fromkeys(axis for axis in item.axes if axis not in cohort.at)
    return tuple(axes)
