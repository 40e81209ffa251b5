"""The rank grid: one integer array; every group is a slice of it."""

from __future__ import annotations

import math
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
        names = [axis for axis, _ in reversed(self.sizes)]
        array = self.array()[tuple((at or {}).get(name, slice(None)) for name in names)]
        left = [name for name in names if name not in (at or {})]
        inside = [left.index(name) for name in left if name in axes]
        outside = [i for i in range(len(left)) if i not in inside]
        size = int(np.prod([array.shape[i] for i in inside], dtype=np.int64))
        return array.transpose(outside + inside).reshape(-1, size)

    def first(self, at: dict[str, int]) -> int:
        """The first rank with these coordinates."""
        rank, stride = 0, 1
        for axis, degree in self.sizes:
            rank, stride = rank + at.get(axis, 0) * stride, stride * degree
        return rank

    def count(self, at: dict[str, int]) -> int:
        """How many ranks have these coordinates."""
        return math.prod(degree for axis, degree in self.sizes if axis not in at)

    def group_of(self, axes: tuple[str, ...], at: dict[str, int] | None = None) -> NDArray[np.int64]:
        """For each rank the number of its group, as `groups` has them; meaningless for ranks that `at` leaves out."""
        groups, number = self.groups(axes, at), np.empty(self.world, np.int64)
        number[groups] = np.arange(len(groups))[:, None]
        return number

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` by axis."""
        result = {}
        for axis, degree in self.sizes:
            rank, result[axis] = divmod(rank, degree)
        return result
