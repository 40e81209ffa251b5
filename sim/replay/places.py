"""Ranks that are worked out as one when a step is replayed, and the groups in which they meet."""

from __future__ import annotations

from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.grid import Grid
from sim.op_index import op_index
from sim.program import Block, Collective, Program
from sim.remembered import remembered
from topologies.links.sums import distinct
from topologies.links.topology import Ids

Floats = NDArray[np.float64]
Column = float | Floats  # a number, or shape (places, 1), or with samples of its own (places or 1, samples)


class Groups(NamedTuple):
    """The groups in which the places of one or several cohorts meet. order: places by group, where there are several."""

    group: Ids
    order: Ids | None
    first: Ids

    @classmethod
    def of(cls, ids: list[Ids]) -> Groups | None:
        """None where every place is a group by itself."""
        group = np.unique(np.concatenate(ids), return_inverse=True)[1].ravel()
        count = int(group.max()) + 1
        if count == len(group):
            return None
        order = np.argsort(group, kind="stable") if count > 1 else None
        return cls(group, order, np.searchsorted(group[order], np.arange(count)) if order is not None else group[:1])

    def latest(self, arrived: list[Floats]) -> list[Floats]:
        """The time of each group's last, for all of its places."""
        if self.order is None:
            every = [np.maximum.reduce(each, axis=0, keepdims=True) for each in arrived]  # without the wrapper of `max`
            return [reduce(np.maximum, every)] * len(arrived)
        samples = max(each.shape[1] for each in arrived)
        places = len(self.group) // len(arrived)
        wide = np.concatenate([np.broadcast_to(each, (places, samples)) for each in arrived])
        latest = np.maximum.reduceat(wide[self.order], self.first, axis=0)
        return list(latest[self.group].reshape(len(arrived), places, samples))


class Places:
    """Ranks of a cohort that meet inside blocks are one place. Where cohorts share their ranks (`Program.allotments`), places of
    each stand for all of them, and those that run another program come to nothing. lane: of each rank of a cohort, None: one.
    """

    def __init__(self, program: Program, lane: Ids | None = None) -> None:
        self.grid = program.grid
        self._at = [cohort.at for cohort in program.cohorts]
        self.inside = axes_inside(program)
        self._example, self._place = _arranged(self.grid, tuple(self._at[0].items()), self.inside)
        self.count = len(self._example)
        self._lane = np.zeros(self.count, np.int64) if lane is None else lane[self._example]
        allotted = np.array(program.allotments or np.zeros(len(self._place), np.int64))[self._example]
        self._own = [allotted == cohort.allotment for cohort in program.cohorts]

    @cached_property
    def ranks(self) -> list[Ids]:
        """The ranks of each cohort."""
        return [self.grid.groups((), at).ravel() for at in self._at]

    def column(self, cohort: int, values: list[float]) -> Column:
        """Values of a cohort's lanes: a number where all are equal, else of shape (places, 1)."""
        first = values[0]
        if len(values) == 1 or values.count(first) == len(values):
            return first
        return self.rows(cohort, np.array(values).reshape(-1, 1))

    def rows(self, cohort: int, values: Floats) -> Floats:
        """Values of a cohort's lanes, shape (lanes, samples), as shape (places, samples), or (1, samples) of a single lane."""
        if len(values) == 1:
            return values
        lanes = distinct(self._lane[self._own[cohort]])
        result: Floats = values[np.searchsorted(lanes, self._lane).clip(max=len(lanes) - 1)]
        return result

    def groups(self, work: Collective, cohort: int) -> Ids:
        """The group of each place of a collective that is an op; of a place that runs another program, one of its own."""
        alone = -1 - cohort * self.count - np.arange(self.count)
        groups = self.grid.numbers(() if work.cohorts else work.axes, self._at[cohort])
        return np.where(self._own[cohort], groups[self._example], alone)

    def slowest(self, kernels: Floats) -> list[Floats]:
        """By cohort, the largest factor of the ranks of each place, shape (places, samples)."""
        order = np.argsort(self._place, kind="stable")
        first = np.searchsorted(self._place[order], np.arange(self.count))
        return [np.maximum.reduceat(kernels[ranks[order]], first, axis=0) for ranks in self.ranks]

    def latest(self, values: list[Floats]) -> Floats:
        """The largest value of all places, shape (samples,), given those of each cohort's places."""
        most = [own[mine].max(axis=0) for mine, own in zip(self._own, values, strict=True) if mine.any()]
        result: Floats = np.maximum.reduce(most)
        return result

    def by_rank(self, values: list[Floats]) -> Floats:
        """Values of each cohort's places as those of their ranks, in the order of ranks."""
        result = np.empty((self.grid.world, values[0].shape[1]))
        for ranks, mine, own in zip(self.ranks, self._own, values, strict=True):
            running = mine[self._place]
            result[ranks[running]] = own[self._place][running]
        return result


@lru_cache(maxsize=64)
def _arranged(grid: Grid, at: tuple[tuple[str, int], ...], inside: tuple[str, ...]) -> tuple[Ids, Ids]:
    """Of the ranks at these coordinates the first of each place, and the place of each."""
    _, example, place = np.unique(
        grid.group_of(grid.groups((), dict(at)).ravel(), inside), return_index=True, return_inverse=True
    )
    return example, place


@remembered
def axes_inside(program: Program) -> tuple[str, ...]:
    """Axes along which ranks meet inside blocks."""
    axes: dict[str, None] = {}
    for cohort in program.cohorts:
        blocks = [op.work for _, op, _ in op_index(cohort).works if isinstance(op.work, Block)]
        for items in dict.fromkeys(run.items for block in blocks for run in block.runs):
            axes |= dict.fromkeys(axis for axis in items.axes if axis not in cohort.at)
    return tuple(axes)
