"""What happened: when each op started and ended on each lane, and everything that follows from it.

A lane is a rank, or a cohort of ranks that all did the same. All times are multiples of 2⁻⁴⁰ s, so sums are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sim.pricing.algorithm_choice import Priced
from sim.pricing.block_costs import Fused
from sim.pricing.op_costs import Pricing
from sim.program import COMPUTE, Block, Collective, Op, Program, Ref, Send

if TYPE_CHECKING:
    import pandas as pd

CPU = "cpu"  # the CPUs' work on the optimizer: an axis on which nothing is sent
AXES = (
    "tp",
    "cp",
    "ep",
    "dp",
    "replica",
    "pp",
    "host",
    "nvme",
    "cpu",
)  # when an idle moment has communication on several axes, the first of these explains it
PHASES = ("forward", "backward", "recompute", "optimizer")
EXPOSED = tuple(f"{axis} exposed" for axis in AXES)
COMPONENTS = (*PHASES, *EXPOSED, "launch", "slowdown", "bubble", "wait")

Interval = tuple[float, float, int]  # start, end, rank of the axis in AXES


class Lane(NamedTuple):
    """An actor: `ranks` ranks of `cohort` that do the same, the first of which is `rank`."""

    cohort: int
    rank: int
    ranks: int


@dataclass(slots=True)
class Row:
    """One op on one lane. `bytes` is what one rank sends."""

    lane: int
    op: Op
    kind: str  # "forward", "backward", … of a block; the operation of a collective; "send"
    start: float
    end: float
    bytes: float
    launched: float  # when the host had launched it, or began to launch its kernels


@dataclass
class Timeline:
    """One step as it was played. Op i of lane a has number offset[a] + i in the arrays."""

    program: Program
    lanes: list[Lane]
    offset: list[int]
    start: list[float]
    end: list[float]
    stretch: list[float]  # seconds by which communication on the same GPU slowed the op
    work: list[Fused | Priced]
    launched: list[float]  # when the host had launched the op
    events: int  # SimPy events that were scheduled
    pricing: Pricing
    _distinct: dict[int, list[tuple[int, Op, int]]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def step(self) -> float:
        """Seconds from the start of the step to the end of the last op; of a steady state, its period."""
        if self.program.cohorts[0].steady:
            return max(self._moment(lane, 1) - self._moment(lane, 0) for lane in range(len(self.lanes)))
        return max(self.end, default=0.0)

    def ops(self, lane: int) -> Iterator[tuple[int, Op]]:
        """Numbers and ops of a lane in the step, in program order."""
        cohort, base = self.program.cohorts[self.lanes[lane].cohort], self.offset[lane]
        if cohort.steady is None:
            return enumerate(cohort.ops, base)
        first, last = cohort.steady
        return enumerate(cohort.ops[first:last], base + first)

    def distinct(self, lane: int) -> Iterator[tuple[int, Op, int]]:
        """Each piece of work of a lane in the step: the number of an op that does it, the op, and how many ops do it."""
        if lane not in self._distinct:
            ops = list(self.ops(lane))
            times = Counter([id(op.work) for _, op in ops])
            last = {id(op.work): (number, op) for number, op in ops}
            self._distinct[lane] = [(number, op, times[key]) for key, (number, op) in last.items()]
        return iter(self._distinct[lane])

    def played(self, lane: int) -> Iterator[tuple[int, Op]]:
        """Numbers and ops of a lane, also those before and after the step."""
        return enumerate(self.program.cohorts[self.lanes[lane].cohort].ops, self.offset[lane])

    def begin(self, lane: int) -> float:
        """When the step begins on a lane: 0, or in a steady state when its compute stream ends the step before."""
        return self._moment(lane, 0) if self.program.cohorts[0].steady else 0.0

    def _moment(self, lane: int, edge: int) -> float:
        """When a lane's compute stream has done the steps before (0) or the step too (1)."""
        cohort, base = self.program.cohorts[self.lanes[lane].cohort], self.offset[lane]
        before = range((cohort.steady or (0, 0))[edge] - 1, -1, -1)
        return next((self.end[base + op] for op in before if cohort.ops[op].stream == COMPUTE), 0.0)

    def shifted(self) -> Timeline:
        """The same with 0 where the step begins on the first lane."""
        zero = min(self.begin(lane) for lane in range(len(self.lanes)))
        start, end, launched = ([time - zero for time in times] for times in (self.start, self.end, self.launched))
        return replace(self, start=start, end=end, launched=launched)

    def rows(self) -> Iterator[Row]:
        """Every op of every lane."""
        for lane in range(len(self.lanes)):
            for number, op in self.ops(lane):
                work = self.work[number]
                sent = work.sent if isinstance(work, Priced) else 0.0
                yield Row(lane, op, kind(op), self.start[number], self.end[number], sent, self.launched[number])

    def frame(self) -> pd.DataFrame:
        """One row per op; times in seconds, bytes are what one rank sends."""
        import pandas as pd

        records: list[dict[str, Any]] = []
        for row in self.rows():
            lane = self.lanes[row.lane]
            at = self.program.cohorts[lane.cohort].at
            records.append({
                "rank": lane.rank, "ranks": lane.ranks, "stage": at.get("pp", 0), "stream": row.op.stream, "op": label(row.op),
                "kind": row.kind, "microbatch": row.op.microbatch, "launched": row.launched,
                "start": row.start, "end": row.end, "bytes": row.bytes,
            })  # fmt: skip
        return pd.DataFrame.from_records(records)

    @cached_property
    def breakdowns(self) -> list[dict[str, float]]:
        """Per lane: seconds by component of COMPONENTS; they add up to the step exactly."""
        incoming = self._incoming()
        return [self._breakdown(lane, incoming[lane]) for lane in range(len(self.lanes))]

    def breakdown(self) -> dict[str, float]:
        """Mean over all ranks, in seconds; the largest component takes the rounding, so that the sum is the step."""
        world = sum(lane.ranks for lane in self.lanes)
        pairs = list(zip(self.lanes, self.breakdowns, strict=True))
        mean = {name: sum(lane.ranks * parts[name] for lane, parts in pairs) / world for name in COMPONENTS}
        largest = max(mean, key=lambda name: mean[name])
        mean[largest] += self.step - sum(mean.values())
        return mean

    def busy(self) -> list[float]:
        """By pipeline stage: seconds that a rank's compute stream does not wait for other stages, mean over the stage's ranks."""
        total: dict[int, list[float]] = {}
        for lane, parts in zip(self.lanes, self.breakdowns, strict=True):
            spent = sum(seconds for name, seconds in parts.items() if name not in ("bubble", "pp exposed", "wait"))
            sums = total.setdefault(self.program.cohorts[lane.cohort].at.get("pp", 0), [0.0, 0.0])
            sums[0] += lane.ranks * spent
            sums[1] += lane.ranks
        return [total[stage][0] / total[stage][1] for stage in sorted(total)]

    def _incoming(self) -> list[list[Interval]]:
        """Transfers that a lane's compute may wait for: its collectives and what is sent to it."""
        result: list[list[Interval]] = [[] for _ in self.lanes]
        first: dict[int, int] = {}
        for number, lane in enumerate(self.lanes):
            first.setdefault(lane.cohort, number)
        for number, lane in enumerate(self.lanes):
            for op_number, op in self.played(number):
                if op.stream == COMPUTE or isinstance(op.work, Block):
                    continue
                target = first[op.work.to] + number - first[lane.cohort] if isinstance(op.work, Send) else number
                result[target].append((self.start[op_number], self.end[op_number], AXES.index(op.work.axis)))
        for intervals in result:
            intervals.sort()
        return result

    def _breakdown(self, lane: int, incoming: list[Interval]) -> dict[str, float]:
        parts = dict.fromkeys(COMPONENTS, 0.0)
        cursor, next_transfer, slowed, busy = self.begin(lane), 0, 0.0, 0.0
        finish = cursor + self.step
        times: dict[int, int] = {}  # how often each distinct block ran
        distinct: dict[int, Fused] = {}
        work, start, end, stretch = self.work, self.start, self.end, self.stretch
        for number, op in self.ops(lane):
            if op.stream != COMPUTE:
                continue
            if start[number] > cursor:
                hosted, idle = self._idle(number, op, lane)
                if hosted > cursor:
                    next_transfer = _explain(parts, cursor, min(hosted, start[number]), incoming, next_transfer, "launch")
                if start[number] > max(cursor, hosted):
                    next_transfer = _explain(parts, max(cursor, hosted), start[number], incoming, next_transfer, idle)
            cursor = end[number]
            done = work[number]
            if isinstance(done, Fused):
                times[id(done)] = times.get(id(done), 0) + 1
                distinct[id(done)] = done
                slowed += stretch[number]
                busy += cursor - start[number]
            else:
                parts[f"{cast(Collective, op.work).axis} exposed"] += cursor - start[number]
        if finish > cursor:
            end_of_all = "bubble" if self.program.grid.degree("pp") > 1 else "wait"
            _explain(parts, cursor, finish, incoming, next_transfer, end_of_all)
        for key, count in times.items():
            for (name, _), seconds in distinct[key].parts.items():
                parts[name if name in COMPONENTS else f"{name} exposed"] += count * seconds
        parts["slowdown"] += slowed
        parts["launch"] += busy - slowed - sum(count * distinct[key].busy for key, count in times.items())
        return parts

    def _idle(self, number: int, op: Op, lane: int) -> tuple[float, str]:
        """Why compute was idle before an op: until when the host had not launched what it waits for; what explains the rest."""
        cohort, base = self.lanes[lane].cohort, self.offset[lane]
        hosted, between_stages = self.launched[number] if isinstance(self.work[number], Priced) else 0.0, False
        for ref in op.after:
            if ref.cohort != cohort:
                between_stages = True
                continue
            between_stages = between_stages or self._spans(ref)
            if isinstance(self.work[base + ref.op], Priced):
                hosted = max(hosted, self.launched[base + ref.op])
        return hosted, "bubble" if between_stages else "wait"

    def _spans(self, ref: Ref) -> bool:
        """Whether an op is a collective between two stages."""
        work = self.program.cohorts[ref.cohort].ops[ref.op].work
        return isinstance(work, Collective) and work.cohorts is not None

    def volumes(self) -> list[dict[str, tuple[float, float]]]:
        """Per lane: axis -> (bytes, elements) that one of its ranks sends in the step."""
        return [self._volume(lane) for lane in range(len(self.lanes))]

    def _volume(self, lane: int) -> dict[str, tuple[float, float]]:
        cohort = self.lanes[lane].cohort
        result: dict[str, tuple[float, float]] = {}
        for number, op, times in self.distinct(lane):
            for axis, size, elements in self._sent(number, op, cohort):
                before = result.get(axis, (0.0, 0.0))
                result[axis] = (before[0] + times * size, before[1] + times * elements)
        return result

    def _sent(self, number: int, op: Op, cohort: int) -> Iterator[tuple[str, float, float]]:
        """(axis, bytes, elements) of each communication of an op."""
        if isinstance(op.work, Block):
            for times, work in self.pricing.talk(op.work):
                size = times * self.pricing.collective(work, cohort).sent
                yield work.axis, size, size / work.width
        else:
            size = cast(Priced, self.work[number]).sent
            if op.work.axis == CPU:
                return
            yield op.work.axis, size, size / op.work.width


def kind(op: Op) -> str:
    """What an op is: the phase of a block, the operation of a collective, "send"."""
    if isinstance(op.work, Block):
        return op.work.name
    if isinstance(op.work, Collective):
        return op.work.operation
    return ("update" if op.work.axis == CPU else "copy") if op.work.route else "send"


def label(op: Op) -> str:
    """For people."""
    return op.work.name if isinstance(op.work, Block) else op.work.label


def _explain(parts: dict[str, float], start: float, end: float, incoming: list[Interval], skip: int, idle: str) -> int:
    """Add the idle time from start to end to the axis whose transfer was going on, the rest to `idle`.

    Returns how many transfers have ended for good, so that the next search starts there.
    """
    count = len(incoming)
    while skip < count and incoming[skip][1] <= start:
        skip += 1
    during, at = [], skip
    while at < count and incoming[at][0] < end:
        if incoming[at][1] > start:
            during.append(incoming[at])
        at += 1
    if not during:
        parts[idle] += end - start
        return skip
    if len(during) == 1:
        first, last, axis = during[0]
        shown = min(last, end) - max(first, start)
        parts[EXPOSED[axis]] += shown
        parts[idle] += end - start - shown
        return skip
    changes: dict[float, Counter[int]] = {start: Counter(), end: Counter()}  # by time, how many more transfers of each axis
    for first, last, axis in during:
        changes.setdefault(max(first, start), Counter())[axis] += 1
        changes.setdefault(min(last, end), Counter())[axis] -= 1
    going_on: Counter[int] = Counter()
    for left, right in pairwise(sorted(changes)):
        going_on.update(changes[left])
        axes = [axis for axis, count in going_on.items() if count > 0]
        parts[EXPOSED[min(axes)] if axes else idle] += right - left
    return skip
