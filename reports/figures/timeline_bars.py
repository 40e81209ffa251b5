"""A timeline as bars to draw, few enough to be a readable picture.

Consecutive ops of one pass become one bar; a lane with more passes than there is room for is cut in equal spans of time instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.analysis.breakdown import PHASES
from sim.engine.effects.jitter import Jitter
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import COMPUTE, SIDE_STREAM, SIDE_STREAM_ACROSS_NODES, Block, Collective, Send
from sim.timeline import Timeline

SEEN = 0.01  # of a bar's time: less cannot be seen
INPUT = "input gradient"  # the part of a backward pass that the stage before waits for
WEIGHT = "weight gradient"  # the part of a backward pass that nobody waits for, where a schedule runs it by itself


@dataclass
class Bar:
    """A pass, several ops that follow each other closely, or a span of time. shares: seconds by phase, axis or delay; chunk: of
    the pipeline rank, −1 where it means nothing.

    A bar of full height has shares that add up to `whole`; by default it is the sum of the shares.
    """

    start: float
    end: float
    microbatch: int
    shares: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    chunk: int = -1

    @property
    def pale(self) -> bool:
        """Whether it is of every other chunk of its rank, which figures draw in pale colours."""
        return self.chunk > 0 and self.chunk % 2 == 1


class Strips(NamedTuple):
    """What one lane draws: passes on the compute stream, and transfers by axis."""

    lane: int
    passes: list[Bar]
    transfers: Mapping[str, list[Bar]]


def strips(
    timeline: Timeline, lane: int, limit: int = 400, window: tuple[float, float] | None = None, pixels: int = 1500
) -> Strips:
    """Bars of a lane between two moments, by default of the whole step, at most `limit` on the compute stream; ops less than a
    pixel apart that are one pass are one bar.
    """
    first, last = window or (0.0, timeline.step)
    gap = (last - first) / pixels
    passes: list[Bar] = []
    transfers: dict[str, list[Bar]] = {}
    beside = 0.0  # until when the latest collective beside the compute stream runs
    for row in timeline.rows_of(lane, timeline.every_op(lane)):
        op, cost, start, end = row.op, row.cost, row.start, row.end
        if end < first or start > last:  # also of other steps of a steady state
            continue
        if isinstance(op.work, Collective | Send):
            shares = {op.work.axis: end - start}
            if op.stream in (SIDE_STREAM, SIDE_STREAM_ACROSS_NODES):
                beside = max(beside, end)
            if op.stream != COMPUTE:
                _append(transfers.setdefault(op.work.axis, []), Bar(start, end, op.microbatch, shares), gap)
                continue
        else:
            assert not isinstance(cost, TransferCost)
            shares = {}
            later = isinstance(op.work, Block) and op.work.name == WEIGHT
            for (phase, _), seconds in cost.parts.items():
                name = WEIGHT if later and phase == "backward" else phase
                shares[name] = shares.get(name, 0.0) + seconds
            stretched = timeline.stretch[row.number]  # the rest of its time it waits for the host to launch the next kernel
            if stretched and row.number in timeline.inside:  # kernels by themselves
                stretched = end - start - sum(shares.values())
            for name, seconds in (("slowdown", stretched), ("launch", end - start - stretched - sum(shares.values()))):
                if seconds > SEEN * (end - start):
                    shares[name] = seconds
        name = op.work.name if isinstance(op.work, Block) else ""
        name = "backward" if name == INPUT else name
        if passes and passes[-1].end < start <= beside + gap:  # the pass goes on, and has waited for a collective beside it
            passes[-1].end = start
        _append(passes, Bar(start, end, op.microbatch, shares, chunk=op.chunk), gap, name)
    if len(passes) > limit:
        passes = _spans(passes, first, last, limit)
    return Strips(lane, passes, transfers)


def _append(bars: list[Bar], new: Bar, gap: float, name: str = "") -> None:
    """Add a bar, or lengthen the last one with it when that is of the same microbatch and direction and has just ended."""
    last = bars[-1] if bars else None
    same = last is not None and last.microbatch == new.microbatch and new.start - last.end < gap
    same = same and last is not None and (WEIGHT in last.shares) == (WEIGHT in new.shares)
    same = same and last is not None and (last.chunk == new.chunk or -1 in (last.chunk, new.chunk))
    if last is None or not same or (name in PHASES and _direction(last) not in ("", name)):
        bars.append(new)
        return
    last.end, last.chunk = max(last.end, new.end), max(last.chunk, new.chunk)
    for key, seconds in new.shares.items():
        last.shares[key] = last.shares.get(key, 0.0) + seconds


def _spans(bars: list[Bar], first: float, last: float, count: int) -> list[Bar]:
    """The window in `count` equal spans, each with what the bars do in it; what is missing to the span's length is idle."""
    width = (last - first) / count
    spans = [Bar(first + index * width, first + (index + 1) * width, -1, {}, width) for index in range(count)]
    for bar in bars:
        busy, index = bar.end - bar.start, max(0, int((bar.start - first) / width))
        while index < count and spans[index].start < bar.end:
            span = spans[index]
            part = (min(bar.end, span.end) - max(bar.start, span.start)) / busy if busy else 0.0
            for key, seconds in bar.shares.items():
                span.shares[key] = span.shares.get(key, 0.0) + part * seconds
            index += 1
    return [span for span in spans if span.shares]


def _direction(bar: Bar) -> str:
    """The pass that a bar belongs to: recomputation is part of the backward pass."""
    if "backward" in bar.shares or "recompute" in bar.shares:
        return "backward"
    return next((phase for phase in PHASES if phase in bar.shares), "")


def chosen(timeline: Timeline, limit: int) -> list[int]:
    """At most `limit` lanes, evenly spread over all, the first and the last among them."""
    count = len(timeline.lanes)
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def played_as(timeline: Timeline) -> str:
    """The end of a title: what the step that is drawn is, besides the program's. Of the expected step of GPUs that are not quite
    alike it is the one of GPUs that are; jitter was drawn once.
    """
    alike = ", all GPUs alike" if any(timeline.variability) else ""
    drawn = any(Jitter.component in owed for owed in timeline.owed.values())
    return alike + (", one sample of jitter" if drawn else "")


def lane_names(timeline: Timeline) -> list[str]:
    """`stage 2`, or `rank 17 (stage 2)` where a stage has several lanes."""
    stages = [timeline.stage(lane) for lane in range(len(timeline.lanes))]
    alone = len(set(stages)) == len(stages)
    pairs = zip(timeline.lanes, stages, strict=True)
    return [f"stage {stage}" if alone else f"rank {lane.rank} (stage {stage})" for lane, stage in pairs]
