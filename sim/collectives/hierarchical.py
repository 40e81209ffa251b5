"""Two levels: inside the nodes, where links are fast, and across, between the members of equal number of all nodes.

Across nodes each member sends only its share, (N−1)/N·S/G for a reduce-scatter or all-gather over N nodes of G members. Any G and
N, as long as all nodes have the same number of members.
"""

from __future__ import annotations

import numpy as np

from sim.collectives import Ids, NotApplicable, Place, Schedule, algorithms, backwards, lift
from sim.collectives.direct import all_to_all_pairwise
from sim.collectives.ring import all_gather as ring_all_gather
from sim.collectives.ring import all_reduce as ring_all_reduce


def levels(place: Place, name: str) -> Ids:
    """Members, shape (nodes, members per node). Raises NotApplicable where there are not two even levels."""
    even = place.even()
    if even is not None and min(even.shape) > 1:
        return even
    nodes = place.per_node()
    sizes = {len(node) for node in nodes}
    if len(nodes) == 1 or sizes == {1}:
        raise NotApplicable(f"{name}: needs several nodes with several members each, not {len(nodes)} × {max(sizes)}")
    if len(sizes) > 1:
        raise NotApplicable(f"{name}: the nodes have different numbers of members: {sorted(sizes)}")
    return np.array(nodes)


def _alike(members: int) -> Place:
    return Place(np.zeros(members, np.int64))


@algorithms("all_gather/hierarchical")
def all_gather(place: Place) -> Schedule:
    """A ring across, then a ring inside that carries the pieces of all nodes."""
    grid = levels(place, "all_gather/hierarchical")
    nodes, each = grid.shape
    across = lift(ring_all_gather(_alike(nodes)), grid.T, grid.T[:, :, None])
    inside = lift(ring_all_gather(_alike(each)), grid, np.broadcast_to(grid.T, (nodes, each, nodes)))
    return Schedule(place.size, across + inside)


@algorithms("reduce_scatter/hierarchical")
def reduce_scatter(place: Place) -> Schedule:
    """A ring inside that carries the pieces of all nodes, then a ring across."""
    return backwards(all_gather(place), reduce=True)


@algorithms("all_reduce/hierarchical")
def all_reduce(place: Place) -> Schedule:
    """Reduce-scatter inside, all-reduce across, all-gather inside, each by a ring."""
    grid = levels(place, "all_reduce/hierarchical")
    nodes, each = grid.shape
    gather = Schedule(place.size, lift(ring_all_gather(_alike(each)), grid, np.broadcast_to(grid.T, (nodes, each, nodes))))
    across = lift(ring_all_reduce(_alike(nodes)), grid.T, grid.T[:, :, None])
    return Schedule(place.size, backwards(gather, reduce=True).phases + across + gather.phases)


@algorithms("all_to_all/hierarchical")
def all_to_all(place: Place) -> Schedule:
    """Inside, everything is handed to the member whose number it is for; across, each sends one message per node."""
    grid = levels(place, "all_to_all/hierarchical")
    (nodes, each), n = grid.shape, place.size
    # what member i of node a has for member j of node b is number grid[a, i]·n + grid[b, j]
    inner = grid[:, :, None, None] * n + grid.T[None, None, :, :]  # a, i, j, b
    across = grid[None, :, None, :] * n + grid.T[:, None, :, None]  # j, a, b, i
    phases = lift(all_to_all_pairwise(_alike(each)), grid, inner.reshape(nodes, each * each, nodes))
    phases += lift(all_to_all_pairwise(_alike(nodes)), grid.T, across.reshape(each, nodes * nodes, each))
    return Schedule(n, phases)
