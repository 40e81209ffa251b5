"""Latency of a collective: hops by kind of link on the longest path that data takes through its rounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Phase
from topologies.links.sums import distinct
from topologies.links.topology import Topology

Floats = NDArray[np.float64]
LONGEST_PERIOD = 1 << 16  # transfers of a ring after which it is looked for the same ones again


class Hops(NamedTuple):
    """Hops of transfers. rows: distinct ones, each with the number of hops of which a kind of link is the outermost, by kind, and
    in the last column the latency of links in seconds; of: the row of each transfer.
    """

    rows: Floats
    of: Ids


def hops_of(topology: Topology, routes: Ids) -> Hops:
    """Per route a hop of its outermost kind of link, with the latency of all its links."""
    real = routes >= 0
    links = np.maximum(routes, 0)
    kinds = np.where(real, topology.kind(links), -1).max(axis=1, initial=-1)
    latency = np.where(real, topology.latency(links), 0.0).sum(axis=1)
    if len(routes) and (kinds == kinds[0]).all() and (latency == latency[0]).all():
        kinds, latency, of = kinds[:1], latency[:1], np.zeros(len(routes), np.int64)
    else:
        seconds = distinct(latency)
        place = (kinds + 1) * len(seconds) + np.searchsorted(seconds, latency)
        used = distinct(place)
        of = np.searchsorted(used, place)
        kinds, latency = used // max(len(seconds), 1) - 1, seconds[used % max(len(seconds), 1)]
    rows = np.zeros((len(kinds), len(topology.kinds) + 1))
    rows[np.flatnonzero(kinds >= 0), kinds[kinds >= 0]] = 1.0
    rows[:, -1] = latency
    return Hops(rows, of)


def worst(hops: Hops, groups: int) -> Hops:
    """The slowest sibling group of each transfer; those of each group follow those of the one before."""
    if groups == 1:
        return hops
    order = hops.rows @ np.append(1e3 ** np.arange(1, hops.rows.shape[1]), 1.0)
    of = hops.of.reshape(groups, -1)
    return Hops(hops.rows, of[order[of].argmax(axis=0), np.arange(of.shape[1])])


class Paths:
    """The longest path so far to the data of each member: `rows[of[member]]`; rows are those that there are, the slowest last."""

    def __init__(self, paths: Floats) -> None:
        """paths: of each member, shape (members, kinds + 1)."""
        self.rows, self.of = _ranked(paths)
        self.longest = self.rows[-1]  # of all paths to data so far

    def lengthen(self, phase: Phase, times: int, hops: Hops, ends: Ids | None = None) -> None:
        """`times` rounds of `phase`, whose transfers take `hops`. ends: the member at each end of transfers, where it is not the
        end's number.
        """
        if times > 1:
            self.longest = self.longest + _longest(hops, phase, times)
            self.rows, self.of = self.longest[None], np.zeros_like(self.of)
            return
        source, destination = (phase.source, phase.destination) if ends is None else (ends[phase.source], ends[phase.destination])
        before, kinds = len(self.rows), len(hops.rows)
        way = self.of[source] * kinds + hops.of
        used = _used(way, before * kinds)
        paths = self.rows[used // kinds] + hops.rows[used % kinds]
        self.rows, place = _ranked(np.concatenate([self.rows, paths]))
        number = np.empty(before * kinds, np.int64)
        number[used] = place[before:]
        comes = number[way]
        self.of = place[self.of]
        np.maximum.at(self.of, destination, comes)
        if len(destination):
            self.longest = slowest(np.stack([self.longest, self.rows[self.of[destination].max()]]))


def _used(numbers: Ids, end: int) -> Ids:
    """Which of 0 … end − 1 are among `numbers`, in order."""
    return np.flatnonzero(np.bincount(numbers, minlength=end))


def _ranked(rows: Floats) -> tuple[Floats, Ids]:
    """Distinct rows, the slowest last, and which of them each row is."""
    used = [row for row in rows[:, :-1].T if row.any()]
    order = np.lexsort((rows[:, -1], *used))
    ranked = rows[order]
    new = np.append(False, (ranked[1:] != ranked[:-1]).any(axis=1))
    place = np.empty(len(rows), np.int64)
    place[order] = np.cumsum(new)
    return np.concatenate([ranked[:1], ranked[new]]), place


def _longest(hops: Hops, phase: Phase, times: int) -> Floats:
    """Sum of hops on the path that data takes in `times` rounds, each receiver sending on; of the slowest start.

    A ring's data crosses fast and slow hops in turns: its latency is the sum along the path, not `times` slowest hops.
    """
    if len(hops.rows) == 1:
        return np.asarray(hops.rows[0] * times)
    width = int(max(phase.source.max(), phase.destination.max())) + 1
    sender = np.full((int(phase.channel.max()) + 1) * width, -1)
    sender[phase.channel * width + phase.source] = np.arange(len(phase.source))
    used = np.flatnonzero(hops.rows.any(axis=0))
    following = sender[phase.channel * width + phase.destination]
    period = _period(hops.of, following)
    total = np.zeros((period, hops.rows.shape[1]))
    total[:, used] = _along(hops.rows[:, used][hops.of[:period]], following[:period] % period, times)
    return slowest(total)


def _period(hops: Ids, following: Ids) -> int:
    """After how many transfers of a single ring, in its order, hops repeat; elsewhere all transfers."""
    size = len(following)
    if following[-1] == 0 and (following[:-1] == np.arange(1, size)).all():
        for period in (each for each in range(1, min(size, LONGEST_PERIOD)) if size % each == 0):
            if (hops[period : 2 * period] == hops[:period]).all() and (hops[period:] == hops[:-period]).all():
                return period
    return size


def slowest(hops: Floats) -> Floats:
    """The row with most hops of the outermost kind, then of the next one: outer kinds are slower by far."""
    for column in (*range(hops.shape[1] - 2, -1, -1), -1):
        most = hops[:, column] == hops[:, column].max()
        if not most.all():
            hops = hops[most]
    return np.asarray(hops[0])


def _along(hops: Floats, following: Ids, times: int) -> Floats:
    """Sum of `hops` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(hops), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + hops[at], following[at]
        hops, following, times = hops + hops[following], following[following], times >> 1
    return total
