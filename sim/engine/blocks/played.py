"""The kernels and collectives of a block with their times, as they were played: for traces, charts and tables.

A block on links that other traffic uses is one event wherever it was alone on them; there its pieces follow each other as their
segments say. Elsewhere they were tasks with times of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sim.engine.blocks.segments import Rest, SegmentedBlock
from sim.pricing.block_costs import Beside, BlockCost
from sim.timeline import InsideOp

Span = tuple[float, float]  # start and end, seconds


class Passage(NamedTuple):
    """Segments number `first` to before `last` of a block (None: to its end), from `begin` to `end`. spans: of the pieces of a
    segment that was played piece by piece; empty where the segments were one event.
    """

    first: int
    last: int | None
    begin: float
    end: float
    spans: tuple[Span, ...] = ()

    def later(self, seconds: float) -> Passage:
        """The same passage, so much later."""
        spans = tuple((start + seconds, end + seconds) for start, end in self.spans)
        return self._replace(begin=self.begin + seconds, end=self.end + seconds, spans=spans)


class PlayedBlock(NamedTuple):
    """A block that was played. launched: when its first kernel was; slowdown: of kernels beside collectives, as a factor."""

    segmented: SegmentedBlock
    passages: tuple[Passage, ...]
    launched: float
    slowdown: float

    def later(self, seconds: float, launches: float | None = None) -> PlayedBlock:
        """The same block, so much later. launches: by how much it is launched later, where that differs."""
        launched = self.launched + (seconds if launches is None else launches)
        return self._replace(passages=tuple(each.later(seconds) for each in self.passages), launched=launched)

    def ops(self) -> Iterator[InsideOp]:
        """Its kernels in a row and its collectives, in the order of their launches."""
        for passage in self.passages:
            rests, begin = self.segmented.segments[passage.first : passage.last], passage.begin
            spans = list(passage.spans)
            if not spans:
                for rest in rests:
                    spans += alone(rest, begin, self.launched + rest.launch, self.slowdown)
                    begin = max(begin + rest.segment.cost.busy, self.launched + rest.launch + rest.segment.cost.critical)
                spans = _stretched(spans, passage, begin)
            pieces = [piece for rest in rests for piece in rest.segment.pieces]
            for piece, (start, end) in zip(pieces, spans, strict=True):
                yield InsideOp(piece.stream, piece.work, piece.cost, start, end)


def _stretched(spans: list[Span], passage: Passage, end: float) -> list[Span]:
    """Spans up to `end` drawn out to the passage's: effects on its GPU are not in the prices of segments."""
    if end == passage.end or end == passage.begin:
        return spans
    factor = (passage.end - passage.begin) / (end - passage.begin)
    return [(passage.begin + (a - passage.begin) * factor, passage.begin + (b - passage.begin) * factor) for a, b in spans]


def alone(rest: Rest, begin: float, launch: float, slowdown: float) -> list[Span]:
    """Of each piece of a segment that begins at `begin`, and is launched from `launch` on, with nothing else on its links."""
    spans: list[Span] = []
    beside = Beside(slowdown)
    for piece in rest.segment.pieces:
        start, launched = max((spans[each][1] for each in piece.waits), default=begin), launch + piece.launch
        if isinstance(piece.cost, BlockCost):
            slowed = beside.slowed(piece.seconds, start)
            spans.append((start, max(start + piece.seconds + slowed, launched + piece.critical)))
        else:
            start = max(start, launched)
            spans.append((start, start + piece.seconds))
            beside.add(start + piece.seconds, piece.cost.slowing)
    return spans
