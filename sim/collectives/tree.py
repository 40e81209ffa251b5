"""All-reduce along two complementary binary trees, each with half of the data: latency grows with log₂ of the number of nodes.

Sanders, Speck and Träff 2009 (doi:10.1016/j.parco.2009.09.001); NCCL's "Tree" (github.com/NVIDIA/nccl src/graph/trees.cc). Nodes
are joined by the trees, members of a node by a chain; a node that is inner in one tree is a leaf of the other, so each sends
about 2·S. As with rings there are as many pairs of trees as members in a node, each through another NIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.collectives import PIECES, Ids, Phase, Place, Schedule, algorithms, backwards, together, turning


@algorithms("all_reduce/tree")
@turning
def all_reduce(place: Place) -> Schedule:
    """Up the trees adding, and down again, in pieces that follow each other."""
    even = place.even()
    if even is None:  # one pair of trees
        nodes = place.per_node()
        return Schedule(2, _up_and_down([_uneven(nodes, tree, place.size) for tree in double_tree(len(nodes))]), PIECES)
    channels = even.shape[1] if len(even) > 1 else 1
    order = place.crossing(even.shape[1])
    chains = [np.roll(even, -channel, axis=1)[:, order] for channel in range(1 if place.turned else channels)]
    return Schedule(2 * channels, trees(chains, place.size), PIECES)


def trees(channels: Sequence[Ids], members: int) -> tuple[Phase, ...]:
    """Adding up two trees per channel and going down again. A channel has the members of each node, in the order of its chain.

    Tree t of channel c moves chunk 2·c + t.
    """
    return _up_and_down([_joined(nodes, tree, members) for nodes in channels for tree in double_tree(len(nodes))])


class _Tree(NamedTuple):
    """The parent of each member, −1 of the root, and its hops to the root."""

    parent: Ids
    depth: Ids


def _up_and_down(trees: Sequence[_Tree]) -> tuple[Phase, ...]:
    parents, depth = (np.stack(part) for part in zip(*trees, strict=True))
    depth = depth.astype(np.uint16).ravel()  # numpy sorts so short numbers by counting
    order, levels = np.argsort(depth, kind="stable"), []
    ends = np.cumsum(np.bincount(depth))
    for first, end in pairwise(ends.tolist()):
        tree, child = np.divmod(order[first:end], parents.shape[1])
        levels.append(together(parents[tree, child], child, tree, channel=tree))
    down = Schedule(len(parents), tuple(levels))
    return backwards(down, reduce=True).phases + down.phases


def double_tree(n: int) -> tuple[Ids, Ids]:
    """Parents of 0 … n − 1 in the two trees; −1 for the roots.

    In the first, odd numbers are leaves and a number's lowest set bit moves up by one place from child to parent. The second is
    its mirror image, or for odd n shifted by one.
    """
    number = np.arange(n)
    bit = number & -number
    up = (number ^ bit) | (bit << 1)
    first = np.where(up < n, up, number ^ bit)
    first[0] = -1
    turned = n - 1 - number if n % 2 == 0 else (number + 1) % n  # number in the first tree -> number in the second
    second = np.empty(n, np.int64)
    second[turned] = np.where(first < 0, -1, turned[first])
    return first, second


def _joined(nodes: Ids, tree: Ids, members: int) -> _Tree:
    """All members: the first of each node along `tree`, the others each after the one before."""
    parents, depth = np.full(members, -1), np.zeros(members, np.int64)
    parents[nodes[:, 1:]] = nodes[:, :-1]
    parents[nodes[:, 0]] = np.where(tree >= 0, nodes[tree, 0], -1)
    depth[nodes] = _depth(tree)[:, None] + np.arange(nodes.shape[1])
    return _Tree(parents, depth)


def _uneven(nodes: list[list[int]], tree: Ids, members: int) -> _Tree:
    """The same of nodes with different numbers of members."""
    parents, depth = np.full(members, -1), np.zeros(members, np.int64)
    for node, parent, hops in zip(nodes, tree.tolist(), _depth(tree).tolist(), strict=True):
        parents[node[1:]] = node[:-1]
        parents[node[0]] = nodes[parent][0] if parent >= 0 else -1
        depth[node] = hops + np.arange(len(node))
    return _Tree(parents, depth)


def _depth(tree: Ids) -> Ids:
    """Hops to the root, per node of a tree, by doubling."""
    size = len(tree)
    at = np.append(np.where(tree < 0, size, tree), size)  # `size` is above the root
    depth = (at < size).astype(np.int64)
    while (at < size).any():
        depth, at = depth + depth[at], at[at]
    return np.asarray(depth[:-1])
