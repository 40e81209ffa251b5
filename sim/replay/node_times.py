"""Times of the nodes of a program's graph in a played step, by which it is worked out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.program import Block
from sim.replay.block_times import BlockTimes
from sim.replay.places import Column, Floats, Places
from sim.timeline import Timeline


class PlayedCohort:
    """A cohort in a played step: its lanes, and by lane the number of its first op."""

    def __init__(self, timeline: Timeline, places: Places, number: int) -> None:
        self.timeline, self.places, self.number = timeline, places, number
        self.cohort = timeline.program.cohorts[number]
        self.lanes = [lane for lane, each in enumerate(timeline.lanes) if each.cohort == number]
        self.first = [timeline.offset[lane] for lane in self.lanes]
        self.ranks = [timeline.lanes[lane].rank for lane in self.lanes]

    @cached_property
    def in_period(self) -> NDArray[np.int64]:
        """By distinct block, how many ops that run it end in the last period of a steady state."""
        index = op_index(self.cohort)
        ended = index.block[self.timeline.in_period[self.first[0] :][: len(index.block)]]
        counts: NDArray[np.int64] = np.bincount(ended[ended >= 0], minlength=len(index.blocks))
        return counts

    def column(self, values: list[float]) -> Column:
        """See `Places.column`."""
        return self.places.column(self.number, values)

    def by_block(self, values: ArrayLike) -> Floats:
        """Values of lanes and blocks as those of blocks and places, see `BlockTimes`; they may have further axes."""
        return self.places.rows(self.number, np.asarray(values)).swapaxes(0, 1)

    def columns(self, times: list[float]) -> list[Column]:
        """Times of all ops of the step as those of its ops."""
        table = [times[at : at + self.cohort.count] for at in self.first]
        if len(table) == 1:
            return cast(list[Column], table[0])
        return [self.column(list(each)) for each in zip(*table, strict=True)]


@dataclass
class NodeTimes:
    """Seconds by node: numbers where all places have the same, or one per place.

    launched: since the step began, or since the host went on; transfers: how long they last; added: to blocks whatever their
    kernels take, of those to which anything is; held: of nodes that hold up the host, its work since it went on before.
    blocks: by cohort.
    """

    launched: list[Column] = field(default_factory=list)
    transfers: list[Column] = field(default_factory=list)
    added: dict[int, Column] = field(default_factory=dict)
    held: dict[int, Column] = field(default_factory=dict)
    blocks: list[BlockTimes] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[NodeTimes]) -> NodeTimes:
        """Those of a program, of its cohorts' in order."""
        result = cls()
        for part in parts:
            begin = len(result.launched)
            result.launched += part.launched
            result.transfers += part.transfers
            result.blocks += part.blocks
            result.added |= {begin + node: more for node, more in part.added.items()}
            result.held |= {begin + node: work for node, work in part.held.items()}
        return result

    @classmethod
    def played(cls, step: PlayedCohort) -> NodeTimes:
        """Those of a cohort in the step as it was played."""
        timeline = step.timeline
        launched, held = _since_held(step, step.columns(timeline.launched))
        return cls(launched, step.columns(timeline.durations), _added(step), held, [_blocks(step)])


def _since_held(step: PlayedCohort, launched: list[Column]) -> tuple[list[Column], dict[int, Column]]:
    """When ops are launched after their host went on, and what it did before it was held up again."""
    resumptions, held = step.timeline.resumptions, dict[int, Column]()
    resumed: Column = 0.0
    if not resumptions:
        return launched, held
    for number, op in enumerate(step.cohort.ops):
        if op.held:
            each = [resumptions[at + number] for at in step.first]
            held[number], resumed = each[0].busy, step.column([resumption.time for resumption in each])
        launched[number] = launched[number] - resumed
    return launched, held


def _added(step: PlayedCohort) -> dict[int, Column]:
    """What collectives beside blocks, and effects, add to them, by op."""
    every = [step.timeline.lengthened[at : at + step.cohort.count] for at in step.first]
    if len(every) == 1:
        there = np.flatnonzero(every[0])
        return dict(zip(there.tolist(), every[0][there].tolist(), strict=True))
    more = np.array(every)
    return {number: step.column(more[:, number].tolist()) for number in np.flatnonzero(more.any(axis=0)).tolist()}


def _blocks(step: PlayedCohort) -> BlockTimes:
    """The blocks of a cohort as they were played."""
    op_costs, blocks = step.timeline.op_costs, op_index(step.cohort).blocks
    table = []
    for rank, at in zip(step.ranks, step.first, strict=True):
        for number, op, _ in blocks:
            cost = cast(BlockCost, step.timeline.cost[at + number])
            table.append((cost.busy, cost.critical, *op_costs.growth(cast(Block, op.work), cost, step.number, rank)))
    times = step.by_block(np.array(table).reshape(len(step.first), len(blocks), 4))
    busy, critical, busy_slope, critical_slope = np.moveaxis(times, 2, 0)[..., None]
    return BlockTimes(busy, critical, busy_slope, critical_slope, step.in_period)
