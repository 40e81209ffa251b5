"""How the ops of a program repeat themselves from microbatch to microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

    def waits(self, cohort: int, number: int) -> list[tuple[int, int, bool]] | None:
        """What an op that repeats another waits for: cohort, op, and whether the other one waits for that a period before, or
        for the same op. None: it waits for something else.
        """
        ops = self.program.cohorts[cohort].ops
        now, before = ops[number].after, ops[number - self.every[cohort].more].after
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
    ops, begin = cohort.ops, cohort.passes[period.end - period.more]
    more = begin - cohort.passes[period.end - 2 * period.more]
    end = begin
    while end < len(ops) and _alike(ops[end], ops[end - more]):
        end += 1
    while begin > more and _alike(ops[begin - 1], ops[begin - 1 - more]):
        begin -= 1
    return Repetition(more, begin, end) if end - begin >= more else None


def _alike(op: Op, other: Op) -> bool:
    """Whether two ops do the same."""
    return op.work is other.work and op.stream == other.stream and op.chunk == other.chunk and op.held == other.held
