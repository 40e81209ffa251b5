"""One switch that does not block: what most small clusters have, and what is assumed where nothing is published."""

from __future__ import annotations

import numpy as np

from topologies.fabric import AggregatingFabric, Backbone, End, SwitchTree, fabrics
from topologies.links.topology import Ids
from topologies.node import Node


@fabrics("single")
class Single(AggregatingFabric):
    """All NICs hang on one switch, whose latency is on the way out of the NIC; it has no links of its own."""

    @property
    def periods(self) -> tuple[int, ...]:
        """Every node is like every other."""
        return (1,)

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """No links: out of one NIC is into the other."""
        return Backbone((), _nothing)

    def switch_tree(self, node: Node, nodes: int) -> SwitchTree:
        """The one switch."""
        top = np.array([-1])
        return SwitchTree(lambda end: np.zeros((len(end.gpu), 1), dtype=np.int64), top, top)


def _nothing(a: End, b: End) -> Ids:
    return np.empty((len(a.gpu), 0), dtype=np.int64)
