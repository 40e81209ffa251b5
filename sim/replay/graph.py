"""Ops with durations, waits and rendezvous as a graph, whose times are max-plus sums.

An op is ready when every op that it waits for has ended, plus its own delay; one that waits for nothing is ready at 0, plus its
delay. Ops of one rendezvous start together, when the last of them is ready, and each then lasts its own duration. Durations and
delays may have trailing axes (samples, what-ifs), which one evaluation works out together.

Evaluation goes level by level: rendezvous that wait only for earlier levels, equally many waits each, take a few numpy calls,
however many ops and samples there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
NARROW = 32  # rendezvous that become ready together, up to which a loop is faster than numpy


class CycleError(ValueError):
    """Ops wait for each other in a circle; `op` never starts."""

    def __init__(self, op: int) -> None:
        super().__init__(f"op {op} never starts: what it waits for waits in a circle")
        self.op = op


class Times(NamedTuple):
    """When each op starts and ends, in seconds; shape (ops, *samples)."""

    start: Floats
    end: Floats


class Late(NamedTuple):
    """Ops that start and end at the soonest at these times, shapes (ops,) and (ops, samples)."""

    ops: Integers
    start: Floats
    end: Floats


class _Batch(NamedTuple):
    """Rendezvous of one level with equally many waits; ops and waits lie next to each other in the order of evaluation."""

    ops: slice
    waits: slice  # the first wait of each rendezvous, then the second of each, …
    size: int  # rendezvous
    joined: Integers | None  # rendezvous of each op, counted from the batch's first; None where every op is by itself


class Graph:
    """`count` ops, of which after[k] waits for the end of before[k]. Ops of the same number ≥ 0 in `rendezvous` start together;
    an op of −1 starts by itself. Raises CycleError.
    """

    def __init__(self, count: int, before: ArrayLike, after: ArrayLike, rendezvous: ArrayLike | None = None) -> None:
        awaited, waiting = np.asarray(before, np.int64), np.asarray(after, np.int64)
        meeting = _numbered(count, rendezvous)
        levels = _levels(meeting, awaited, waiting)
        idle = np.flatnonzero(np.bincount(waiting, minlength=count) == 0)  # these wait for an origin, which ends at 0
        awaited, waiting = np.append(awaited, np.full(len(idle), count)), np.append(waiting, idle)
        waits = np.bincount(meeting[waiting], minlength=len(levels))
        by_batch = np.lexsort((waits, levels))
        meeting, waits, levels = _inverse(by_batch)[meeting], waits[by_batch], levels[by_batch]
        self.count = count
        self._order = np.argsort(meeting, kind="stable")
        self._place = _inverse(self._order)
        starts = np.flatnonzero(np.diff(levels, prepend=-1) | np.diff(waits, prepend=-1))  # first rendezvous of each batch
        by_place = _by_batch(meeting[waiting], waits, starts)
        self._waiting, self._awaited = waiting[by_place], np.append(self._place, count)[awaited[by_place]]
        self._batches = _sliced(meeting[self._order], waits, np.append(starts, len(levels)))

    def times(
        self,
        durations: ArrayLike,
        delays: ArrayLike | None = None,
        soonest: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> Times:
        """Start and end of every op. Shape of durations: (ops, *samples); delays have that shape, or (ops,). soonest: by op, when
        it starts and ends at the soonest.
        """
        lasting = np.asarray(durations, np.float64)[self._order]
        samples = lasting.shape[1:]
        start, end = np.empty_like(lasting), np.zeros((self.count + 1, *samples))
        late = None if delays is None else _with_axes(delays, lasting.ndim)[self._waiting]
        begin, over = (None, None) if soonest is None else (_with_axes(each, lasting.ndim)[self._order] for each in soonest)
        for ops, waits, size, joined in self._batches:
            ready = end[self._awaited[waits]]
            if late is not None:
                ready += late[waits]
            met = ready.reshape(-1, size, *samples).max(axis=0)
            if begin is not None:
                _no_sooner(met, begin[ops], joined)
            start[ops] = met if joined is None else met[joined]
            np.add(start[ops], lasting[ops], out=end[ops])
            if over is not None:
                np.maximum(end[ops], over[ops], out=end[ops])
        return Times(start[self._place], end[self._place])

    def ends(self, of: Integers, table: Floats, row: Integers, late: Late) -> Floats:
        """When ops number `of` end, shape (ops, samples), if each op lasts `table[row]`; only the ends of all ops are held."""
        row, place = row[self._order], self._place[late.ops]
        by_place = np.argsort(place)
        place, soonest, over = place[by_place], late.start[by_place], late.end[by_place]
        bounds = np.searchsorted(place, [batch.ops.start for batch in self._batches] + [self.count]).tolist()
        end = np.zeros((self.count + 1, table.shape[1]))
        for (ops, waits, size, joined), first, last in zip(self._batches, bounds, bounds[1:], strict=False):
            met = end[self._awaited[waits]]
            if len(met) > size:
                met = met.reshape(-1, size, table.shape[1]).max(axis=0)
            if first < last:
                mine = place[first:last] - ops.start
                np.maximum.at(met, mine if joined is None else joined[mine], soonest[first:last, None])
            np.add(met if joined is None else met[joined], table[row[ops]], out=end[ops])
            if first < last:
                end[place[first:last]] = np.maximum(end[place[first:last]], over[first:last])
        return end[self._place[of]]

    def ready(self, ends: ArrayLike) -> Floats:
        """When each op is ready, without delays, if ops end at `ends`: the latest end that it waits for, or 0."""
        given = np.asarray(ends, np.float64)
        end = np.concatenate((given[self._order], np.zeros((1, *given.shape[1:]))))
        result = np.zeros_like(given)
        np.maximum.at(result, self._waiting, end[self._awaited])
        return result


def _no_sooner(met: Floats, soonest: Floats, joined: Integers | None) -> None:
    """Let rendezvous begin when the last of their ops may. joined: the rendezvous of each op; None: its own."""
    if joined is None:
        np.maximum(met, soonest, out=met)
    else:
        np.maximum.at(met, joined, soonest)


def _inverse(order: Integers) -> Integers:
    """The place of each number in a permutation."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def _numbered(count: int, rendezvous: ArrayLike | None) -> Integers:
    """Rendezvous of each op, numbered without gaps; an op by itself is one too."""
    if rendezvous is None:
        return np.arange(count)
    given = np.asarray(rendezvous, np.int64)
    apart = np.where(given < 0, given.max(initial=-1) + 1 + np.arange(count), given)
    return np.unique(apart, return_inverse=True)[1].astype(np.int64)


def _levels(meeting: Integers, before: Integers, after: Integers) -> Integers:
    """Level of each rendezvous: the most waits in a row that lead to it. Raises CycleError."""
    count = int(meeting.max(initial=-1)) + 1
    by_source = np.argsort(meeting[before], kind="stable")
    followers = meeting[after][by_source]
    first = np.searchsorted(meeting[before][by_source], np.arange(count + 1))
    missing = np.bincount(followers, minlength=count)
    levels = np.full(count, -1, np.int64)
    ready, level = np.flatnonzero(missing == 0), 0
    while len(ready):
        levels[ready] = level
        free = _freed_in_a_loop if len(ready) < NARROW else _freed
        ready, level = free(ready, first, followers, missing), level + 1
    if (levels < 0).any():
        raise CycleError(int(np.flatnonzero(levels[meeting] < 0)[0]))
    return levels


def _freed(ready: Integers, first: Integers, followers: Integers, missing: Integers) -> Integers:
    """What becomes ready after `ready`; counts down what is missing."""
    low, lengths = first[ready], first[ready + 1] - first[ready]
    after = followers[np.arange(lengths.sum()) + np.repeat(low - (np.cumsum(lengths) - lengths), lengths)]
    np.subtract.at(missing, after, 1)
    done = after[missing[after] == 0]
    missing[done] = -1 - np.arange(len(done))  # each is there as often as it waits: its last place is kept
    last: NDArray[np.bool_] = missing[done] == -1 - np.arange(len(done))
    freed: Integers = done[last]
    return freed


def _freed_in_a_loop(ready: Integers, first: Integers, followers: Integers, missing: Integers) -> Integers:
    result = []
    for each in ready.tolist():
        for follower in followers[first[each] : first[each + 1]].tolist():
            missing[follower] -= 1
            if not missing[follower]:
                result.append(follower)
    return np.array(result, np.int64)


def _by_batch(waiting: Integers, waits: Integers, starts: Integers) -> Integers:
    """Waits in the order of evaluation, given the rendezvous that waits: batch by batch, first waits before second ones."""
    by_rendezvous = np.argsort(waiting, kind="stable")
    nth = np.arange(len(waiting)) - np.repeat(np.cumsum(waits) - waits, waits)
    bounds = np.append(starts, len(waits))
    size = np.repeat(np.diff(bounds), np.diff(bounds))  # rendezvous of the batch of each rendezvous
    first = (np.cumsum(waits) - waits)[np.repeat(starts, np.diff(bounds))]  # the first wait of its batch
    place = np.repeat(first + np.arange(len(waits)) - np.repeat(starts, np.diff(bounds)), waits) + nth * np.repeat(size, waits)
    result = np.empty_like(by_rendezvous)
    result[place] = by_rendezvous
    return result


def _sliced(meeting: Integers, waits: Integers, bounds: Integers) -> list[_Batch]:
    """Batches; meeting: rendezvous of the ops in the order of evaluation; waits: of each; bounds: first rendezvous of each
    batch.
    """
    ops = np.searchsorted(meeting, bounds)
    last_waits = np.append(0, np.cumsum(waits))[bounds]
    result = []
    for place in range(len(bounds) - 1):
        (low, high), (first, last), (wait, end) = (array[place : place + 2].tolist() for array in (bounds, ops, last_waits))
        joined = None if last - first == high - low else meeting[first:last] - low
        result.append(_Batch(slice(first, last), slice(wait, end), high - low, joined))
    return result


def _with_axes(values: ArrayLike, axes: int) -> Floats:
    """Values with axes of length 1 appended."""
    array = np.asarray(values, np.float64)
    return array.reshape(array.shape + (1,) * (axes - array.ndim))
