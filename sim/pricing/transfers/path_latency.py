"""Latency of a collective: hops by kind of link on the longest path that data takes through its rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Phase
from topologies.links.topology import Topology

Floats = NDArray[np.float64]
MOST = 4  # paths to a member, up to which they are compared one after the other
LONGEST_PERIOD = 1 << 16  # transfers of a ring after which it is looked for the same ones again


def hops_of(topology: Topology, routes: Ids) -> Floats:
    """Per route: 1 in the column of its outermost kind of link, and in the last column the latency of its links in seconds."""
    real = routes >= 0
    links = np.maximum(routes, 0)
    kinds = np.where(real, topology.kind(links), -1).max(axis=1, initial=-1)
    hops = np.zeros((len(routes), len(topology.kinds) + 1))
    hops[np.flatnonzero(kinds >= 0), kinds[kinds >= 0]] = 1.0
    hops[:, -1] = np.where(real, topology.latency(links), 0.0).sum(axis=1)
    return hops


def worst(hops: Floats) -> Floats:
    """The slowest sibling group of each transfer; hops is (groups, transfers, kinds + 1)."""
    if len(hops) == 1:
        return np.asarray(hops[0])
    order = hops @ np.append(1e3 ** np.arange(1, hops.shape[2]), 1.0)
    return np.asarray(hops[order.argmax(axis=0), np.arange(hops.shape[1])])


def after(
    arrival: Floats, longest: Floats, phase: Phase, times: int, hops: Floats, ends: Ids | None = None
) -> tuple[Ids, Floats]:
    """(members, longest paths to their data) that `times` rounds of `phase` change, whose transfers take `hops`.

    longest: of all paths to data so far; ends: the row of `arrival` of each end of a transfer, where it is not the end's number.
    """
    if times > 1:
        return np.arange(len(arrival)), np.tile(longest + _longest(hops, phase, times), (len(arrival), 1))
    source, destination = (phase.source, phase.destination) if ends is None else (ends[phase.source], ends[phase.destination])
    few = len(destination) * 8 < len(arrival)
    heard = np.empty(0, np.int64) if few else np.bincount(destination)
    receivers = np.unique(destination) if few else np.flatnonzero(heard)
    paths = arrival[source] + hops
    if few or heard.max() > MOST:
        rows, member = np.concatenate([arrival[receivers], paths]), np.concatenate([receivers, destination])
        order = _order(rows, member)
        last = np.flatnonzero(np.diff(member[order], append=len(arrival)))
        return receivers, rows[order[last]]
    best, number = arrival.copy(), np.empty(len(arrival), np.int64)
    while len(destination):  # one path to each member at a time
        every = np.arange(len(destination))
        number[destination] = every
        now = number[destination] == every
        there = destination[now]
        longer = _longer(paths[now], best[there])
        best[there[longer]] = paths[now][longer]
        destination, paths = destination[~now], paths[~now]
    return receivers, best[receivers]


def _longest(hops: Floats, phase: Phase, times: int) -> Floats:
    """Sum of hops on the path that data takes in `times` rounds, each receiver sending on; of the slowest start.

    A ring's data crosses fast and slow hops in turns: its latency is the sum along the path, not `times` slowest hops.
    """
    if (hops == hops[0]).all():
        return np.asarray(hops[0] * times)
    width = int(max(phase.source.max(), phase.destination.max())) + 1
    sender = np.full((int(phase.channel.max()) + 1) * width, -1)
    sender[phase.channel * width + phase.source] = np.arange(len(phase.source))
    used = np.flatnonzero(hops.any(axis=0))
    following = sender[phase.channel * width + phase.destination]
    period = _period(hops[:, used], following)
    total = np.zeros((period, hops.shape[1]))
    total[:, used] = _along(hops[:period, used], following[:period] % period, times)
    return slowest(total)


def _period(hops: Floats, following: Ids) -> int:
    """After how many transfers of a single ring, in its order, hops repeat; elsewhere all transfers."""
    size = len(following)
    if following[-1] == 0 and (following[:-1] == np.arange(1, size)).all():
        for period in (each for each in range(1, min(size, LONGEST_PERIOD)) if size % each == 0):
            if (hops[period : 2 * period] == hops[:period]).all() and (hops[period:] == hops[:-period]).all():
                return period
    return size


def _order(rows: Floats, *first: Ids) -> Ids:
    """Order by `first`, then by hops of the outermost kind, of the next one, …, then by wire."""
    used = [row for row in rows[:, :-1].T if row.any()]
    return np.lexsort((rows[:, -1], *used, *first))


def slowest(hops: Floats) -> Floats:
    """The row with most hops of the outermost kind, then of the next one: outer kinds are slower by far."""
    for column in (*range(hops.shape[1] - 2, -1, -1), -1):
        most = hops[:, column] == hops[:, column].max()
        if not most.all():
            hops = hops[most]
    return np.asarray(hops[0])


def _longer(paths: Floats, others: Floats) -> NDArray[np.bool_]:
    """Which of `paths` are slower than the other one of their row, in the order of `slowest`."""
    longer, equal = np.zeros(len(paths), dtype=bool), np.ones(len(paths), dtype=bool)
    for column in (*range(paths.shape[1] - 2, -1, -1), -1):
        more = paths[:, column] - others[:, column]
        longer |= equal & (more > 0)
        equal &= more == 0
    return longer


def _along(hops: Floats, following: Ids, times: int) -> Floats:
    """Sum of `hops` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(hops), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + hops[at], following[at]
        hops, following, times = hops + hops[following], following[following], times >> 1
    return total
