"""Links numbered by the nodes that they belong to: frames of equally many neighbouring nodes have equally many links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topologies.links.topology import Ids


class Frames:
    """Links of several ranges, numbered in a row. starts: where each range begins, and where the last one ends; each: how many
    links of each range a frame has. The links of a frame have places 0, 1, …, range after range; the last frame may lack some.
    """

    def __init__(self, starts: Sequence[int], each: Sequence[int]) -> None:
        self._starts, self._each = np.array(starts, dtype=np.int64), np.array(each, dtype=np.int64)
        self._places = np.cumsum([0, *each])  # of the first link of each range

    @property
    def size(self) -> int:
        """Links of a frame."""
        return int(self._places[-1])

    @property
    def single(self) -> bool:
        """Whether one frame has all links."""
        return bool((np.diff(self._starts) == self._each).all())

    def split(self, links: Ids) -> tuple[Ids, Ids]:
        """(frames, places) of links."""
        span = np.searchsorted(self._starts, links, side="right") - 1
        frame, place = np.divmod(links - self._starts[span], self._each[span])
        return frame, place + self._places[span]

    def link(self, frame: Ids, place: Ids) -> Ids:
        """The links at these places of these frames."""
        span = np.searchsorted(self._places, place, side="right") - 1
        return np.asarray(self._starts[span] + frame * self._each[span] + place - self._places[span])
