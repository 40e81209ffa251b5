"""The blocks of a played step, whose kernels take other times when it is worked out anew."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.op_index import op_index
from sim.program import Program
from sim.remembered import remembered
from sim.replay.places import Column, Floats


class BlockTimes(NamedTuple):
    """The distinct blocks of a cohort as max-plus maps (`sim.pricing.block_costs`), and how these grow when their kernels take
    twice as long: shape (blocks, places or 1, samples or 1). ops: how many ops of the last period of a steady state run each.
    """

    busy: Floats
    critical: Floats
    busy_slope: Floats
    critical_slope: Floats
    ops: NDArray[np.int64]

    @classmethod
    def joined(cls, cohorts: Sequence[BlockTimes]) -> BlockTimes:
        """Those of all cohorts, one cohort's after the other's."""
        shapes = {times.shape[1:] for each in cohorts for times in each[:4]}
        columns = [[*each[:4]] for each in cohorts]
        if len(shapes) > 1:
            columns = [[np.broadcast_to(own, (len(own), *np.broadcast_shapes(*shapes))) for own in each] for each in columns]
        busy, critical, busy_slope, critical_slope = map(np.concatenate, zip(*columns, strict=True))
        return cls(busy, critical, busy_slope, critical_slope, np.concatenate([each.ops for each in cohorts]))


class DrawnBlocks:
    """Blocks of all cohorts whose kernels take 1 + `more` times as long. first: by cohort the number of its first block, and in
    the end their number; more: by cohort. busy: how long each block is; least, late: the least of that, and the most of
    `critical`.
    """

    def __init__(self, blocks: BlockTimes, first: Sequence[int], more: Sequence[Column]) -> None:
        self._blocks, self._first, self._more = blocks, first, more
        self._busy = [
            blocks.busy[begin:end] + own * blocks.busy_slope[begin:end]
            for (begin, end), own in zip(pairwise(first), more, strict=True)
        ]
        self.busy = list(chain.from_iterable(self._busy))
        ends = np.array([(own.min(), own.max()) for own in map(np.asarray, more)])  # times grow or shrink with it
        low, high = np.repeat(ends, np.diff(first), axis=0).T[:, :, None, None]
        least = np.minimum(blocks.busy + low * blocks.busy_slope, blocks.busy + high * blocks.busy_slope)
        late = np.maximum(blocks.critical + low * blocks.critical_slope, blocks.critical + high * blocks.critical_slope)
        self.least: list[float] = least.min(axis=(1, 2)).tolist()
        self.late: list[float] = late.max(axis=(1, 2)).tolist()
        self._critical: dict[int, Floats] = {}  # of blocks whose launches matter

    def critical(self, block: int) -> Floats:
        """The time from its launch on in which a block ends at least."""
        known = self._critical.get(block)
        if known is None:
            more = self._more[bisect_right(self._first, block) - 1]
            known = self._critical[block] = self._blocks.critical[block] + more * self._blocks.critical_slope[block]
        return known

    def computing(self) -> list[Column]:
        """By cohort, how long its GPUs compute in the last period of a steady state."""
        result = list[Column]()
        for begin, busy in zip(self._first, self._busy, strict=False):
            ops = self._blocks.ops[begin : begin + len(busy)]
            there = np.flatnonzero(ops)
            result.append(sum(ops[there, None, None] * busy[there], 0.0))
        return result


@remembered
def block_numbers(program: Program) -> tuple[list[int], list[int]]:
    """By op of all cohorts, the number of its block among those of `DrawnBlocks`, −1 of transfers; and `first` there."""
    result, first = list[int](), [0]
    for index in map(op_index, program.cohorts):
        result += np.where(index.block < 0, -1, first[-1] + index.block).tolist()
        first.append(first[-1] + len(index.blocks))
    return result, first
