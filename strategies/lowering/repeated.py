"""The program of many microbatches made of that of a few, whose passes repeat themselves.

Of the passes of one kind through one chunk of a rank the first and the last do something of their own (they take gradients,
reduce them, end the step); those between them do the same, each for its microbatch. So a step of a few microbatches has all there
is, and the schedule's order says where it comes. It is looked at whether that holds: passes in the middle must be the same ops,
which wait for ops of their own pass or of their own microbatch; where one waits for something else, every pass is lowered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.op_columns import OPS, OpColumns, RepeatedCohort, too_many
from sim.program import Op, Program
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.resolved import Resolved
from strategies.schedules import actions, order_columns, schedules
from strategies.schedules.order import KINDS, Action, OrderColumns

MOST = 1_200_000  # ops of all stages: some five seconds and a gigabyte
FEW = 4  # microbatches of which the program is lowered: two in the middle are compared
FIRST, MIDDLE, LAST = range(3)  # which of its kind and chunk a pass is
INSIDE, ALONG, AT_END = range(3)  # what an op waits for: its own pass, its own microbatch, a first or last pass

Integers = NDArray[np.int64]
Sort = tuple[str, int]  # of passes: kind and chunk


def lowered(model: Model, plan: Resolved, microbatches: int | None = None) -> Program:
    """What `lower` gives, made of repeated passes where they are."""
    schedule, count = schedules[plan.schedule], microbatches or plan.microbatches
    few = FEW if plan.pp > FEW else plan.pp * -(-FEW // plan.pp)
    plain = not (schedule.versions or schedule.microbatches or schedule.copies > 1 or plan.local_steps > 1 or plan.dealt)
    if plain and count > 2 * few:
        ranks = range(plan.pp)
        short = [actions(plan.schedule, rank, plan.pp, few, plan.chunks) for rank in ranks]
        long = [order_columns(plan.schedule, rank, plan.pp, count, plan.chunks) for rank in ranks]
        program = _repeated(lower(model, plan, few), short, long)
        if program is not None:
            return program
    return lower(model, plan, microbatches)


class _Wait(NamedTuple):
    """What an op of a pass waits for: op number `op` of a pass of that sort on that rank, counted from its first; how: INSIDE,
    ALONG or AT_END; waiting: the op that waits, which: FIRST, MIDDLE or LAST.
    """

    waiting: int
    how: int
    rank: int
    sort: Sort
    which: int
    op: int


class _Pass(NamedTuple):
    """Kinds of the ops of a pass, and what these wait for. own: whether an op is of a microbatch."""

    kinds: tuple[int, ...]
    own: tuple[bool, ...]
    waits: tuple[_Wait, ...]


class _Order:
    """The passes of a rank in order: by pass its sort and microbatch, and which of its sort it is."""

    def __init__(self, order: Sequence[Action]) -> None:
        self.sorts = [(kind, chunk) for kind, _, chunk, _ in order]
        self.microbatches = [microbatch for _, microbatch, _, _ in order]
        count, met = Counter(self.sorts), Counter[Sort]()
        self.which = []
        for sort in self.sorts:
            met[sort] += 1
            self.which.append(FIRST if met[sort] == 1 else LAST if met[sort] == count[sort] else MIDDLE)
        self.least = min(count.values())


class _Rank:
    """The passes of a rank of a step of few microbatches, by sort and by which of their sort they are."""

    def __init__(self) -> None:
        self.kinds: list[Op] = []
        self._known: dict[Hashable, int] = {}
        self.passes: dict[tuple[Sort, int], _Pass] = {}

    def kind(self, op: Op) -> int:
        """The number of what an op does."""
        key = op.work, op.stream, op.allocate, op.free, op.chunk, op.held, op.microbatch < 0
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.kinds)
            self.kinds.append(op)
        return number


def _repeated(short: Program, few: list[tuple[Action, ...]], many: list[OrderColumns]) -> Program | None:
    """The program of the passes `many` of each rank; None where those `few` of `short` do not say what they are."""
    if any(action.beside for order in few for action in order):
        return None
    ranks = _ranks(short, few)
    if ranks is None:
        return None
    longer = [_Longer(rank, order) for rank, order in zip(ranks, many, strict=True)]
    if sum(int(each.sizes.sum()) for each in longer) > MOST:
        raise too_many(MOST)
    cohorts = list(short.cohorts)
    for number, (cohort, passes) in enumerate(zip(short.cohorts, longer, strict=True)):
        columns = passes.columns(longer)
        if columns is None or not passes.ends_like(few[number][-1]):  # the last pass has the end of the step
            return None
        cohorts[number] = RepeatedCohort(cohort, columns, passes.begin.tolist(), OPS / len(cohorts))
    return replace(short, cohorts=cohorts)


def _ranks(program: Program, orders: list[tuple[Action, ...]]) -> list[_Rank] | None:
    """The passes of each rank; None where those in the middle differ, or wait for passes of other microbatches."""
    every = list(map(_Order, orders))
    result = []
    for number, (cohort, order) in enumerate(zip(program.cohorts, every, strict=True)):
        rank = _Rank()
        bounds = [*cohort.passes, len(cohort.ops)]
        if order.least < FEW or len(cohort.passes) != len(order.sorts) or bounds[0]:
            return None
        for place, edges in enumerate(pairwise(bounds)):
            waits = _waits(program, every, number, place, edges)
            if waits is None:
                return None
            ops = cohort.ops[slice(*edges)]
            mine = _Pass(tuple(map(rank.kind, ops)), tuple(op.microbatch >= 0 for op in ops), tuple(waits))
            if rank.passes.setdefault((order.sorts[place], order.which[place]), mine) != mine:
                return None
        result.append(rank)
    return result


def _waits(program: Program, orders: list[_Order], number: int, place: int, edges: tuple[int, int]) -> list[_Wait] | None:
    """What the ops of pass number `place` of a rank wait for; None: for something that other microbatches need not have."""
    (begin, end), result, mine = edges, [], orders[number]
    for at, op in enumerate(program.cohorts[number].ops[begin:end]):
        for rank, awaited in op.after:
            if rank == number and begin <= awaited < end:
                result.append(_Wait(at, INSIDE, rank, mine.sorts[place], 0, awaited - begin))
                continue
            other, order = bisect_right(program.cohorts[rank].passes, awaited) - 1, orders[rank]
            sort, which, offset = order.sorts[other], order.which[other], awaited - program.cohorts[rank].passes[other]
            if op.microbatch >= 0 and order.microbatches[other] == mine.microbatches[place]:
                result.append(_Wait(at, ALONG, rank, sort, which, offset))
            elif op.microbatch < 0 and MIDDLE not in (which, mine.which[place]):
                result.append(_Wait(at, AT_END, rank, sort, which, offset))
            else:
                return None
    return result


class _Longer:
    """A rank's passes in a step of many microbatches. begin: by pass, its first op; places: by sort, the pass of each
    microbatch; which: by sort and microbatch.
    """

    def __init__(self, rank: _Rank, order: OrderColumns) -> None:
        self.rank, self.order, self.microbatch = rank, order, order.microbatch
        self._sorts = {sort: number for number, sort in enumerate(dict.fromkeys(sort for sort, _ in rank.passes))}
        known = np.full((len(KINDS), int(order.chunk.max()) + 1), -1)
        for (kind, chunk), number in self._sorts.items():
            known[KINDS[kind], chunk] = number
        sorts = known[order.kind, order.chunk]
        self.which = np.full(len(sorts), MIDDLE)
        self.place = np.zeros((len(self._sorts), int(self.microbatch.max()) + 1), np.int64)
        for number in range(len(self._sorts)):
            mine = np.flatnonzero(sorts == number)
            self.which[mine[0]], self.which[mine[-1]] = FIRST, LAST
            self.place[number, self.microbatch[mine]] = mine
        self.every = list(rank.passes.values())
        numbers = {(self._sorts[sort], which): number for number, (sort, which) in enumerate(rank.passes)}
        table = np.array([[numbers[sort, which] for which in (FIRST, MIDDLE, LAST)] for sort in range(len(self._sorts))])
        self.pass_of = table[sorts, self.which]
        sizes = np.array([len(each.kinds) for each in self.every])[self.pass_of]
        self.begin = np.cumsum(sizes) - sizes
        self.sizes = sizes

    def ends_like(self, action: Action) -> bool:
        """Whether the last pass is of the sort of `action`."""
        return (int(self.order.kind[-1]), int(self.order.chunk[-1])) == (KINDS[action.kind], action.chunk)

    def awaited(self, wait: _Wait, microbatches: Integers) -> Integers | None:
        """The ops of this rank for which passes of `microbatches` wait; None where they are of other passes of their sort."""
        own: Integers = self.place[self._sorts[wait.sort]]
        if wait.how == AT_END:
            order = np.sort(own)
            place = np.full(len(microbatches), order[0 if wait.which == FIRST else -1])
        else:
            place = own[microbatches]
            if (self.which[place] != wait.which).any():
                return None
        ops: Integers = self.begin[place] + wait.op
        return ops

    def columns(self, ranks: list[_Longer]) -> OpColumns | None:
        """All ops of this rank; None where a pass would wait for others than in the step of few microbatches."""
        sizes = [len(each.kinds) for each in self.every]
        first = np.cumsum([0, *sizes])[self.pass_of]
        inside = np.arange(int(self.sizes.sum())) + np.repeat(first - self.begin, self.sizes)
        kind = np.concatenate([each.kinds for each in self.every])[inside]
        own = np.concatenate([each.own for each in self.every])[inside]
        microbatch = np.where(own, np.repeat(self.microbatch, self.sizes), -1)
        waiting, cohorts, awaited = [], [], []
        for number, each in enumerate(self.every):
            mine = np.flatnonzero(self.pass_of == number)
            for wait in each.waits:
                inside_own = wait.how == INSIDE
                ops = self.begin[mine] + wait.op if inside_own else ranks[wait.rank].awaited(wait, self.microbatch[mine])
                if ops is None:
                    return None
                waiting.append(self.begin[mine] + wait.waiting)
                cohorts.append(np.full(len(mine), wait.rank))
                awaited.append(ops)
        columns = [np.concatenate([np.empty(0, np.int64), *each]) for each in (waiting, cohorts, awaited)]
        order = np.argsort(columns[0], kind="stable")
        return OpColumns(*_in_order(self.rank.kinds, kind), microbatch, *(each[order] for each in columns))


def _in_order(kinds: list[Op], kind: Integers) -> tuple[list[Op], Integers]:
    """Kinds in the order in which they first come, and those of ops as numbers of these."""
    there, first, number = np.unique(kind, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return [kinds[each] for each in there[order].tolist()], place[number.ravel()]
