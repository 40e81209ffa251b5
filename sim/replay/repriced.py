"""A played step under other prices: every op takes what it would cost then, and its times are worked out anew.

Algorithms and protocols of collectives stay as they were chosen. With nothing contended the steps are those of plays under these
prices, to the bit. Where traffic contends it shares links as it was played: a transfer takes as many times as long as it would
alone, and kernels are stretched by collectives beside them for as long as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from sim.engine.lanes import Lanes
from sim.op_columns import OpColumns, RepeatedCohort
from sim.op_index import op_index
from sim.pricing.op_costs import OpCosts
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Block, Op, Work
from sim.replay.block_times import BlockTimes
from sim.replay.node_times import NodeTimes, PlayedCohort
from sim.replay.places import Column, Floats
from sim.replay.step import StepReplay, replay_of
from sim.timeline import Timeline


def repriced(timeline: Timeline, prices: Sequence[OpCosts]) -> Floats:
    """Seconds of a played step under each of `prices` (see `OpCosts.under`), shape (prices,): with periods that were not played.
    Raises UserError for steps that are not replayed.
    """
    if len(prices) > 1 and replay_of(timeline).levels is not None:  # many ops: one price at a time
        return np.concatenate([repriced(timeline, [each]) for each in prices])
    return StepReplay(timeline, _Repricing(timeline, prices).times).times().steps


class _Repricing:
    """Times of nodes whose samples are prices."""

    def __init__(self, timeline: Timeline, prices: Sequence[OpCosts]) -> None:
        self._usual = Lanes(timeline.program, timeline.op_costs)
        self._others = [Lanes(timeline.program, costs) for costs in prices]
        self._played = replay_of(timeline)

    def times(self, step: PlayedCohort) -> NodeTimes:
        """Those of a cohort."""
        result, played, slower = NodeTimes(), self._played.nodes, self._slower(step.lanes[0])
        result.blocks.append(self._blocks(step))
        first = self._played.first[step.number]
        if isinstance(step.cohort, RepeatedCohort) and self._played.levels is not None:
            ahead, behind, longer = self._by_kind(step, step.cohort.columns)
            mine = slice(first, first + step.cohort.count)
            launched = np.array((ahead, behind)).T.ravel().cumsum()[::2]
            result.launched = (np.array(played.launched[mine]) + launched).tolist()
            result.transfers = (np.array(played.transfers[mine]) * longer).tolist()
            return result
        for number, change in enumerate(self._changes(step)):
            node = first + number
            result.launched.append(played.launched[node] + change.launched)
            result.transfers.append(played.transfers[node] * change.longer)
            if node in played.added:
                result.added[number] = slower * played.added[node]
            if node in played.held:
                result.held[number] = played.held[node] + change.held
        return result

    def _slower(self, lane: int) -> Column:
        """The factor of what collectives beside kernels make them longer."""
        usual = self._usual.profile(lane).slowdown - 1
        return np.array([[(other.profile(lane).slowdown - 1) / usual for other in self._others]]) if usual else 1.0

    def _blocks(self, step: PlayedCohort) -> BlockTimes:
        """What blocks cost then."""
        blocks = [cast(Block, op.work) for _, op, _ in op_index(step.cohort).blocks]
        costs = [
            [[other.op_costs.block(block, step.number, rank=rank) for other in self._others] for block in blocks]
            for rank in step.ranks
        ]
        busy, critical = (
            step.by_block([[[getattr(cost, name) for cost in each] for each in lane] for lane in costs])
            for name in ("busy", "critical")
        )
        none = np.zeros((len(blocks), 1, 1))
        return BlockTimes(busy, critical, none, none, step.in_period)

    def _by_kind(self, step: PlayedCohort, columns: OpColumns) -> Iterator[Floats]:
        """`_price` of every op of a cohort whose ops are columns, as arrays."""
        return (np.array(each)[columns.kind] for each in zip(*(self._price(step, op) for op in columns.kinds), strict=True))

    def _changes(self, step: PlayedCohort) -> Iterator[_Change]:
        """What prices change of each op of a cohort, in program order."""
        known: dict[Work, tuple[Column, Column, Column]] = {}
        busy: Column = 0.0  # the host's further work since it was held up
        for op in step.cohort.ops:
            if op.work not in known:
                known[op.work] = self._price(step, op)
            ahead, behind, longer = known[op.work]
            held: Column = 0.0
            if op.held:
                held, busy = busy, 0.0
            launched = busy + ahead
            yield _Change(launched, held, longer)
            busy = launched + behind

    def _price(self, step: PlayedCohort, op: Op) -> tuple[Column, Column, Column]:
        """Further seconds of the host before an op is launched and after that, and the factor of a transfer's seconds."""
        ahead, behind, longer = [], [], []
        for lane in step.lanes:
            usual, others = self._usual.priced(lane, op), [other.priced(lane, op) for other in self._others]
            ahead.append([other.ahead - usual.ahead for other in others])
            behind.append([other.behind - usual.behind for other in others])
            longer.append([1.0] * len(others))
            if isinstance(usual.cost, TransferCost) and (seconds := usual.cost.seconds):
                longer[-1] = [cast(TransferCost, other.cost).seconds / seconds for other in others]
        return _column(step, ahead), _column(step, behind), _column(step, longer)


def _column(step: PlayedCohort, values: list[list[float]]) -> Column:
    """Values by lane and price as (places or 1, prices); a number where all are equal."""
    first = values[0][0]
    if all(value == first for each in values for value in each):
        return first
    return step.places.rows(step.number, np.array(values))


class _Change(NamedTuple):
    """What other prices change of an op: when it is launched, the host's work since it was held up, and of a transfer the factor
    of its seconds.
    """

    launched: Column
    held: Column
    longer: Column
