"""Sums over links whose numbers are spread over a whole cluster."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topologies.links.topology import Ids, Values

V = TypeVar("V", np.int64, np.float64)

_BITS = 12  # links are looked at by 4,096 neighbours
_SPARSE = 16  # links among which less than one is there on average are sorted


def distinct(values: NDArray[V]) -> NDArray[V]:
    """Sorted distinct values, as of np.unique, which imports numpy.ma first."""
    ordered = np.sort(values, axis=None)
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def summed(links: Ids, values: Values | None = None) -> tuple[Ids, Values]:
    """Distinct links, in order, and the sum of the values that each has; without values, how often each is there. A link whose
    sum is 0 is left out.
    """
    block = links >> _BITS
    used = np.flatnonzero(np.bincount(block))
    if len(used) << _BITS > _SPARSE * len(links):
        found, number, times = np.unique(links, return_inverse=True, return_counts=True)
        sums = times if values is None else np.bincount(number, values, minlength=len(found))
        return found[sums != 0], sums[sums != 0].astype(float)
    place = np.zeros(int(block.max(initial=-1)) + 1, dtype=np.int64)
    place[used] = np.arange(len(used)) << _BITS
    sums = np.bincount(place[block] + (links & ((1 << _BITS) - 1)), values)
    found = np.flatnonzero(sums)
    return (used[found >> _BITS] << _BITS) + (found & ((1 << _BITS) - 1)), sums[found].astype(float)
