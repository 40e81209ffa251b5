"""Latency of a collective: hops by kind of link on the longest path that data takes through its rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Phase
from topologies.links.topology import Topology

Floats = NDArray[np.float64]


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
    receivers = np.unique(destination) if few else np.flatnonzero(np.bincount(destination))
    rows = np.concatenate([arrival[receivers], arrival[source] + hops])
    member = np.concatenate([receivers, destination])
    order = _order(rows, member)
    last = np.flatnonzero(np.diff(member[order], append=len(arrival)))
    return receivers, rows[order[last]]


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
    total = np.zeros_like(hops)
    total[:, used] = _along(hops[:, used], sender[phase.channel * width + phase.destination], times)
    return slowest(total)


def _order(rows: Floats, *first: Ids) -> Ids:
    """Order by `first`, then by hops of the outermost kind, of the next one, …, then by wire."""
    used = [row for row in rows[:, :-1].T if row.any()]
    return np.lexsort((rows[:, -1], *used, *first))


def slowest(hops: Floats) -> Floats:
    """The row with most hops of the outermost kind, then of the next one: outer kinds are slower by far."""
    return np.asarray(hops[0] if (hops == hops[0]).all() else hops[_order(hops)[-1]])


def _along(hops: Floats, following: Ids, times: int) -> Floats:
    """Sum of `hops` over `times` edges from every edge, by doubling."""
    total, at = np.zeros_like(hops), np.arange(len(following))
    while times:
        if times & 1:
            total, at = total + hops[at], following[at]
        hops, following, times = hops + hops[following], following[following], times >> 1
    return total
