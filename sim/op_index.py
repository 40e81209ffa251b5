"""The ops of a cohort by what they do, as arrays of their numbers: what analyses ask of every lane."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.op_columns import RepeatedCohort
from sim.program import CACHED, COMPUTE, MEMORY_KINDS, STREAM_POOLS, Block, Cohort, Memory, Op, Send, Work
from sim.remembered import remembered

UPDATE = "optimizer"  # the block of an update, which gives back all that it takes
KINDS = {kind: number for number, kind in enumerate((*MEMORY_KINDS, CACHED, *STREAM_POOLS))}
Integers = NDArray[np.int64]


class Transfers(NamedTuple):
    """Collectives of a cohort along one axis, or what it sends to cohort `to`."""

    axis: str
    to: int | None
    ops: Integers


class MemoryChanges(NamedTuple):
    """What a cohort holds all the time, and what its ops take when they begin and give back when they end, as columns, in order.
    ops: −1 of what is held all the time; ends: when they end; kind: of KINDS; size: bytes, less than 0 of what is given
    back; updated: of it by an update of the optimizer.
    """

    ops: Integers
    ends: NDArray[np.bool_]
    kind: Integers
    size: NDArray[np.float64]
    updated: NDArray[np.float64]

    @classmethod
    def of(cls, resident: Memory, holdings: dict[tuple[Memory, Memory, bool], list[int]]) -> MemoryChanges:
        """Those of ops by what they take and give back, and whether they are updates."""
        rows = [(False, KINDS.get(kind, 0), size, 0.0) for kind, size in (("", 0.0), *resident)]
        ops, counts = [-1] * len(rows), [1] * len(rows)
        for (allocate, free, updates), numbers in holdings.items():
            for memory, ends, sign in ((allocate, False, 1.0), (free, True, -1.0)):
                for kind, size in memory:
                    ops += numbers
                    counts.append(len(numbers))
                    rows.append((ends, KINDS[kind], sign * size, sign * size * updates))
        numbered = np.array(ops, np.int64)
        order = np.argsort(numbered, kind="stable")
        types = (np.bool_, np.int64, np.float64, np.float64)
        columns: Iterator[NDArray[Any]] = (
            np.repeat(np.array(own, each), counts)[order] for own, each in zip(zip(*rows, strict=True), types, strict=True)
        )
        return cls(numbered[order], *columns)


class Worked(NamedTuple):
    """A distinct piece of work in the step: an op that does it, the number of the last, and all that do it."""

    number: int
    op: Op
    ops: Integers


class OpIndex:
    """Numbers of a cohort's ops, and of those of each of its `streams`; `compute` (of its stream), `inline` (transfers there, by
    axis) and `works` are of the step only where a steady state is played. ops, work: the ops of all works, and the place of the
    work of each; blocks: works that are blocks; block: by op, the place of its block among these, −1 of transfers.
    """

    def __init__(self, cohort: Cohort) -> None:
        first, last = cohort.steady or (0, cohort.count)
        works: dict[Work, list[int]] = {}
        transfers: dict[tuple[str, int | None], list[int]] = {}
        inline: dict[str, list[int]] = {}
        holdings: dict[tuple[Memory, Memory, bool], list[int]] = {}
        streams: dict[str, list[int]] = {}
        compute: list[int] = []
        for op, numbers in _alike(cohort):
            streams.setdefault(op.stream, []).extend(numbers)
            work, steady = op.work, [number for number in numbers if first <= number < last] if cohort.steady else numbers
            if steady:
                works.setdefault(work, []).extend(steady)
            if op.stream == COMPUTE:
                compute += steady
                if not isinstance(work, Block):
                    inline.setdefault(work.axis, []).extend(steady)
            elif not isinstance(work, Block):
                transfers.setdefault((work.axis, work.to if isinstance(work, Send) else None), []).extend(numbers)
            if op.allocate or op.free:
                updates = isinstance(work, Block) and work.name == UPDATE
                holdings.setdefault((op.allocate, op.free, updates), []).extend(numbers)
        self.streams = {stream: _in_order(numbers) for stream, numbers in streams.items()}
        self.compute = _in_order(compute)
        self.works = [Worked(int(ops[-1]), cohort.like(int(ops[-1])), ops) for ops in map(_in_order, works.values())]
        self.blocks = [each for each in self.works if isinstance(each.op.work, Block)]
        self.block = np.full(cohort.count, -1)
        for number, (_, _, ops) in enumerate(self.blocks):
            self.block[ops] = number
        self.ops = np.concatenate([ops for _, _, ops in self.works]) if self.works else np.empty(0, np.int64)
        self.work = np.repeat(np.arange(len(self.works)), [len(ops) for _, _, ops in self.works])
        self.transfers = [Transfers(*key, _in_order(numbers)) for key, numbers in transfers.items()]
        self.inline = {axis: _in_order(numbers) for axis, numbers in inline.items() if numbers}
        self.memory = MemoryChanges.of(cohort.resident, holdings)


def _alike(cohort: Cohort) -> Iterator[tuple[Op, list[int]]]:
    """Ops that do the same on the same stream, and take and give back the same objects: one of them, and their numbers."""
    if isinstance(cohort, RepeatedCohort):
        for op, numbers in zip(cohort.columns.kinds, cohort.columns.by_kind(), strict=True):
            yield op, numbers.tolist()
        return
    groups: dict[Hashable, list[int]] = {}
    for number, op in enumerate(cohort.ops):
        key = op.work, op.stream, id(op.allocate), id(op.free)
        group = groups.get(key)
        if group is None:
            groups[key] = [number]
        else:
            group.append(number)
    for same in groups.values():
        yield cohort.ops[same[0]], same


def _in_order(numbers: list[int]) -> Integers:
    return np.array(sorted(numbers), np.int64)


@remembered
def op_index(cohort: Cohort) -> OpIndex:
    """The index of a cohort to which no ops are added any more."""
    return OpIndex(cohort)
