"""A played step whose ops take other times: worked out anew for every rank and sample, without playing it again.

The played step is a graph: an op starts when the one before on its stream and those that it waits for have ended, a collective
when its ranks have come, kernels when they are launched. Its times are max-plus sums. Here every op is one numpy operation over
ranks × samples, in the order of the waits, so that 16,384 ranks that all differ cost no more than the ops of one step.

What stays as it was played: which traffic shares links, and by how much collectives slow down kernels beside them. With nothing
perturbed the times are the player's to the bit; where perturbed ops would contend otherwise, the player decides. Ranks that meet
inside blocks (tensor parallelism) are as slow as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

from sim.op_index import op_index
from sim.replay.block_times import BlockTimes, DrawnBlocks, block_numbers
from sim.replay.level_times import ends_by_levels
from sim.replay.meetings import Meeting, meetings
from sim.replay.node_times import NodeTimes, PlayedCohort
from sim.replay.places import Column, Floats, Groups, Places
from sim.replay.program_graph import ProgramGraph, program_graph
from sim.replay.program_levels import ProgramLevels, program_levels
from sim.timeline import Timeline
from topologies.reading import UserError

ORIGIN = np.zeros((1, 1))  # when the step begins
Factors = Floats | list[Floats]
SIMPLE, LENGTHENED, LATE, MEETING, OTHER = range(5)  # how a node is worked out
Transfers = Callable[[int, int], Floats]  # (op of the step, ranks or groups) -> factors of shape (groups, samples)


class PlayedPeriod(NamedTuple):
    """The last period of a steady state worked out anew: by cohort, when its places came to its end, what they took for it, and
    how long their GPUs compute in it.
    """

    ends: list[Floats]
    seconds: list[Floats]
    computing: list[Column]

    def further(self, periods: int) -> Floats:
        """Seconds that so many more periods add, shape (samples,): in each the ranks of a pipeline take what they took for the
        last one, on their mean, and no less than any GPU computes. (One that is slower than others may not yet have held them up
        after few microbatches.)
        """
        each = sum(self.seconds[1:], self.seconds[0]) / len(self.seconds)
        for computing in self.computing:
            each = np.maximum(each, computing)
        ends = np.maximum.reduce(np.broadcast_arrays(*self.ends))
        added: Floats = (ends + periods * each).max(axis=0) - ends.max(axis=0)
        return added


class Replayed:
    """The step worked out anew. through: by cohort, when its places are, shape (places, samples); further: seconds that periods
    add which were not played.
    """

    def __init__(self, places: Places, through: list[Floats], further: Floats | float = 0.0) -> None:
        self.places, self._further = places, further
        samples = max(most.shape[1] for most in through)
        self.through = [np.broadcast_to(most, (places.count, samples)) for most in through]

    @cached_property
    def steps(self) -> Floats:
        """Seconds of the step, shape (samples,)."""
        return self.places.latest(self.through) + self._further

    @cached_property
    def ends(self) -> Floats:
        """When each rank is through, shape (ranks, samples)."""
        return self.places.by_rank(self.through)


def _most(seconds: Column) -> float:
    """On the place where it is most."""
    return seconds if isinstance(seconds, float) else float(seconds.max())


def replay_of(timeline: Timeline) -> StepReplay:
    """The replay of a timeline, which is kept with it. Raises UserError as `StepReplay` does."""
    if timeline.replay is None:
        timeline.replay = StepReplay(timeline)
    return cast(StepReplay, timeline.replay)


class StepReplay:
    """The graph of a played step. nodes: their times, by default those of the step. Raises UserError for a steady state, of which
    only a part is the step.
    """

    def __init__(self, timeline: Timeline, nodes: Callable[[PlayedCohort], NodeTimes] = NodeTimes.played) -> None:
        self.program = timeline.program  # not the timeline, which may keep its replay
        if self.program.cohorts[0].steady:
            raise UserError("a steady state of an asynchronous schedule is not replayed: it is a part of what was played")
        self.places = Places(self.program, timeline.op_costs.lane)
        every = [nodes(PlayedCohort(timeline, self.places, number)) for number in range(len(self.program.cohorts))]
        self.nodes = NodeTimes.joined(every)
        self._block, self._first_block = block_numbers(self.program)
        self._blocks = BlockTimes.joined(self.nodes.blocks)
        self._periods = timeline.periods
        self.first: list[int] = np.cumsum([0, *(cohort.count for cohort in self.program.cohorts)]).tolist()
        self._marks = [self._mark(timeline, number) for number in range(len(every))] if timeline.periods else []

    def _mark(self, timeline: Timeline, number: int) -> tuple[int, int]:
        """The nodes of the last compute op of a cohort in the period before its last one, and in its last one."""
        lane = next(lane for lane, each in enumerate(timeline.lanes) if each.cohort == number)
        numbers = timeline.offset[lane] + op_index(self.program.cohorts[number]).compute
        last = numbers[np.flatnonzero(timeline.in_period[numbers])[-1]]
        more = int(timeline.in_period[timeline.offset[lane] :][: self.program.cohorts[number].count].sum())
        node = self.first[number] + int(last) - timeline.offset[lane]
        return node - more, node

    @cached_property
    def graph(self) -> ProgramGraph:
        """The graph of the step, op by op."""
        return program_graph(self.program)

    @cached_property
    def _meetings(self) -> dict[int, Meeting]:
        return meetings(self.program).across

    @cached_property
    def _alone(self) -> dict[int, Groups]:
        return meetings(self.program).alone

    # -- times -----------------------------------------------------------------------------------------------------------

    def times(self, kernels: Factors | None = None, transfers: Transfers | None = None) -> Replayed:
        """Step and ends. kernels: factors by which the kernels of each rank take longer, shape (ranks, samples), or by cohort
        those of each place; transfers: the factors of each collective and send.
        """
        if self.levels is not None and transfers is None:
            drawn = self._drawn(kernels)
            latest, at_marks = ends_by_levels(self.levels, self.nodes, drawn, list(chain.from_iterable(self._marks)))
            return Replayed(self.places, latest, self._further(at_marks, drawn))
        graph, nodes, drawn, maximum, add = self.graph, self.nodes, self._drawn(kernels), np.maximum, np.add
        lasting = [
            seconds if block < 0 else drawn.busy[block] for block, seconds in zip(self._block, nodes.transfers, strict=True)
        ]
        late, added = self._late(drawn), nodes.added
        marks: dict[int, Any] = dict.fromkeys(chain.from_iterable(self._marks))  # their ends
        ways = self._ways(late, marks, transfers is not None)
        ends: list[Any] = [ORIGIN] * graph.places
        rows = self._rows(kernels, transfers)
        resumed, come = dict[int, Floats](), dict[int, Floats]()
        for number, place, first, others in graph.turns:
            ready, row = ends[first], rows[place]
            for awaited in others:
                ready = maximum(ready, ends[awaited], out=row)
            way = ways[number]
            if way == SIMPLE:
                ends[place] = add(ready, lasting[number], out=row)
                continue
            if way == LENGTHENED:
                ends[place] = add(add(ready, lasting[number], out=row), added[number], out=row)
                continue
            if way == LATE:  # a transfer starts when it is launched, or the host is through with a block later than the GPU
                launch, block = nodes.launched[number], self._block[number]
                if block < 0:
                    ends[place] = add(maximum(ready, launch, out=row), lasting[number], out=row)
                else:
                    ends[place] = maximum(add(ready, lasting[number], out=row), launch + drawn.critical(block), out=row)
                continue
            if way == MEETING:
                ends[place] = maximum.reduce(ready, axis=0, keepdims=True) + lasting[number]
                continue
            launched, block = self._launched(number, ready, resumed) if number in late else None, self._block[number]
            if block < 0:
                begin = ready if launched is None else maximum(ready, launched)
                ended = list(self._start(number, begin, come, transfers))
            else:
                end = ready + lasting[number]
                if launched is not None:  # the GPU or the host is through with it, whichever is later
                    end = maximum(end, launched + drawn.critical(block))
                ended = [(number, end + added[number] if number in added else end)]
            for each, end in ended:
                ends[graph.place[each]] = end
                if each in marks:
                    marks[each] = end
        through = [[ends[graph.place[number]] for number in last] for last in graph.last]
        return Replayed(self.places, [reduce(maximum, each, ORIGIN) for each in through], self._further(marks, drawn))

    @cached_property
    def levels(self) -> ProgramLevels | None:
        """All ranks at once; None where a cohort has several places, something lengthens blocks, or passes do not repeat."""
        plain = self.places.count == 1 and not self.nodes.added and not self.nodes.held
        return program_levels(self.program) if plain else None

    def _ways(self, late: set[int], marks: Iterable[int], drawn: bool) -> list[int]:
        """How each node is worked out. late: nodes whose launch matters; marks: those that are looked at by themselves; drawn:
        whether transfers take other times, too.
        """
        ways = [SIMPLE] * self.graph.count
        for number in late:
            ways[number] = LATE
        for number in self.nodes.added:
            ways[number] = OTHER if number in late else LENGTHENED
        for number, groups in self._alone.items():
            ways[number] = MEETING if groups.order is None and number not in late else OTHER
        for number in self._meetings:
            ways[number] = OTHER
        for number, block in enumerate(self._block) if drawn else ():
            if block < 0:
                ways[number] = OTHER
        for number in chain(marks, self.graph.resumed):
            ways[number] = OTHER
        return ways

    def _rows(self, kernels: Factors | None, transfers: Transfers | None) -> Sequence[Floats | None]:
        """Memory for the end of a node in each place; None of those that take new memory, whose shape is not known."""
        if kernels is None or transfers is not None:
            return [None] * self.graph.places
        return list(np.empty((self.graph.places, self.places.count, kernels[0].shape[-1])))

    def _late(self, drawn: DrawnBlocks) -> set[int]:
        """Nodes that may start, or end, when their launch lets them."""
        graph = self.graph
        least = [0.0 if block < 0 else drawn.least[block] for block in self._block]
        latest = [
            launched if block < 0 else launched + drawn.late[block]
            for block, launched in zip(self._block, self._latest_launch, strict=True)
        ]
        soonest, late = [0.0] * graph.places, set(graph.resumed)  # no place ends before
        for number, place, first, others in graph.turns:
            end = soonest[first]
            for awaited in others:
                if soonest[awaited] > end:
                    end = soonest[awaited]
            end += least[number]
            if latest[number] > end:
                late.add(number)
            soonest[place] = end
        return late

    @cached_property
    def _latest_launch(self) -> list[float]:
        """By node, when it is launched on the place where that is latest."""
        return list(map(_most, self.nodes.launched))

    def _further(self, ends: dict[int, Floats], drawn: DrawnBlocks) -> Floats | float:
        """What periods add that were not played. ends: of the nodes that mark periods."""
        if not self._marks:
            return 0.0
        period = PlayedPeriod(
            [ends[last] for _, last in self._marks],
            [ends[last] - ends[before] for before, last in self._marks],
            drawn.computing(),
        )
        return period.further(self._periods)

    def _start(
        self, node: int, ready: Floats, come: dict[int, Floats], transfers: Transfers | None
    ) -> Iterator[tuple[int, Floats]]:
        """Transfers that start when `node`, one of them, is ready: those that meet when the last is. come: when the nodes that
        came before were ready.
        """
        members, groups = self._meetings.get(node) or Meeting([node], self._alone.get(node))
        if node != members[-1]:
            come[node] = ready.copy()  # its place may be another node's when the last one comes
            return
        come[node] = ready
        starts = [come.pop(member) for member in members]
        for member, start in zip(members, groups.latest(starts) if groups else starts, strict=True):
            yield member, start + self._lasting(member, members[0], transfers)

    def _lasting(self, node: int, first: int, transfers: Transfers | None) -> Column:
        """Seconds of a transfer. first: of those that meet."""
        usual = self.nodes.transfers[node]
        return usual if transfers is None else usual * transfers(first, self.places.count)

    def _drawn(self, kernels: Factors | None) -> DrawnBlocks:
        """Blocks whose kernels take other times: see `times`."""
        factors = self.places.slowest(kernels) if isinstance(kernels, np.ndarray) else kernels
        more = [0.0] * len(self.nodes.blocks) if factors is None else [each - 1 for each in factors]
        return DrawnBlocks(self._blocks, self._first_block, more)

    def _launched(self, number: int, ready: Floats, resumed: dict[int, Floats]) -> Column:
        """When a node is launched, whose waits are over at `ready`; a host that it holds up goes on."""
        graph = self.graph
        if not self.nodes.held:
            return self.nodes.launched[number]
        if number in graph.held_before:
            before = graph.held_before[number]
            resumed[number] = np.maximum(ready, (resumed[before] if before >= 0 else 0.0) + self.nodes.held[number])
        resumption = graph.resumption[number]
        return self.nodes.launched[number] + resumed[resumption] if resumption >= 0 else self.nodes.launched[number]
