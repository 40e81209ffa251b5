"""Rings over GPUs that are wired to each other without a switch: as many as the links between them can hold.

A ring there must go along links that exist; several rings together use all links, as NCCL's search does on a DGX-1V, whose cube
mesh of 24 double-ended links splits into three rings, each run in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

MEMBERS = 8  # the search is exhaustive; larger groups take one ring in rank order


def ring_cycles(units: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """Most rings that together use no link more often than it is there.

    units: (n, n), how many equal links lead from i to j. Each ring is a cycle through all members, from member 0, and is returned
    with its reverse. Empty when there is no such cycle or the group is too large to search.
    """
    size = len(units)
    if not 2 < size <= MEMBERS or (units != units.T).any():
        return ()
    cycles = list(_cycles(units))
    most = int(units.sum()) // (2 * size)
    best: list[tuple[int, ...]] = []
    for chosen in _packings(cycles, units.copy(), 0):
        if len(chosen) > len(best):
            best = list(chosen)
            if len(best) == most:
                break
    return tuple(ring for cycle in best for ring in (cycle, (cycle[0], *cycle[:0:-1])))


def _cycles(units: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
    """Cycles through all members, each in one of its two directions."""
    size = len(units)
    paths: list[tuple[int, ...]] = [(0,)]
    while paths:
        path = paths.pop()
        if len(path) == size:
            if units[path[-1], 0] and path[1] < path[-1]:
                yield path
            continue
        paths += [(*path, other) for other in range(size - 1, 0, -1) if units[path[-1], other] and other not in path]


def _packings(cycles: Sequence[tuple[int, ...]], left: NDArray[np.int64], start: int) -> Iterator[list[tuple[int, ...]]]:
    """Sets of cycles (one may be taken again) that the links `left` can hold, depth first."""
    for number in range(start, len(cycles)):
        cycle = np.array(cycles[number])
        following = np.roll(cycle, -1)
        if (left[cycle, following] > 0).all():
            left[cycle, following] -= 1
            left[following, cycle] -= 1
            yield [cycles[number]]
            for rest in _packings(cycles, left, number):
                yield [cycles[number], *rest]
            left[cycle, following] += 1
            left[following, cycle] += 1
