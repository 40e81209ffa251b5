"""Times of the nodes of a program's graph in a played step, by which it is worked out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.program import Block
from sim.replay.places import Column, Places
from sim.timeline import Timeline


@dataclass(eq=False, slots=True)
class BlockTimes:
    """A block of a cohort as a max-plus map (`sim.pricing.block_costs`), and how it grows when its kernels take twice as long.
    ops: how many ops of the last period of a steady state run it.
    """

    busy: Column
    critical: Column
    busy_slope: Column
    critical_slope: Column
    ops: int

    def slower(self, more: Column) -> tuple[Column, Column]:
        """busy and critical of kernels that take 1 + `more` times as long."""
        return self.busy + more * self.busy_slope, self.critical + more * self.critical_slope


class PlayedCohort:
    """A cohort in a played step: its lanes, and by lane the number of its first op."""

    def __init__(self, timeline: Timeline, places: Places, number: int) -> None:
        self.timeline, self.places, self.number = timeline, places, number
        self.cohort = timeline.program.cohorts[number]
        self.lanes = [lane for lane, each in enumerate(timeline.lanes) if each.cohort == number]
        self.first = [timeline.offset[lane] for lane in self.lanes]
        self.ranks = [timeline.lanes[lane].rank for lane in self.lanes]

    @cached_property
    def in_period(self) -> list[int]:
        """By distinct piece of work, how many ops that do it end in the last period of a steady state."""
        index = op_index(self.cohort)
        counts: list[int] = np.bincount(index.work, self.timeline.in_period[self.first[0] + index.ops]).astype(int).tolist()
        return counts

    def column(self, values: list[float]) -> Column:
        """See `Places.column`."""
        return self.places.column(self.number, values)

    def columns(self, times: list[float]) -> list[Column]:
        """Times of all ops of the step as those of its ops."""
        table = [times[at : at + len(self.cohort.ops)] for at in self.first]
        if len(table) == 1:
            return cast(list[Column], table[0])
        return [self.column(list(each)) for each in zip(*table, strict=True)]


@dataclass
class NodeTimes:
    """Seconds by node: numbers where all places have the same, or one per place.

    launched: since the step began, or since the host went on; transfers: how long they last; block: None of transfers; added: to
    blocks whatever their kernels take, of those to which anything is; held: of nodes that hold up the host, its work since it
    went on before. blocks: by cohort.
    """

    launched: list[Column] = field(default_factory=list)
    transfers: list[Column] = field(default_factory=list)
    block: list[BlockTimes | None] = field(default_factory=list)
    added: dict[int, Column] = field(default_factory=dict)
    held: dict[int, Column] = field(default_factory=dict)
    blocks: list[list[BlockTimes]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[NodeTimes]) -> NodeTimes:
        """Those of a program, of its cohorts' in order."""
        result = cls()
        for part in parts:
            begin = len(result.block)
            result.launched += part.launched
            result.transfers += part.transfers
            result.block += part.block
            result.blocks += part.blocks
            result.added |= {begin + node: more for node, more in part.added.items()}
            result.held |= {begin + node: work for node, work in part.held.items()}
        return result

    @classmethod
    def played(cls, step: PlayedCohort) -> NodeTimes:
        """Those of a cohort in the step as it was played."""
        timeline, ops = step.timeline, step.cohort.ops
        launched, held = _since_held(step, step.columns(timeline.launched))
        block: list[BlockTimes | None] = [None] * len(ops)
        blocks = []
        for (place, op, same), count in zip(op_index(step.cohort).works, step.in_period, strict=True):
            if isinstance(op.work, Block):
                costs = [cast(BlockCost, timeline.cost[at + place]) for at in step.first]
                blocks.append(_block(step, op.work, costs, count))
                for number in same.tolist():
                    block[number] = blocks[-1]
        return cls(launched, step.columns(timeline.durations), block, _added(step), held, [blocks])


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
    more = np.array([step.timeline.lengthened[at : at + len(step.cohort.ops)] for at in step.first])
    return {number: step.column(more[:, number].tolist()) for number in np.flatnonzero(more.any(axis=0)).tolist()}


def _block(step: PlayedCohort, block: Block, played: list[BlockCost], ops: int) -> BlockTimes:
    """A block of `ops` ops. played: its cost on each lane."""
    growth = [step.timeline.op_costs.growth(block, step.number, rank) for rank in step.ranks]
    return BlockTimes(
        busy=step.column([cost.busy for cost in played]),
        critical=step.column([cost.critical for cost in played]),
        busy_slope=step.column([busy for busy, _ in growth]),
        critical_slope=step.column([critical for _, critical in growth]),
        ops=ops,
    )
