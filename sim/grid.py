"""The rank grid: one integer array; every group is a slice of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER = ("tp", "cp", "ep", "dp", "pp")  # Megatron-LM's order: tp innermost (neighbouring ranks), pp outermost


@dataclass(frozen=True)
class Grid:
    """World of ranks with coordinates along `order` (innermost first); sizes default to 1."""

    sizes: tuple[tuple[str, int], ...]  # (axis, degree), innermost first

    @classmethod
    def of(cls, order: tuple[str, ...] = ORDER, **degrees: int) -> Grid:
        """`Grid.of(tp=8, dp=4)`; the axes that are not named have degree 1."""
        unknown = set(degrees) - set(order)
        if unknown:
            raise ValueError(f"no axis {sorted(unknown)} in order {order}")
        return cls(tuple((axis, degrees.get(axis, 1)) for axis in order))

    @property
    def world(self) -> int:
        """Number of ranks W, the product of all degrees."""
        return math.prod(degree for _, degree in self.sizes)

    @property
    def communicators(self) -> int:
        """Number of communicators of a rank: one per axis, and with several axes one of all ranks (norms of gradients,
        barriers).
        """
        along = sum(degree > 1 for _, degree in self.sizes)
        return along + (along > 1)

    def degree(self, axis: str) -> int:
        """Size of `axis`."""
        return dict(self.sizes)[axis]

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of ranks of a group along `axes`."""
        return math.prod(self.degree(axis) for axis in axes)

    def array(self) -> NDArray[np.int64]:
        """Ranks, shape = degrees with the outermost axis first, so that ranks run 0, 1, 2 … along the innermost axis."""
        return np.arange(self.world).reshape([degree for _, degree in reversed(self.sizes)])

    def groups(self, axes: tuple[str, ...], at: dict[str, int] | None = None) -> NDArray[np.int64]:
        """Every group of ranks that differ only along `axes`, shape (groups, members), members in rank order.

        `at` keeps only ranks with these coordinates along other axes.
        """
        free = [name for name, _ in self.sizes if name not in (at or {})]
        firsts = self._along([name for name in free if name not in axes]) + self.first(at or {})
        return firsts[:, None] + self._along([name for name in free if name in axes])

    def group(self, number: int, axes: tuple[str, ...], at: dict[str, int] | None = None) -> NDArray[np.int64]:
        """One of `groups`, shape (members,)."""
        first, fixed = self.first(at or {}), at or {}
        stride = 1
        for axis, degree in self.sizes:
            if axis not in axes and axis not in fixed:
                number, place = divmod(number, degree)
                first += place * stride
            stride *= degree
        return self._along([name for name, _ in self.sizes if name in axes and name not in fixed]) + first

    def _along(self, axes: Sequence[str]) -> NDArray[np.int64]:
        """Ranks with all coordinates along `axes`, which are innermost first, and 0 along all others; in order."""
        ranks, stride = np.zeros(1, np.int64), 1
        for axis, degree in self.sizes:
            if axis in axes and degree > 1:
                ranks = (np.arange(degree)[:, None] * stride + ranks).ravel()
            stride *= degree
        return ranks

    def are_at(self, ranks: NDArray[np.int64], at: dict[str, int]) -> NDArray[np.bool_]:
        """Whether each of `ranks` has these coordinates."""
        result, stride = np.ones(len(ranks), dtype=bool), 1
        for axis, degree in self.sizes:
            if axis in at:
                result &= ranks // stride % degree == at[axis]
            stride *= degree
        return result

    def first(self, at: dict[str, int]) -> int:
        """The first rank with these coordinates."""
        rank, stride = 0, 1
        for axis, degree in self.sizes:
            rank, stride = rank + at.get(axis, 0) * stride, stride * degree
        return rank

    def count(self, at: dict[str, int]) -> int:
        """How many ranks have these coordinates."""
        return math.prod(degree for axis, degree in self.sizes if axis not in at)

    def numbers(self, axes: tuple[str, ...], at: dict[str, int]) -> NDArray[np.int64]:
        """The number of the group along `axes` of each of the ranks at these coordinates."""
        others = {axis: place for axis, place in at.items() if axis not in axes}
        return self.group_of(self.groups((), at).ravel(), axes, others)

    def group_of(self, ranks: NDArray[np.int64], axes: tuple[str, ...], at: dict[str, int] | None = None) -> NDArray[np.int64]:
        """The number of the group of each of `ranks`, as `groups` has them; `ranks` are at the coordinates `at`."""
        number, stride, groups = np.zeros_like(ranks), 1, 1
        for axis, degree in self.sizes:
            if axis not in axes and axis not in (at or {}):
                number = number + ranks // stride % degree * groups
                groups *= degree
            stride *= degree
        return number

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` by axis."""
        result = {}
        for axis, degree in self.sizes:
            rank, result[axis] = divmod(rank, degree)
        return result
