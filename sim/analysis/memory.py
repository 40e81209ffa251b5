"""The memory ledger: what every rank holds at every moment of the timeline, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from sim.program import CACHED, MEMORY_KINDS
from sim.timeline import Timeline, op_label

UPDATE = "optimizer"  # the block of an update, which gives back all that it takes


@dataclass(frozen=True)
class Ledger:
    """One lane's memory over time.

    times: (t,) seconds; held: (t, kinds) bytes from that time on, in the order of MEMORY_KINDS.
    """

    times: NDArray[np.float64]
    held: NDArray[np.float64]
    during: list[str]  # the op that caused each change
    updating: NDArray[np.float64]  # (t,) bytes of `held` that an update has allocated
    cached: NDArray[np.float64]  # (t,) bytes besides `held` in unused blocks

    @cached_property
    def _all(self) -> NDArray[np.float64]:
        every: NDArray[np.float64] = self.held.sum(axis=1)
        return every

    @property
    def peak(self) -> float:
        """Most bytes held at one time."""
        return float(self._all.max())

    @property
    def reserved(self) -> float:
        """Bytes that PyTorch's caching allocator reserves: it gives no block back, and a tensor lies in one block. The blocks
        that passes free hold single activations, and are too small for an update's tensors (all parameters, or the largest).
        """
        return float((self._all + self.cached - self.updating).max() + self.updating.max())

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
    cohort = timeline.cohort(lane)
    first = min(0.0, *timeline.start[:1])  # of a steady state, before the step
    entries: list[tuple[float, int, int, float, str]] = [(first, 0, _KINDS[k], size, "resident") for k, size in cohort.resident]
    for number, op in timeline.every_op(lane):
        start, end, name = timeline.start[number], timeline.end[number], op_label(op)
        starts = 2 if end > start else 0  # an op of no duration takes before it gives back
        entries += [(start, starts, _KINDS[kind], size, name) for kind, size in op.allocate]
        entries += [(end, 1, _KINDS[kind], -size, name) for kind, size in op.free]
    entries.sort(key=itemgetter(0, 1))
    times, _, kinds, sizes, during = zip((first, 0, 0, 0.0, "resident"), *entries, strict=True)
    change = np.zeros((len(times), len(_KINDS)))
    change[np.arange(len(times)), kinds] = sizes
    held, updates = change.cumsum(axis=0), [name == UPDATE for name in during]
    updating = (change.sum(axis=1) * updates).cumsum()
    return Ledger(np.array(times), held[:, :-1], list(during), updating, held[:, -1])


def tensor_capacity(timeline: Timeline) -> float:
    """Bytes of a GPU that tensors may take: its capacity less the context, and less the allocator's reserve, a share of them."""
    prices, expandable = timeline.op_costs.prices, timeline.program.expandable
    overhead = prices.profile.overhead
    return (prices.gpu.memory - overhead.context) / (1 + (0.0 if expandable else overhead.reserve))


_KINDS = {kind: number for number, kind in enumerate((*MEMORY_KINDS, CACHED))}
