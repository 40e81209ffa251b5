"""The symmetry of nodes whose GPUs are wired alike: GPU l of every node takes the place of GPU l + 1, the last that of the first.

Behind an NVSwitch and with a NIC and a leaf for each GPU, or one leaf for all, that maps links on links of equal kind, capacity
and latency, and routes on routes. Links that are mapped on each other are an orbit; the one of least number stands for it.
Traffic that is the same after the turn loads all links of an orbit alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topologies.links.sums import summed
from topologies.links.topology import Ids, Values


class Turned(NamedTuple):
    """Links of one range, `each` of which belong together, in `rails` equal parts."""

    start: int
    each: int
    rails: int


class Rotation:
    """Orbits of links. slots: of a node's links the one that each is mapped on; after them come those of `ranges`, in order."""

    def __init__(self, turns: int, slots: Ids, nodes: int, ranges: Sequence[Turned]) -> None:
        self.turns = turns  # GPUs of a node
        images = [np.arange(len(slots))]
        for _ in range(turns - 1):
            images.append(slots[images[-1]])
        self._images = np.stack(images)  # (turns, slots)
        self._first, back = self._images.min(axis=0), self._images[1:] == np.arange(len(slots))
        self._size = np.where(back.any(axis=0), back.argmax(axis=0) + 1, turns)
        self._inside, self._ranges = nodes * len(slots), ranges

    def folded(self, links: Ids, load: Values) -> tuple[Ids, Values]:
        """Distinct links that stand for orbits, and what each link of them has if the traffic that loads `links` comes once for
        each GPU of a node, turned.
        """
        first, sums = summed(self.standing(links), load)
        return first, self.times(first, sums)

    def standing(self, links: Ids) -> Ids:
        """The link that stands for the orbit of each link."""
        return self._moved(links, 0, first=True)

    def times(self, links: Ids, sums: Values) -> Values:
        """What each link has whose orbit has `sums` in one turn."""
        return sums * (self.turns / self.sizes(links))

    def sizes(self, links: Ids) -> Ids:
        """Links of the orbit of each link."""
        result = np.where(links < self._inside, self._size[links % len(self._size)], 1)
        for start, _, rails in self._ranges:
            result = np.where(links >= start, rails, result)
        return np.asarray(result)

    def expanded(self, links: Ids, values: Values) -> tuple[Ids, Values]:
        """All links of the orbits for which `links` stand, in order, each with the value of its orbit."""
        sizes = self.sizes(links)
        parts = [(self._moved(links[sizes > turn], turn), values[sizes > turn]) for turn in range(int(sizes.max(initial=0)))]
        every, each = (np.concatenate(part) for part in zip(*parts, strict=True)) if parts else (links, values)
        order = np.argsort(every)
        return every[order], each[order]

    def stands(self, links: Ids) -> NDArray[np.bool_]:
        """Whether each link stands for its orbit."""
        return np.asarray(self._moved(links, 0, first=True) == links)

    def is_invariant(self, links: Ids, values: Values) -> bool:
        """Whether all links of each orbit are among distinct `links`, which are in order, with equal values."""
        first = self._moved(links, 0, first=True)
        whole = self.sizes(links[first == links]).sum() == len(links)
        return bool(whole) and bool((values[np.searchsorted(links, first).clip(max=len(links) - 1)] == values).all())

    def _moved(self, links: Ids, turn: int, first: bool = False) -> Ids:
        """Links turned so often; or those that stand for their orbits."""
        slot = links % self._images.shape[1]
        result = links - slot + (self._first if first else self._images[turn])[slot]
        for start, each, rails in self._ranges:
            place, part = links - start, each // rails
            moved = place - place % each + place % part if first else place + turn * part
            result = np.where(place >= 0, start + moved, result)
        return np.asarray(result)


def slots_turned(slots: int, tables: Sequence[tuple[Ids, Ids]]) -> Ids | None:
    """The map of a node's links on each other that takes each first table of routes to its second; None where there is none."""
    result = np.full(slots, -1)
    for before, after in tables:
        if ((before < 0) != (after < 0)).any():
            return None
        result[before[before >= 0]] = after[after >= 0]
    for before, after in tables:
        if (result[before[before >= 0]] != after[after >= 0]).any():
            return None
    result = np.where(result < 0, np.arange(slots), result)
    return result if (np.sort(result) == np.arange(slots)).all() else None
