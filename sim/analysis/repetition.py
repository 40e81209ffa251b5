"""How the ops of a program repeat themselves from microbatch to microbatch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from sim.op_columns import Integers, OpColumns, RepeatedCohort
from sim.program import Cohort, Op, Program


class Repetition(NamedTuple):
    """Ops number begin … end − 1 of a cohort do what those `more` before them do: a period has `more` ops. A program of a period
    more goes on like that for another period, and then has what is left of this one.
    """

    more: int
    begin: int
    end: int


class PassesOfPeriod(NamedTuple):
    """A rank's order of a period more has, before pass number `end`, the `more` passes before that once more."""

    more: int
    end: int


class Repetitions:
    """Those of all cohorts of a program."""

    def __init__(self, program: Program, every: list[Repetition]) -> None:
        self.program, self.every = program, every

    @classmethod
    def of(cls, program: Program, periods: Sequence[PassesOfPeriod]) -> Repetitions | None:
        """None where a cohort does not repeat itself for a whole period."""
        every = []
        for cohort, period in zip(program.cohorts, periods, strict=True):
            repetition = _repetition(cohort, period)
            if repetition is None:
                return None
            every.append(repetition)
        return cls(program, every)

    def stays(self, cohort: int, ops: range) -> Sequence[tuple[int, int]] | None:
        """Ops of cohorts for which several that repeat others wait as these did a period before. None: one waits for something
        else.
        """
        own = self.program.cohorts[cohort]
        if isinstance(own, RepeatedCohort):
            return _stays(own.columns, ops, self.every[cohort].more, np.array([each.more for each in self.every]))
        result = []
        for number in ops:
            waits = self.waits(cohort, number)
            if waits is None:
                return None
            result += [(awaited, op) for awaited, op, moves in waits if not moves]
        return result

    def waits(self, cohort: int, number: int) -> list[tuple[int, int, bool]] | None:
        """What an op that repeats another waits for: cohort, op, and whether the other one waits for that a period before, or
        for the same op. None: it waits for something else.
        """
        own = self.program.cohorts[cohort]
        now, before = own.waits(number), own.waits(number - self.every[cohort].more)
        result = []
        for awaited, earlier in zip(now, before, strict=False):
            moves = awaited.op - earlier.op == self.every[awaited.cohort].more
            if awaited.cohort != earlier.cohort or not (moves or awaited.op == earlier.op):
                return None
            result.append((*awaited, moves))
        return result if len(now) == len(before) else None


def _repetition(cohort: Cohort, period: PassesOfPeriod) -> Repetition | None:
    """The row of ops around the last period that do what others a period before them do."""
    if len(cohort.passes) < period.end:
        return None
    begin = cohort.passes[period.end - period.more]
    more = begin - cohort.passes[period.end - 2 * period.more]
    if isinstance(cohort, RepeatedCohort):
        begin, end = _row(cohort.columns, begin, more)
        return Repetition(more, begin, end) if end - begin >= more else None
    ops, end = cohort.ops, begin
    while end < len(ops) and _alike(ops[end], ops[end - more]):
        end += 1
    while begin > more and _alike(ops[begin - 1], ops[begin - 1 - more]):
        begin -= 1
    return Repetition(more, begin, end) if end - begin >= more else None


def _row(columns: OpColumns, begin: int, more: int) -> tuple[int, int]:
    """From where to where ops around number `begin` do what those `more` before them do."""
    numbers: dict[Hashable, int] = {}
    sorts = [numbers.setdefault((op.work, op.stream, op.chunk, op.held), len(numbers)) for op in columns.kinds]
    sort = np.array(sorts)[columns.kind]
    other = more + np.flatnonzero(sort[more:] != sort[:-more])
    place = int(np.searchsorted(other, begin))
    return int(other[place - 1]) + 1 if place else more, int(other[place]) if place < len(other) else len(sort)


def _stays(columns: OpColumns, ops: range, more: int, periods: Integers) -> list[tuple[int, int]] | None:
    """See `Repetitions.stays`. more: of their own cohort; periods: of all."""
    edges = np.searchsorted(columns.waiting, (ops.start, ops.stop, ops.start - more, ops.stop - more)).tolist()
    now, before = slice(*edges[:2]), slice(*edges[2:])
    cohort, same = columns.cohort[now], edges[1] - edges[0] == edges[3] - edges[2]
    if not same or (columns.waiting[now] - more != columns.waiting[before]).any() or (cohort != columns.cohort[before]).any():
        return None
    later = columns.awaited[now] - columns.awaited[before]
    moves = later == periods[cohort]
    if not (moves | (later == 0)).all():
        return None
    return list(zip(cohort[~moves].tolist(), columns.awaited[now][~moves].tolist(), strict=True))


def _alike(op: Op, other: Op) -> bool:
    """Whether two ops do the same."""
    return op.work is other.work and op.stream == other.stream and op.chunk == other.chunk and op.held == other.held
