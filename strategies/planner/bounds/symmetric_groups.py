"""Where one sibling group stands for all, and one pipeline stage for all: then collectives have the same price wherever they are.

Elsewhere (tp=4 on nodes of 6 GPUs, stages on an uneven tree) groups are played by themselves, and a bound has the price of the
group that is done first.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations
from math import gcd
from operator import mul
from typing import Self

import numpy as np

from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.transfers.sibling_groups import first_alike
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Cohort, Collective, Op, Program, Send
from strategies.job import Job
from topologies.cluster import Cluster
from topologies.links.topology import Ids


@lru_cache(maxsize=16384)
def alike(cluster: Cluster, grid: Grid) -> bool:
    """Whether it is certain that no two sibling groups, along whichever axes, can be told apart by links inside nodes: nodes cut
    no axis unevenly, all GPUs have the same way out of their node, and groups inside a node are wired alike.
    """
    size = cluster.node.gpus
    if not _fits(grid, size):
        return False
    inside, total = [], 1
    for axis, degree in grid.sizes:
        inside.append((axis, min(size, total * degree) // min(size, total)))
        total *= degree
    return _wired_alike(cluster, tuple(inside))


@lru_cache(maxsize=16384)
def stages_alike(cluster: Cluster, grid: Grid, inner: Grid) -> bool:
    """Whether, besides, groups inside `inner`, the innermost axes of `grid`, are wired alike at every stage of the pipeline: no
    switch has a part of such a group below it. How many are below the last switch does not matter.
    """
    if inner.world <= cluster.node.gpus:
        return True
    if cluster.fabric.periods is None:
        return False
    below = [nodes * cluster.node.gpus for nodes in cluster.fabric.periods]
    return all(size >= grid.world or _divides(inner, size) for size in below)


def _fits(grid: Grid, size: int) -> bool:
    """Whether blocks of `size` ranks hold whole numbers of groups along the innermost axes, or are held by them."""
    return size >= grid.world or _divides(grid, size)


def _divides(grid: Grid, size: int) -> bool:
    """The same where the grid is not all ranks that there are."""
    return all(total % size == 0 or size % total == 0 for total in accumulate((degree for _, degree in grid.sizes), mul))


@lru_cache(maxsize=64)
def _links(cluster: Cluster) -> tuple[Ids, Ids]:
    """A number for the way between each two GPUs of a node, and for that of each to and from another node and the node's CPUs:
    equal numbers for links of equal kind, capacity and latency. The spine is left out.
    """
    topology, size = cluster.topology(), cluster.node.gpus
    gpus, numbers = np.arange(size), dict[tuple[object, ...], int]()

    def number(source: Ids, destination: Ids) -> list[int]:
        routes, result = topology.routes(source, destination), []
        for route in routes:
            links = route[route >= 0]
            kept = links[topology.kind(links) < topology.kinds.index("spine")]
            way = tuple(zip(*(f(kept).tolist() for f in (topology.kind, topology.capacity, topology.latency)), strict=True))
            result.append(numbers.setdefault(way, len(numbers)))
        return result

    between = np.array(number(np.repeat(gpus, size), np.tile(gpus, size))).reshape(size, size)
    away = [*([number(gpus, gpus + size), number(gpus + size, gpus)] if cluster.nodes > 1 else [])]
    if topology.cpu is not None:
        away += [number(gpus, topology.place(gpus, "cpu")), number(topology.place(gpus, "cpu"), gpus)]
    return between, np.array(away, dtype=np.int64).reshape(-1, size)


@lru_cache(maxsize=4096)
def _wired_alike(cluster: Cluster, inside: tuple[tuple[str, int], ...]) -> bool:
    """Whether sibling groups along any axes are, of the ranks of one node."""
    between, away = _links(cluster)
    if not (away == away[:, :1]).all():
        return False
    others = between[~np.eye(len(between), dtype=bool)]
    if (others == others[:1]).all():
        return True
    grid, axes = Grid(inside), [axis for axis, degree in inside if degree > 1]
    along = [chosen for count in range(1, len(axes) + 1) for chosen in combinations(axes, count)]
    pairs = [between[groups[:, :, None], groups[:, None, :]] for groups in map(grid.groups, along)]
    return all((group == group[0]).all() for group in pairs)


class Soonest(OpCosts):
    """Prices of what runs inside layers where groups are not alike: a collective takes as long as for the sibling group, of
    whichever pipeline stage, that is done first.
    """

    def __init__(self, job: Job, grid: Grid, ops: list[Op], prices: Prices) -> None:
        stages = [Cohort({"pp": stage}, [] if stage else ops) for stage in sorted(set(stages_like(job.cluster, grid)))]
        super().__init__(Program(grid, stages), job.cluster.topology(), prices)
        self._soonest: dict[Collective | Send, TransferCost] = {}

    def collective(self, work: Collective | Send, cohort: int, group: int = -1) -> TransferCost:
        """See `CollectiveCosts.collective`."""
        cost = self._soonest.get(work)
        if cost is None:
            stages = range(len(self.program.cohorts))  # one of each of which others are copies, shifted by nodes or periods
            unlike = {first_alike(self.topology, self.grid, self.siblings(work, number)): number for number in reversed(stages)}
            least = min(self.least(work, number) for number in unlike.values())
            cost = self._soonest[work] = replace(super().collective(work, cohort, group), alone=least)
        return cost


@lru_cache(maxsize=4096)
def stages_like(cluster: Cluster, grid: Grid) -> tuple[int, ...]:
    """Of each stage, the first that begins at the same place of nodes and of what is above them: one is a copy of the other."""
    first = [int(grid.groups((), {"pp": stage}).min()) for stage in range(grid.degree("pp"))]
    periods = cluster.fabric.periods
    if periods is None:
        return tuple(range(len(first)))
    period = cluster.node.gpus
    for nodes in periods:
        period = period * nodes * cluster.node.gpus // gcd(period, nodes * cluster.node.gpus)
    places = [rank % period for rank in first]
    return tuple(places.index(place) for place in places)


class OfOne(OpCosts):
    """Prices of a program, of rank number `index` of each cohort, with nothing else on the links; −1: of all ranks together."""

    index = -1
    _own: dict[tuple[Collective | Send, int], TransferCost]

    def of(self, index: int) -> Self:
        """Prices of rank number `index` of each cohort."""
        other = copy(self)
        other.index, other._own = index, {}
        other._forget()
        return other

    def collective(self, work: Collective | Send, cohort: int, group: int = -1) -> TransferCost:
        """See `CollectiveCosts.collective`."""
        if self.index < 0:
            return super().collective(work, cohort, group)
        key = work, cohort
        cost = self._own.get(key)
        if cost is None:
            alone = float(self.soonest(work, cohort)[self.groups(work, cohort)[self.index]])
            cost = self._own[key] = replace(super().collective(work, cohort, group), alone=alone)
        return cost
