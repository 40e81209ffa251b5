"""Torus of any number of dimensions, direct links only; one dimension is a ring.

Torus of k₁ × … × k_d: degree 2d, diameter Σ⌊kᵢ/2⌋, bisection 2·N/max(kᵢ) links for an even max(kᵢ) (Dally and Towles, "Principles
and Practices of Interconnection Networks", chapter 5). Example: 4 × 4 × 4 has diameter 6 and 32 links across its middle.
"""

from __future__ import annotations

from math import prod
from typing import Annotated

import numpy as np
from pydantic import Field

from topologies.documents.units import BytesPerSecond
from topologies.fabric import Backbone, End, Fabric, LinkRange, fabrics, place, points, price
from topologies.links.topology import Ids
from topologies.node import Node

FARTHEST = 128  # hops: routes are laid one by one


@fabrics("torus")
class Torus(Fabric):
    """`dims` points along each dimension, the first one fastest; each is linked to the next and the last to the first.

    Points are nodes, or the GPUs themselves where nodes have no NICs. A dimension of 2 has one link between its points, not two.
    """

    direct = True

    dims: tuple[Annotated[int, Field(ge=2, le=2**20)], ...] = Field(min_length=1, max_length=20)  # points along each dimension
    link: BytesPerSecond = Field(gt=0)  # between two neighbours

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """Dimension by dimension, the first one first, each the shortest way round.

        Half-way round, both ways are as long: from an even place of the ring forwards, from an odd one backwards.
        """
        count, noun = points(node, nodes)
        if sum(size // 2 for size in self.dims) > FARTHEST:
            raise ValueError(f"fabric.dims={list(self.dims)}: two points are more than {FARTHEST} hops apart")
        if prod(self.dims) != count:
            raise ValueError(f"fabric.dims={list(self.dims)} hold {prod(self.dims)} points, but there are {count} {noun}s")
        axes = [(size, prod(self.dims[:axis])) for axis, size in enumerate(self.dims)]  # and its stride
        ports = [(*axis, turn) for axis in axes for turn in ((1,) if axis[0] == 2 else (1, -1))]

        def name(link: int) -> str:
            point, port = divmod(link, len(ports))
            size, stride, turn = ports[port]
            at = point // stride % size
            return f"{noun} {point} to {point + ((at + turn) % size - at) * stride}"

        def routes(a: End, b: End) -> Ids:
            at, to = place(a, node), place(b, node)
            result = np.full((len(at), sum(size // 2 for size in self.dims)), -1, dtype=np.int64)
            done = np.zeros_like(at)
            for size, stride in axes:
                here, there = at // stride % size, to // stride % size
                rest, move = at - here * stride, _shortest(here, there, size)
                port = ports.index((size, stride, 1)) + ((move < 0) & (size > 2))
                for hop in range(int(np.abs(move).max(initial=0))):
                    rows = np.flatnonzero(np.abs(move) > hop)
                    now = (here[rows] + hop * np.sign(move[rows])) % size
                    result[rows, done[rows] + hop] = (rest[rows] + now * stride) * len(ports) + port[rows]
                at, done = rest + there * stride, done + np.abs(move)
            return result[:, : int(done.max(initial=0))]

        kind, latency = price(self, node)
        return Backbone((LinkRange(kind, count * len(ports), self.link, latency, name),), routes)


def _shortest(here: Ids, there: Ids, size: int) -> Ids:
    """Signed number of hops around a ring of `size`."""
    ahead = (there - here) % size
    forwards = (2 * ahead < size) | ((2 * ahead == size) & (here % 2 == 0))
    return np.where(forwards, ahead, ahead - size)
