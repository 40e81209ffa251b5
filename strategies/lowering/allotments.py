"""One program of several: for dp ranks with different numbers of microbatches, and for a last microbatch that is not full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sim.grid import Grid
from sim.program import Block, Cohort, Collective, Join, Op, Program, Ref, Send, Start, Work
from strategies.plan.resolved import NODES, Resolved
from topologies.reading import UserError

ACROSS = ("ep", NODES, "dp", "replica")  # axes along which dp ranks differ


def merged(programs: Sequence[Program], allotted: Sequence[int], plan: Resolved) -> Program:
    """The program whose dp rank i runs programs[allotted[i]], which are for as many cohorts of the same ranks.

    Raises UserError when dp ranks meet in every microbatch, so that all need as many: a rank that comes to another number of
    collectives than its group hangs.
    """
    first = programs[0]
    across = [list(_collectives(program)) for program in programs]
    if any(other != across[0] for other in across) or any("dp" in cohort.at for cohort in first.cohorts):
        counts = " and ".join(map(str, sorted(set(plan.sequences_per_replica or plan.allotted))))
        what = "sequences" if plan.sequences_per_replica else "microbatches"
        hook = f"data_parallel={plan.data_parallel}" + (f", ep={plan.ep}" if plan.ep > 1 else "")
        raise UserError(f"plan: dp ranks with {counts} {what}: with {hook} they meet in each, and all need as many")
    cohorts: list[Cohort] = []
    for number, program in enumerate(programs):
        behind = _Behind(len(cohorts))
        cohorts += [replace(cohort, ops=list(map(behind, cohort.ops)), allotment=number) for cohort in program.cohorts]
    return replace(first, cohorts=cohorts, allotments=tuple(np.array(allotted)[replicas(first.grid, first.cohorts[0])].tolist()))


def with_last(program: Program, other: Program, last: int) -> Program:
    """`program`, but the passes of microbatch number `last` are those of `other`, whose microbatches have another size.

    Raises UserError when they are other ops.
    """
    cohorts: list[Cohort] = []
    for mine, theirs in zip(program.cohorts, other.cohorts, strict=True):
        if [_place(op) for op in mine.ops] != [_place(op) for op in theirs.ops]:
            raise UserError(
                "plan: uneven_batch=partial: a microbatch that is not full would be done in other pieces than a full one"
            )
        ops = [own if own.microbatch != last else shorter for own, shorter in zip(mine.ops, theirs.ops, strict=True)]
        cohorts.append(replace(mine, ops=ops))
    return replace(program, cohorts=cohorts)


def _place(op: Op) -> tuple[object, ...]:
    """An op without what it does and how much memory it takes."""
    return op.stream, type(op.work), op.after, op.microbatch, op.chunk, op.held


class _Behind:
    """Ops of cohorts that come behind `before` others."""

    def __init__(self, before: int) -> None:
        self.before = before
        self._works: dict[Work, Work] = {}

    def __call__(self, op: Op) -> Op:
        """The op with the new numbers of cohorts."""
        if op.work not in self._works:
            self._works[op.work] = self._moved(op.work)
        return replace(
            op, work=self._works[op.work], after=tuple(Ref(cohort + self.before, number) for cohort, number in op.after)
        )

    def _moved(self, work: Work) -> Work:
        if isinstance(work, Send):
            return replace(work, to=work.to + self.before)
        if isinstance(work, Collective) and work.cohorts is not None:
            first, second = work.cohorts
            return replace(work, cohorts=(first + self.before, second + self.before))
        return work


def _collectives(program: Program) -> Iterator[tuple[int, str, float, tuple[str, ...], float]]:
    """What each cohort does along axes on which dp ranks differ, in order."""
    for number, cohort in enumerate(program.cohorts):
        for op in cohort.ops:
            works = _inside(op.work) if isinstance(op.work, Block) else [op.work]
            for work in works:
                if isinstance(work, Collective) and set(work.axes) & set(ACROSS):
                    yield number, work.operation, work.bytes, work.axes, work.repeat


def _inside(block: Block) -> Iterator[object]:
    for times, items in block.runs:
        for _ in range(times):
            for item in items:
                yield item.collective if isinstance(item, Start) else None if isinstance(item, Join) else item


def replicas(grid: Grid, cohort: Cohort) -> np.ndarray:
    """The dp rank of each rank of a cohort."""
    ranks = grid.groups((), cohort.at).ravel()
    names, degrees = [axis for axis, _ in reversed(grid.sizes)], [degree for _, degree in reversed(grid.sizes)]
    coordinates = dict(zip(names, np.unravel_index(ranks, degrees), strict=True))
    result, stride = np.zeros(len(ranks), dtype=np.int64), 1
    for axis, degree in grid.sizes:
        if axis in ACROSS:
            result += stride * coordinates[axis]
            stride *= degree
    return result
