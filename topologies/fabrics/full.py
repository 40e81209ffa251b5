"""Everything linked to everything directly: n points, n·(n − 1)/2 links both ways, diameter 1.

The bisection of an even n is n²/4 links each way. Example: 8 points have 28 links, 16 of them across the middle.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from topologies.documents.units import BytesPerSecond
from topologies.fabric import Backbone, End, Fabric, LinkRange, fabrics, place, points, price
from topologies.links.topology import Ids
from topologies.node import Node


@fabrics("full")
class Full(Fabric):
    """A link between each two points: nodes, or the GPUs themselves where nodes have no NICs."""

    direct = True

    link: BytesPerSecond = Field(gt=0)  # between two points

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """The one link between the two."""
        count, noun = points(node, nodes)
        others = max(1, count - 1)

        def name(link: int) -> str:
            point, other = divmod(link, others)
            return f"{noun} {point} to {other + (other >= point)}"

        def routes(a: End, b: End) -> Ids:
            at, to = place(a, node), place(b, node)
            return np.where(at == to, -1, at * others + to - (to > at))[:, None]

        kind, latency = price(self, node)
        return Backbone((LinkRange(kind, count * (count - 1), self.link, latency, name),), routes)
