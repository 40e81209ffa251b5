"""The blocks of a played step, whose kernels take other times when it is worked out anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
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

    def extremes(self, more: Column) -> tuple[list[float], list[float]]:
        """By block, the least `busy` and the most `critical` of kernels that take 1 + `more` times as long: times grow or shrink
        with it.
        """
        ends = float(np.min(more)), float(np.max(more))
        least = np.minimum(*(self.busy + end * self.busy_slope for end in ends))
        most = np.maximum(*(self.critical + end * self.critical_slope for end in ends))
        return least.min(axis=(1, 2)).tolist(), most.max(axis=(1, 2)).tolist()


class DrawnBlocks:
    """The blocks of all cohorts, one cohort's after the other's, whose kernels take 1 + `more` times as long. busy: how long each
    is; least, late: the least of that, and the most of `critical`.
    """

    def __init__(self, blocks: Sequence[BlockTimes], more: Sequence[Column]) -> None:
        self._blocks, self._more = blocks, more
        self._busy = [each.busy + own * each.busy_slope for each, own in zip(blocks, more, strict=True)]
        self.busy = list(chain.from_iterable(self._busy))
        extremes = [each.extremes(own) for each, own in zip(blocks, more, strict=True)]
        self.least = list(chain.from_iterable(least for least, _ in extremes))
        self.late = list(chain.from_iterable(late for _, late in extremes))
        self._critical: dict[int, Floats] = {}  # of blocks whose launches matter

    def critical(self, block: int) -> Floats:
        """The time from its launch on in which a block ends at least."""
        known = self._critical.get(block)
        if known is None:
            cohort, number = 0, block
            while number >= len(self._blocks[cohort].ops):
                number -= len(self._blocks[cohort].ops)
                cohort += 1
            own = self._blocks[cohort]
            known = self._critical[block] = own.critical[number] + self._more[cohort] * own.critical_slope[number]
        return known

    def computing(self) -> list[Column]:
        """By cohort, how long its GPUs compute in the last period of a steady state."""
        result = list[Column]()
        for blocks, busy in zip(self._blocks, self._busy, strict=True):
            there = np.flatnonzero(blocks.ops)
            result.append(sum(blocks.ops[there, None, None] * busy[there], 0.0))
        return result


@remembered
def block_numbers(program: Program) -> list[int]:
    """By op of all cohorts, the number of its block among those of `DrawnBlocks`; −1 of transfers."""
    result, begin = list[int](), 0
    for index in map(op_index, program.cohorts):
        result += np.where(index.block < 0, -1, begin + index.block).tolist()
        begin += len(index.blocks)
    return result
