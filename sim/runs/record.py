"""What a run did when: spans of one cause each, and inside training every save and evaluation, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sim.runs import ledger as causes
from sim.runs.segment import Segment

SHORTEST = 1e-6  # seconds of a span that is kept: below, it is rounding


class Span(NamedTuple):
    """From `start` to `end` (seconds) on one cause. segment, origin: of training, what is played and when its first step began;
    pauses: causes of the segment's pauses, in their order.
    """

    start: float
    end: float
    cause: str
    segment: Segment | None = None
    origin: float = 0.0
    pauses: tuple[str, ...] = ()

    def until(self, time: float, cause: str) -> tuple[Span, ...]:
        """This span up to `time`, and the rest of it with `cause`; parts without length are left out."""
        cut = min(max(time, self.start), self.end)
        parts = (self._replace(end=cut), self._replace(start=cut, cause=cause))
        return tuple(part for part in parts if part.end - part.start > SHORTEST)

    def pieces(self, start: float, end: float) -> Iterator[tuple[float, float, str]]:
        """(start, end, cause) of all that lies between two times, saves and evaluations as pieces of their own."""
        begin, stop = max(start, self.start), min(end, self.end)
        if begin >= stop:
            return
        if self.segment is not None:
            for left, right, cause in self._paused(begin, stop):
                if left > begin:
                    yield begin, left, self.cause
                yield left, right, cause
                begin = right
        if begin < stop:
            yield begin, stop, self.cause

    def _paused(self, start: float, end: float) -> Iterator[tuple[float, float, str]]:
        """Pauses of training between two times, each cut at them."""
        segment = self.segment
        assert segment is not None
        if not any(pause.seconds for pause in segment.pauses):
            return
        step = segment.last_before(start - self.origin)
        while True:
            left = self.origin + segment.computed(step)
            if left >= end:
                return
            for pause, cause in zip(segment.pauses, self.pauses, strict=True):
                if step > segment.first and step % pause.steps == 0 and pause.seconds:
                    right = left + pause.seconds
                    if right > start and left < end:
                        yield max(left, start), min(right, end), cause
                    left = right
            step = min((step // pause.steps + 1) * pause.steps for pause in segment.pauses if pause.seconds)


def in_vain(record: list[Span], step: int) -> None:
    """Training after the pauses that follow `step` was lost: mark it in the record, from its end on."""
    for number in range(len(record) - 1, -1, -1):
        span = record[number]
        if span.segment is None or span.cause != causes.PRODUCTIVE:
            continue
        if span.segment.first > step:
            record[number] = span._replace(cause=causes.WASTED)
            continue
        record[number : number + 1] = span.until(span.origin + span.segment.left(step), causes.WASTED)
        return


def costliest(record: Sequence[Span]) -> tuple[float, float] | None:
    """When the longest interruption after which training went on began and ended, with what was lost before it; None: none."""
    longest, first, last = None, None, 0.0
    for span in record:
        if span.cause != causes.PRODUCTIVE:
            last = span.end
            continue
        if first is not None and last > first and (longest is None or last - first > longest[1] - longest[0]):
            longest = (first, last)
        first = span.end
    return longest
