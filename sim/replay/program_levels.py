"""A program whose passes repeat themselves as a graph that is worked out level by level: what starts together costs a few numpy
calls, however many pipeline ranks there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import pairwise

import numpy as np

from sim.op_columns import Integers, OpColumns, RepeatedCohort
from sim.program import Collective, Program
from sim.remembered import remembered
from sim.replay.block_times import block_numbers
from sim.replay.graph import CycleError, Graph


class ProgramLevels:
    """columns: of each cohort; first: by cohort, its first op, and in the end their number; kind: by op, its kind among those of
    all cohorts; block: by op, see `block_numbers`. meetings: ops that start together. graph: of all ops.
    """

    def __init__(self, program: Program, columns: list[OpColumns]) -> None:
        self.columns = columns
        self.first = np.cumsum([0, *(len(each.kind) for each in columns)])
        kinds = np.cumsum([0, *(len(each.kinds) for each in columns)])
        self.kind: Integers = np.concatenate([own.kind + first for own, first in zip(columns, kinds.tolist(), strict=False)])
        self.block: Integers = np.array(block_numbers(program)[0])
        self.meetings = self._meetings(program)
        before, after = self._waits()
        count = int(self.first[-1])
        rendezvous = np.full(count, -1) if self.meetings else None
        for number, members in enumerate(self.meetings):
            rendezvous[members] = number  # type: ignore[index]
        self.graph = Graph(count, before, after, rendezvous)

    def _waits(self) -> tuple[Integers, Integers]:
        """Ops that are waited for, those before on the same stream, too; and those that wait for them."""
        before, after = [], []
        for columns, first in zip(self.columns, self.first.tolist(), strict=False):
            streams = {stream: number for number, stream in enumerate({op.stream for op in columns.kinds})}
            stream = np.array([streams[op.stream] for op in columns.kinds])[columns.kind]
            for number in streams.values():
                mine = first + np.flatnonzero(stream == number)
                before.append(mine[:-1])
                after.append(mine[1:])
            before.append(self.first[columns.cohort] + columns.awaited)
            after.append(first + columns.waiting)
        return np.concatenate(before), np.concatenate(after)

    def _meetings(self, program: Program) -> list[list[int]]:
        """Collectives to which several cohorts come: the ops of each."""
        seen, result = Counter[Hashable](), dict[Hashable, list[int]]()
        for number, (cohort, columns) in enumerate(zip(program.cohorts, self.columns, strict=True)):
            meeting = [
                kind
                for kind, op in enumerate(columns.kinds)
                if isinstance(op.work, Collective) and (op.work.cohorts or op.work.axis in cohort.at)
            ]
            for op in np.flatnonzero(np.isin(columns.kind, meeting)).tolist() if meeting else ():
                work = columns.kinds[columns.kind[op]].work
                assert isinstance(work, Collective)
                seen[number, work.label, work.cohorts] += 1
                key = work.label, work.cohorts, seen[number, work.label, work.cohorts]
                result.setdefault(key, []).append(int(self.first[number]) + op)
        return list(result.values())

    def last(self) -> list[Integers]:
        """By cohort, the ops that no other op of it waits for."""
        before, after = self._waits()
        cohorts = [np.searchsorted(self.first, each, side="right") for each in (before, after)]
        waited = np.zeros(self.graph.count, bool)
        waited[before[cohorts[0] == cohorts[1]]] = True
        return [first + np.flatnonzero(~waited[first:end]) for first, end in pairwise(self.first.tolist())]


@remembered
def _levels(program: Program) -> tuple[ProgramLevels | None]:
    columns = [cohort.columns for cohort in program.cohorts if isinstance(cohort, RepeatedCohort)]
    if len(columns) < len(program.cohorts) or any(op.held for own in columns for op in own.kinds):
        return (None,)
    try:
        return (ProgramLevels(program, columns),)
    except CycleError:
        return (None,)


def program_levels(program: Program) -> ProgramLevels | None:
    """The levels of a program; None where not all passes repeat themselves, ops hold up their host, or wait for each other."""
    return _levels(program)[0]
