"""The memory ledger: what every rank holds at every moment of the timeline, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sim.op_index import op_index
from sim.program import CACHED, MEMORY_KINDS, Op
from sim.timeline import Timeline, op_label


@dataclass(frozen=True)
class Ledger:
    """One lane's memory over time.

    times: (t,) seconds; held: (t, kinds) bytes from that time on, in the order of MEMORY_KINDS.
    """

    times: NDArray[np.float64]
    held: NDArray[np.float64]
    ops: list[Op]  # of the lane's cohort
    during: NDArray[np.int64]  # (t,) number of the op that caused each change; −1: resident
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
        op = int(self.during[moment])
        return float(self.times[moment]), "resident" if op < 0 else op_label(self.ops[op])


class Peak(NamedTuple):
    """What a ledger says of its peak; see there."""

    bytes: float
    reserved: float
    kinds: dict[str, float]
    time: float
    op: str


def peak(timeline: Timeline, lane: int) -> Peak:
    """The peak of a lane, which is kept with the timeline."""
    known = timeline.peaks.get(lane)
    if known is None:
        book = ledger(timeline, lane)
        known = timeline.peaks[lane] = Peak(book.peak, book.reserved, book.at_peak, *book.when)
    return cast(Peak, known)


def ledger(timeline: Timeline, lane: int) -> Ledger:
    """Play the allocations of a lane: taken when an op starts, given back when it ends; what ends comes before what starts."""
    cohort, base = timeline.cohort(lane), timeline.offset[lane]
    first = min(0.0, *timeline.start[:1])  # of a steady state, before the step
    resident = [("", 0.0), *cohort.resident]
    none = np.full(len(resident), -1)
    times, turns, ops = [np.full(len(resident), first)], [none], [none]  # turn: 0, 1, 2 of those at one time
    kinds = [_KINDS.get(kind, 0) for kind, _ in resident]
    sizes = [size for _, size in resident]
    counts, updates = [1] * len(resident), [False] * len(resident)
    for allocate, free, update, numbers in op_index(cohort).holdings:
        start, end = timeline.starts[base + numbers], timeline.ends[base + numbers]
        starts = np.where(end > start, 2, 0)  # an op of no duration takes before it gives back
        ends = np.ones(len(numbers), np.int64)
        for changes, sign, time, turn in ((allocate, 1.0, start, starts), (free, -1.0, end, ends)):
            times += [time] * len(changes)
            turns += [turn] * len(changes)
            ops += [numbers] * len(changes)
            kinds += [_KINDS[kind] for kind, _ in changes]
            sizes += [sign * size for _, size in changes]
        counts += [len(numbers)] * (len(allocate) + len(free))
        updates += [update] * (len(allocate) + len(free))
    time, op = np.concatenate(times), np.concatenate(ops)
    order = np.lexsort((np.arange(len(time)), op, np.concatenate(turns), time))
    kind, size, updating = (np.repeat(values, counts)[order] for values in (kinds, sizes, updates))
    change = np.zeros((len(order), len(_KINDS)))
    change[np.arange(len(order)), kind] = size
    held = change.cumsum(axis=0)
    updated = (change.sum(axis=1) * updating).cumsum()
    return Ledger(time[order], held[:, :-1], cohort.ops, op[order], updated, held[:, -1])


def tensor_capacity(timeline: Timeline) -> float:
    """Bytes of a GPU that tensors may take: its capacity less the context, and less the allocator's reserve, a share of them."""
    prices, expandable = timeline.op_costs.prices, timeline.program.expandable
    overhead = prices.profile.overhead
    return (prices.gpu.memory - overhead.context) / (1 + (0.0 if expandable else overhead.reserve))


_KINDS = {kind: number for number, kind in enumerate((*MEMORY_KINDS, CACHED))}
