"""The memory ledger: what every rank holds at every moment of the timeline, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from sim.program import MEMORY_KINDS
from sim.timeline import Timeline, label


@dataclass(frozen=True)
class Ledger:
    """One lane's memory over time.

    times: (t,) seconds; held: (t, kinds) bytes from that time on, in the order of MEMORY_KINDS.
    """

    times: NDArray[np.float64]
    held: NDArray[np.float64]
    during: list[str]  # the op that caused each change

    @cached_property
    def _all(self) -> NDArray[np.float64]:
        every: NDArray[np.float64] = self.held.sum(axis=1)
        return every

    @property
    def peak(self) -> float:
        """Most bytes held at one time."""
        return float(self._all.max())

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by kind when the peak is first reached."""
        return dict(zip(MEMORY_KINDS, self.held[int(self._all.argmax())].tolist(), strict=True))

    @property
    def when(self) -> tuple[float, str]:
        """Time of the peak and the op that caused it."""
        moment = int(self._all.argmax())
        return float(self.times[moment]), self.during[moment]


def ledger(timeline: Timeline, lane: int) -> Ledger:
    """Play the allocations of a lane: taken when an op starts, given back when it ends; what ends comes before what starts."""
    cohort = timeline.program.cohorts[timeline.lanes[lane].cohort]
    first = min(0.0, *timeline.start[:1])  # of a steady state, before the step
    entries: list[tuple[float, int, int, float, str]] = [(first, 0, _KINDS[k], size, "resident") for k, size in cohort.resident]
    for number, op in timeline.played(lane):
        start, end, name = timeline.start[number], timeline.end[number], label(op)
        taken = 2 if end > start else 0  # an op of no duration takes before it gives back
        entries += [(start, taken, _KINDS[kind], size, name) for kind, size in op.allocate]
        entries += [(end, 1, _KINDS[kind], -size, name) for kind, size in op.free]
    entries.sort(key=itemgetter(0, 1))
    times, _, kinds, sizes, during = zip((first, 0, 0, 0.0, "resident"), *entries, strict=True)
    change = np.zeros((len(times), len(MEMORY_KINDS)))
    change[np.arange(len(times)), kinds] = sizes
    return Ledger(np.array(times), change.cumsum(axis=0), list(during))


_KINDS = {kind: number for number, kind in enumerate(MEMORY_KINDS)}
