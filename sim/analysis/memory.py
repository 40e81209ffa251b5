"""The memory ledger: what every rank holds at every moment of the timeline, by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sim.op_index import KINDS, op_index
from sim.program import CACHED, MEMORY_KINDS, Cohort
from sim.timeline import Timeline, op_label

TOGETHER = 100_000  # changes of ledgers that are played at once


@dataclass(frozen=True)
class Ledger:
    """One lane's memory over time.

    times: (t,) seconds; held: (t, kinds) bytes from that time on, in the order of MEMORY_KINDS.
    """

    times: NDArray[np.float64]
    held: NDArray[np.float64]
    cohort: Cohort
    during: NDArray[np.int64]  # (t,) number of the op that caused each change; −1: resident
    updating: NDArray[np.float64]  # (t,) bytes of `held` that an update has allocated
    cached: NDArray[np.float64]  # (t,) bytes besides `held` in unused blocks
    pools: NDArray[np.float64]  # (t, pools) bytes of `held` in other streams' blocks, of STREAM_POOLS, or (t, 0)

    @cached_property
    def _all(self) -> NDArray[np.float64]:
        every: NDArray[np.float64] = self.held.sum(axis=1)
        return every

    @cached_property
    def _moment(self) -> int:
        """The first row with the peak."""
        return int(self._all.argmax())

    @property
    def peak(self) -> float:
        """Most bytes held at one time."""
        return float(self._all[self._moment])

    @property
    def reserved(self) -> float:
        """Bytes that PyTorch's caching allocator reserves: it gives no block back, a tensor lies in one block, and a block is
        used again only on the stream that it was allocated on. The blocks that passes free hold single activations, and are too
        small for an update's tensors (all parameters, or the largest).
        """
        computing, elsewhere = self._all + self.cached - self.updating, 0.0
        if self.pools.size:
            computing, elsewhere = computing - self.pools.sum(axis=1), self.pools.max(axis=0).sum()
        return float(computing.max() + self.updating.max() + elsewhere)

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by kind when the peak is first reached."""
        return dict(zip(MEMORY_KINDS, self.held[self._moment].tolist(), strict=True))

    @property
    def when(self) -> tuple[float, str]:
        """Time of the peak and the op that caused it."""
        op = int(self.during[self._moment])
        return float(self.times[self._moment]), "resident" if op < 0 else op_label(self.cohort.like(op))


class Peak(NamedTuple):
    """What a ledger says of its peak; see there."""

    bytes: float
    reserved: float
    kinds: dict[str, float]
    time: float
    op: str

    @classmethod
    def of(cls, book: Ledger) -> Peak:
        """The peak of a ledger."""
        return cls(book.peak, book.reserved, book.at_peak, *book.when)


def peak(timeline: Timeline, lane: int) -> Peak:
    """The peak of a lane, which is kept with the timeline."""
    if lane not in timeline.peaks:
        timeline.peaks |= dict(enumerate(map(Peak.of, every_ledger(timeline))))
    return cast(Peak, timeline.peaks[lane])


def holds_the_same(timeline: Timeline, before: float, after: float) -> bool:
    """Whether all lanes hold at one moment what they hold at another, before what begins or ends then. Peaks are kept."""
    for lane, book in enumerate(every_ledger(timeline)):
        timeline.peaks[lane] = Peak.of(book)
        first, second = (np.searchsorted(book.times, (before, after)) - 1).tolist()
        if any((of[first] != of[second]).any() for of in (book.held, book.cached, book.pools)):
            return False
    return True


def ledger(timeline: Timeline, lane: int) -> Ledger:
    """The ledger of a lane."""
    return ledgers(timeline, (lane,))[0]


def every_ledger(timeline: Timeline) -> Iterator[Ledger]:
    """The ledgers of all lanes, some of them at a time."""
    changes = np.cumsum([len(op_index(timeline.cohort(lane)).memory.ops) for lane in range(len(timeline.lanes))]) // TOGETHER
    for lanes in np.split(np.arange(len(changes)), np.flatnonzero(np.diff(changes)) + 1):
        yield from ledgers(timeline, lanes.tolist())


def ledgers(timeline: Timeline, lanes: Sequence[int]) -> list[Ledger]:
    """Play the allocations of lanes: taken when an op starts, given back when it ends; what ends comes before what starts."""
    changes = [op_index(timeline.cohort(lane)).memory for lane in lanes]
    counts = [len(each.ops) for each in changes]
    bounds = np.cumsum([0, *counts])
    op, at_end, kind, size, updated = map(np.concatenate, zip(*changes, strict=True))
    number, resident = np.repeat([timeline.offset[lane] for lane in lanes], counts) + op, op < 0
    start, end = timeline.starts[number], timeline.ends[number]
    begins = np.where(end > start, 2, 0)  # an op of no duration takes before it gives back
    time, turn = np.where(at_end, end, start), np.where(at_end, 1, begins)  # turn: of changes at one time
    time[resident], turn[resident] = min(0.0, *timeline.start[:1]), -1  # of a steady state, before the step
    order = _order(np.repeat(np.arange(len(lanes)), counts), time, turn)
    kinds = KINDS[CACHED]
    change = np.zeros((len(op), len(KINDS) if (kind > kinds).any() else kinds + 1))
    change[np.arange(len(op)), kind[order]] = size[order]
    time, op, updated = time[order], op[order], updated[order]
    result = []
    for lane, *edges in zip(lanes, bounds.tolist(), bounds[1:].tolist(), strict=False):
        every = slice(*edges)
        sums, updating = change[every].cumsum(axis=0), updated[every].cumsum()
        held, cached, pools = sums[:, :kinds], sums[:, kinds], sums[:, kinds + 1 :]
        result.append(Ledger(time[every], held, timeline.cohort(lane), op[every], updating, cached, pools))
    return result


def _order(lane: NDArray[np.int64], time: NDArray[np.float64], turn: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Changes that are in the order of lanes and ops by lane, time, turn and op: most are already."""
    later = np.diff(time)
    early = (later < 0) | ((later == 0) & (np.diff(turn) < 0))
    return np.lexsort((turn, time, lane)) if (early & (np.diff(lane) == 0)).any() else slice(None)


def tensor_capacity(timeline: Timeline) -> float:
    """Bytes of a GPU that tensors may take: its capacity less the context, and less the allocator's reserve, a share of them."""
    prices, expandable = timeline.op_costs.prices, timeline.program.expandable
    overhead = prices.profile.overhead
    return (prices.gpu.memory - overhead.context) / (1 + (0.0 if expandable else overhead.reserve))
