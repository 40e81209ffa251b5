"""The ops of a cohort by what they do, as arrays of their numbers: what analyses ask of every lane."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.program import COMPUTE, Block, Cohort, Memory, Op, Send, Work
from sim.remembered import remembered

UPDATE = "optimizer"  # the block of an update, which gives back all that it takes
Integers = NDArray[np.int64]


class Transfers(NamedTuple):
    """Collectives of a cohort along one axis, or what it sends to cohort `to`."""

    axis: str
    to: int | None
    ops: Integers


class Holding(NamedTuple):
    """Ops that take and give back the same memory; updates: they are updates by the optimizer."""

    allocate: Memory
    free: Memory
    updates: bool
    ops: Integers


class Worked(NamedTuple):
    """A distinct piece of work in the step: the last op that does it, its number, and all that do it."""

    number: int
    op: Op
    ops: Integers


class OpIndex:
    """Numbers of a cohort's ops; `compute` (of its stream), `inline` (transfers there, by axis) and `works` are of the step only
    where a steady state is played.
    """

    def __init__(self, cohort: Cohort) -> None:
        first, last = cohort.steady or (0, len(cohort.ops))
        works: dict[Work, list[int]] = {}
        transfers: dict[tuple[str, int | None], list[int]] = {}
        inline: dict[str, list[int]] = {}
        holdings: dict[tuple[Memory, Memory, bool], list[int]] = {}
        compute: list[int] = []
        for number, op in enumerate(cohort.ops):
            work = op.work
            if first <= number < last:
                works.setdefault(work, []).append(number)
                if op.stream == COMPUTE:
                    compute.append(number)
                    if not isinstance(work, Block):
                        inline.setdefault(work.axis, []).append(number)
            if op.stream != COMPUTE and not isinstance(work, Block):
                transfers.setdefault((work.axis, work.to if isinstance(work, Send) else None), []).append(number)
            if op.allocate or op.free:
                updates = isinstance(work, Block) and work.name == UPDATE
                holdings.setdefault((op.allocate, op.free, updates), []).append(number)
        self.compute = np.array(compute, np.int64)
        self.works = [Worked(numbers[-1], cohort.ops[numbers[-1]], np.array(numbers, np.int64)) for numbers in works.values()]
        self.transfers = [Transfers(*key, np.array(numbers, np.int64)) for key, numbers in transfers.items()]
        self.inline = {axis: np.array(numbers, np.int64) for axis, numbers in inline.items()}
        self.holdings = [Holding(*key, np.array(numbers, np.int64)) for key, numbers in holdings.items()]


@remembered
def op_index(cohort: Cohort) -> OpIndex:
    """The index of a cohort to which no ops are added any more."""
    return OpIndex(cohort)
