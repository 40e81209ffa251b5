"""The memory ledger: what every rank holds at every moment of the timeline, by kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.program import CACHED, MEMORY_KINDS
from sim.timeline import Timeline, label

UPDATE = "optimizer"  # the block of an update, which gives back all that it takes


@dataclass(frozen=True)
class Ledger:
    """One lane's memory over time.

    times: (t,) seconds; held: (t, kinds) bytes from that time on, in the order of MEMORY_KINDS.
    """

    times: NDArray[np.float64]
    held: NDArray[np.float64]
    during: list[str]  # the op that caused each change
    updating: NDArray[np.float64]  # (t,) bytes of them that an update has taken for itself
    cached: NDArray[np.float64]  # (t,) bytes besides them in blocks that nothing uses

    @property
    def peak(self) -> float:
        """Most bytes held at one time."""
        return float(self.held.sum(axis=1).max())

    @property
    def reserved(self) -> float:
        """What PyTorch's caching allocator keeps for them: it gives nothing back, and a tensor lies in one block. What passes
        gave back is in blocks of single activations, which serve none of an update's tensors, of all parameters or the largest.
        """
        return float((self.held.sum(axis=1) + self.cached - self.updating).max() + self.updating.max())

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by kind when the peak is first reached."""
        moment = int(self.held.sum(axis=1).argmax())
        return dict(zip(MEMORY_KINDS, self.held[moment].tolist(), strict=True))

    @property
    def when(self) -> tuple[float, str]:
        """Time of the peak and the op that caused it."""
        moment = int(self.held.sum(axis=1).argmax())
        return float(self.times[moment]), self.during[moment]


def ledger(timeline: Timeline, lane: int) -> Ledger:
    """Play the allocations of a lane: taken when an op starts, given back when it ends; what ends comes before what starts."""
    cohort = timeline.program.cohorts[timeline.lanes[lane].cohort]
    first = min(0.0, *timeline.start[:1])  # of a steady state, before the step
    columns = {name: place for place, name in enumerate((*MEMORY_KINDS, CACHED))}
    entries: list[tuple[float, int, int, float, str]] = [(first, 0, columns[k], size, "resident") for k, size in cohort.resident]
    for number, op in timeline.played(lane):
        taken = 2 if timeline.end[number] > timeline.start[number] else 0  # an op of no duration takes before it gives back
        for name, size in op.allocate:
            entries.append((timeline.start[number], taken, columns[name], size, label(op)))
        for name, size in op.free:
            entries.append((timeline.end[number], 1, columns[name], -size, label(op)))
    entries.sort(key=lambda entry: entry[:2])
    change = np.zeros((len(entries) + 1, len(columns)))
    change[np.arange(1, len(entries) + 1), [entry[2] for entry in entries]] = [entry[3] for entry in entries]
    held = change.cumsum(axis=0)
    times = np.array([first, *(entry[0] for entry in entries)])
    updating = np.array([0.0, *(entry[3] * (entry[4] == UPDATE) for entry in entries)]).cumsum()
    return Ledger(times, held[:, :-1], ["resident", *(entry[4] for entry in entries)], updating, held[:, -1])
