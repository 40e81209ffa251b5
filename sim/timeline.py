"""The timeline of a played step: for each op on each lane when it was launched, when it started and when it ended.

A lane is one rank, or several ranks of a cohort that do the same at the same times. All times are multiples of 2⁻⁴⁰ s, so that
their sums are exact. What follows from a timeline (breakdown, volume, memory, link load, summary) is in `sim.analysis`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import COMPUTE, CPU, Block, Cohort, Collective, Op, Program
from topologies.documents.extras import imported

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]


class Lane(NamedTuple):
    """`ranks` ranks of cohort number `cohort` that are played as one; `rank` is the first of them."""

    cohort: int
    rank: int
    ranks: int


class Resumption(NamedTuple):
    """When a host that an op held up went on. before: the number of the op that held it up before, −1: none; busy: seconds of
    launches between the two; time: when it went on.
    """

    before: int
    busy: float
    time: float


class InsideOp(NamedTuple):
    """Kernels in a row, or a collective, inside a block; times in seconds."""

    stream: str
    work: Block | Collective
    cost: BlockCost | TransferCost
    start: float
    end: float


class Inside(Protocol):
    """What ran inside a block."""

    def ops(self) -> Iterable[InsideOp]:
        """In the order in which it was launched."""

    def later(self, seconds: float, launches: float | None = None) -> Self:
        """The same, so much later. launches: by how much it is launched later, where that differs."""


class OpRow(NamedTuple):
    """One op on one lane, or what ran inside a block: times in seconds, `bytes` that one rank sends. number: of the op."""

    lane: int
    op: Op
    kind: str  # see `op_kind`
    start: float
    end: float
    bytes: float
    launched: float
    cost: BlockCost | TransferCost
    number: int


class Period(NamedTuple):
    """Microbatches after which a step is in the state in which it was before them, `seconds` ago; end: when that is. Further ones
    repeat what happened from end − seconds to end; events: that were scheduled then. See sim.analysis.steady_state.
    """

    end: float
    seconds: float
    events: int


class DistinctOp(NamedTuple):
    """One piece of work of a lane: the number of an op that does it, that op, and how many ops of the step do it."""

    lane: int
    number: int
    op: Op
    times: int


@dataclass(repr=False)
class Timeline:
    """One played step as columns: op i of lane a is entry offset[a] + i of `start`, `end`, `launched`, `stretch` and `cost`."""

    program: Program
    lanes: list[Lane]
    offset: list[int]  # by lane: the number of its first op
    start: list[float]  # seconds
    end: list[float]  # seconds
    stretch: list[float]  # seconds by which communication on the same GPU lengthened the op
    cost: list[BlockCost | TransferCost]
    launched: list[float]  # when the host had launched a collective or send, or began to launch the kernels of a block
    events: int  # SimPy events that were scheduled
    op_costs: OpCosts  # the prices that the step was played with
    owed: dict[int, dict[str, float]] = field(default_factory=dict)  # by op: seconds by which each effect lengthened it
    resumptions: dict[int, Resumption] = field(default_factory=dict)  # by op that holds up its host
    inside: Mapping[int, Inside] = field(default_factory=dict)  # by block on links that other traffic uses
    scheduled: list[float] = field(default_factory=list)  # when each SimPy event was scheduled, in no order
    contended: float = 0.0  # when something contended for the first time: until then ops took no events
    period: Period | None = None  # of which `periods` more follow that were not played
    periods: int = 0
    variability: tuple[float, ...] = ()  # by kind of GPU, σ of the logarithm of kernels' seconds among them: not played, see
    # sim.replay.waiting
    replay: object = field(default=None, init=False, compare=False)  # see sim.replay.step.replay_of
    peaks: dict[int, object] = field(default_factory=dict, init=False, compare=False)  # by lane, see sim.analysis.memory.peak

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.start):,} ops on {len(self.lanes)} lanes, {self.step:.4g} s>"

    @cached_property
    def step(self) -> float:
        """Seconds from the start of the step to the end of the last op; of a steady state, its period."""
        return self.played + (self.periods * self.period.seconds if self.period else 0.0)

    @cached_property
    def played(self) -> float:
        """Seconds of the step without periods that were not played."""
        if self.program.cohorts[0].steady:
            return max(self._compute_end(lane, 1) - self._compute_end(lane, 0) for lane in range(len(self.lanes)))
        return max(self.end, default=0.0)

    def prices(self, lane: int) -> Prices:
        """The prices of a lane's GPU."""
        return self.op_costs.on(self.lanes[lane].rank)

    def cohort(self, lane: int) -> Cohort:
        """The cohort of a lane."""
        return self.program.cohorts[self.lanes[lane].cohort]

    def stage(self, lane: int) -> int:
        """The pipeline stage of a lane."""
        return self.cohort(lane).at.get("pp", 0)

    def ops(self, lane: int) -> Iterator[tuple[int, Op]]:
        """Numbers and ops of a lane in the step, in program order."""
        cohort, base = self.cohort(lane), self.offset[lane]
        if cohort.steady is None:
            return enumerate(cohort.ops, base)
        first, last = cohort.steady
        return enumerate(cohort.ops[first:last], base + first)

    @cached_property
    def works(self) -> list[list[DistinctOp]]:
        """The distinct pieces of work of each lane in the step."""
        result = []
        for lane, base in enumerate(self.offset):
            index = op_index(self.cohort(lane))
            times = np.bincount(index.work, self.counts[base + index.ops], minlength=len(index.works)).astype(int).tolist()
            pairs = zip(index.works, times, strict=True)
            result.append([DistinctOp(lane, base + number, op, count) for (number, op, _), count in pairs])
        return result

    @property
    def distinct(self) -> Iterator[DistinctOp]:
        """`works` lane by lane."""
        return chain.from_iterable(self.works)

    @cached_property
    def in_period(self) -> NDArray[np.bool_]:
        """Which ops end in `period`."""
        if self.period is None:
            return np.zeros(len(self.end), bool)
        return (self.ends >= self.period.end - self.period.seconds) & (self.ends < self.period.end)

    @cached_property
    def counts(self) -> Floats:
        """How often each op runs in the step, with periods that were not played."""
        return np.where(self.in_period, 1.0 + self.periods, 1.0)

    @cached_property
    def starts(self) -> Floats:
        """`start` as an array."""
        return np.array(self.start)

    @cached_property
    def ends(self) -> Floats:
        """`end` as an array."""
        return np.array(self.end)

    @cached_property
    def durations(self) -> list[float]:
        """`end` less `start`."""
        seconds: list[float] = (self.ends - self.starts).tolist()
        return seconds

    @cached_property
    def stretches(self) -> Floats:
        """`stretch` as an array."""
        return np.array(self.stretch)

    @cached_property
    def lengthened(self) -> Floats:
        """Seconds by which communication on the same GPU, and effects, lengthened each op."""
        every = self.stretches.copy()
        for op, parts in self.owed.items():
            every[op] += sum(parts.values())
        return every

    def every_op(self, lane: int) -> Iterator[tuple[int, Op]]:
        """Numbers and ops of a lane, in a steady state also those before and after the step."""
        return enumerate(self.cohort(lane).ops, self.offset[lane])

    def begin(self, lane: int) -> float:
        """When the step begins on a lane: 0, or in a steady state when its compute stream ends the step before."""
        return self._compute_end(lane, 0) if self.program.cohorts[0].steady else 0.0

    def _compute_end(self, lane: int, edge: int) -> float:
        """When a lane's compute stream ends the steps before this step (edge 0) or this step (edge 1)."""
        cohort, base = self.cohort(lane), self.offset[lane]
        before = range((cohort.steady or (0, 0))[edge] - 1, -1, -1)
        return next((self.end[base + op] for op in before if cohort.ops[op].stream == COMPUTE), 0.0)

    def rows(self) -> Iterator[OpRow]:
        """Every op of every lane."""
        for lane in range(len(self.lanes)):
            yield from self.rows_of(lane, self.ops(lane))

    def rows_of(self, lane: int, ops: Iterable[tuple[int, Op]]) -> Iterator[OpRow]:
        """Ops of a lane; instead of a block on links that other traffic uses, what ran inside it."""
        for number, op in ops:
            inside = self.inside.get(number)
            for each in inside.ops() if inside else (self._whole(number, op),):
                sent = each.cost.sent if isinstance(each.cost, TransferCost) else 0.0
                part = Op(each.stream, each.work, microbatch=op.microbatch, chunk=op.chunk) if inside else op
                times = each.start, each.end, sent, self.launched[number]
                yield OpRow(lane, part, op_kind(part), *times, each.cost, number)

    def _whole(self, number: int, op: Op) -> InsideOp:
        return InsideOp(op.stream, cast(Block, op.work), self.cost[number], self.start[number], self.end[number])

    def frame(self) -> pd.DataFrame:
        """`records` as a table. Raises ExtraMissingError without pandas."""
        table: pd.DataFrame = imported("pandas").DataFrame.from_records(self.records())
        return table

    def records(self) -> list[dict[str, Any]]:
        """One row per op; times in seconds, bytes are what one rank sends."""
        return [
            {
                "rank": self.lanes[row.lane].rank,
                "ranks": self.lanes[row.lane].ranks,
                "stage": self.stage(row.lane),
                "stream": row.op.stream,
                "op": op_label(row.op),
                "kind": row.kind,
                "microbatch": row.op.microbatch,
                "launched": row.launched,
                "start": row.start,
                "end": row.end,
                "bytes": row.bytes,
            }
            for row in self.rows()
        ]


def op_kind(op: Op) -> str:
    """The phase of a block ("forward", "backward", …), the operation of a collective; "send", "copy" or "update" (by the CPU)."""
    if isinstance(op.work, Block):
        return op.work.name
    if isinstance(op.work, Collective):
        return op.work.operation
    return ("update" if op.work.axis == CPU else "copy") if op.work.route else "send"


def op_label(op: Op) -> str:
    """The name of an op in tables and traces."""
    return op.work.name if isinstance(op.work, Block) else op.work.label
