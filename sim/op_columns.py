"""The ops of a cohort as columns. Where passes repeat themselves, ops are made one by one only for those who ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.program import COMPUTE, Cohort, Op, Ref
from topologies.reading import UserError

OPS = 500_000  # of all cohorts that are made one by one: some ten seconds and a gigabyte
Integers = NDArray[np.int64]


def too_many(most: int) -> UserError:
    """The refusal of a step that has more ops than can be played."""
    return UserError(f"plan: a step of more than {most:,} ops of all stages is not played: fewer microbatches, or layers")


@dataclass(frozen=True, eq=False)
class OpColumns:
    """Ops by what they do. kinds: ops of which others differ in their microbatch and in what they wait for only; kind: by op, its
    place among these. waiting, cohort, awaited: by wait, in the order of ops, the op that waits and the one that it waits for.
    """

    kinds: list[Op]
    kind: Integers
    microbatch: Integers
    waiting: Integers
    cohort: Integers
    awaited: Integers

    def by_kind(self) -> list[Integers]:
        """The numbers of the ops of each kind."""
        ends = np.bincount(self.kind, minlength=len(self.kinds)).cumsum()
        return np.split(np.argsort(self.kind, kind="stable"), ends[:-1])

    def waits(self, op: int) -> tuple[Ref, ...]:
        """What an op waits for."""
        first, last = np.searchsorted(self.waiting, (op, op + 1)).tolist()
        return tuple(map(Ref, self.cohort[first:last].tolist(), self.awaited[first:last].tolist()))

    def first_of_microbatches(self) -> Integers:
        """The first op on the compute stream of each microbatch in the first chunk, in the order of these."""
        there = np.array([op.stream == COMPUTE and op.chunk <= 0 for op in self.kinds])[self.kind] & (self.microbatch >= 0)
        numbers = np.flatnonzero(there)
        return numbers[np.sort(np.unique(self.microbatch[numbers], return_index=True)[1])]

    def ops(self) -> list[Op]:
        """Every op."""
        bounds = np.searchsorted(self.waiting, np.arange(len(self.kind) + 1)).tolist()
        refs = list(map(Ref, self.cohort.tolist(), self.awaited.tolist()))
        columns = self.kind.tolist(), self.microbatch.tolist(), bounds, bounds[1:]
        result = []
        for number, microbatch, first, last in zip(*columns, strict=False):
            kind = self.kinds[number]
            after = tuple(refs[first:last])
            result.append(Op(kind.stream, kind.work, after, kind.allocate, kind.free, microbatch, kind.chunk, kind.held))
        return result


class RepeatedCohort(Cohort):
    """A cohort whose ops are `columns`. most: how many of these may be made one by one."""

    def __init__(self, like: Cohort, columns: OpColumns, passes: list[int], most: float) -> None:
        self.at, self.resident, self.hosted = like.at, like.resident, like.hosted
        self.steady, self.allotment = like.steady, like.allotment
        self.columns, self.passes, self._most = columns, passes, most

    @cached_property
    def ops(self) -> list[Op]:  # type: ignore[override]
        """Raises UserError when there are more than can be played one by one."""
        if self.count > self._most:
            raise UserError(
                f"plan: a step of more than {OPS:,} ops of all stages is not played or shown op by op, as it would be here "
                "(transfers that share links, charts, intervals): fewer microbatches, or layers"
            )
        return self.columns.ops()

    @property
    def count(self) -> int:
        """How many ops there are."""
        return len(self.columns.kind)

    def waits(self, number: int) -> tuple[Ref, ...]:
        """What op `number` waits for."""
        return self.columns.waits(number)

    def like(self, number: int) -> Op:
        """An op that does what op `number` does, for whatever microbatch."""
        return self.columns.kinds[int(self.columns.kind[number])]

    @property
    def kinds(self) -> list[Op]:
        """Ops of which all others differ in their microbatch and in what they wait for only."""
        return self.columns.kinds
