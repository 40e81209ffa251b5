"""Trees of switches with two or three tiers: fat tree (folded Clos; Leiserson 1985, Al-Fares et al. 2008) and rail-optimised.

The k-ary fat tree of Al-Fares et al. (doi:10.1145/1402958.1402967, section 3) has k pods of k/2 edge switches with k/2 hosts,
k³/4 hosts in all, at full bisection: leaf_nodes = k/2, pod_nodes = k²/4. With k = 48 these are 27,648 hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from pydantic import Field, model_validator

from topologies.fabric import AggregatingFabric, Backbone, End, LinkRange, SwitchTree, fabrics
from topologies.links.topology import Ids, Values
from topologies.node import Node


@fabrics("fat_tree")
class FatTree(AggregatingFabric):
    """All NICs of `leaf_nodes` nodes hang on one leaf; leaves meet at the spine, or those of a pod do and pods meet at the core.

    Switches do not block; the uplinks of a leaf (of a pod) are one link per direction, of the summed rate of the NICs below over
    the oversubscription (uneven spreading of flows is not modelled). A leaf that is not full has all its uplinks.
    """

    leaf_nodes: int = Field(ge=1, le=2**20)  # nodes whose NICs hang on one leaf
    oversubscription: float = Field(default=1.0, ge=1, le=1e4)  # NIC bandwidth below a leaf over its bandwidth upwards
    pod_nodes: int = Field(default=0, ge=1, le=2**20)  # absent: two tiers, all leaves meet at the spine
    pod_oversubscription: float = Field(default=1.0, ge=1, le=1e4)  # bandwidth of the leaves below a pod over that to the core

    @model_validator(mode="after")
    def _pods(self) -> FatTree:
        if self.pod_nodes % self.leaf_nodes:
            raise ValueError(f"fabric.pod_nodes={self.pod_nodes} is not a multiple of leaf_nodes={self.leaf_nodes}")
        if self.pod_oversubscription > 1 and not self.pod_nodes:
            raise ValueError(f"fabric.pod_oversubscription={self.pod_oversubscription:g} needs pod_nodes")
        return self

    @property
    def periods(self) -> tuple[int, ...]:
        """Nodes of a leaf, and of a pod."""
        return (self.leaf_nodes, self.pod_nodes) if self.pod_nodes else (self.leaf_nodes,)

    def rails(self, node: Node) -> int:
        """Leaves side by side that serve the same nodes."""
        return 1

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """Up to the lowest switch in common and down again; links: leaf by leaf up and down, then pod by pod."""
        rails, used = self.rails(node), sum(len(bundle) for bundle in node.board().bundles)  # NICs that no GPU uses do not count
        below = self.leaf_nodes * used * node.nic / rails
        leaves = -(-nodes // self.leaf_nodes) * rails
        pods = -(-nodes // self.pod_nodes) if self.pod_nodes else 1
        above = self.pod_nodes * used * node.nic / self.oversubscription
        ranges = [self._tier("leaf", leaves, below / self.oversubscription, (self.leaf_nodes, 2 * rails), rails)]
        ranges += [self._tier("pod", pods, above / self.pod_oversubscription, (self.pod_nodes, 2))]
        return self._backbone(ranges, rails, 2 * leaves if leaves > 1 else 0, pods)

    def backbone_of(self, nodes: Sequence[tuple[Node, int]]) -> Backbone:
        """The uplinks of a leaf have the rate of its own nodes' NICs; where it is not full, as if its last node came again."""
        every = {self.rails(node) for node, _ in nodes}
        if len(every) > 1 or not all(node.nics for node, _ in nodes):
            what = f"have {' and '.join(map(str, sorted(every)))} rails" if len(every) > 1 else "have no NICs"
            raise ValueError(f"fabric.kind='{self.kind}': all nodes need NICs on as many rails; some {what}")
        rails = every.pop()
        used = [sum(len(bundle) for bundle in node.board().bundles) * node.nic / rails for node, _ in nodes]
        rate = np.repeat(used, [count for _, count in nodes])
        below = self._sums(rate, self.leaf_nodes) / self.oversubscription
        above = self._sums(rate, self.pod_nodes) * rails / self.oversubscription if self.pod_nodes else np.zeros(1)
        ranges = [*self._tiers("leaf", np.repeat(below, rails)), *self._tiers("pod", above / self.pod_oversubscription)]
        leaves = len(below) * rails
        return self._backbone(ranges, rails, 2 * leaves if leaves > 1 else 0, len(above))

    @staticmethod
    def _sums(rate: Values, each: int) -> Values:
        """Sums of so many neighbours each."""
        padded = np.append(rate, np.full(-len(rate) % each, rate[-1]))
        return np.asarray(padded.reshape(-1, each).sum(axis=1))

    def _leaf(self, end: End, rails: int) -> Ids:
        return end.node // self.leaf_nodes * rails + (end.rail if rails > 1 else 0)

    def switch_tree(self, node: Node, nodes: int) -> SwitchTree:
        """Leaves, then the spine (of each pod, as one), then the core."""
        rails = self.rails(node)
        leaves, pods = -(-nodes // self.leaf_nodes) * rails, -(-nodes // self.pod_nodes) if self.pod_nodes else 1
        sizes = [leaves, *([pods] if leaves > 1 else []), *([1] if pods > 1 else [])]
        links = [2 * np.arange(leaves), 2 * leaves + 2 * np.arange(pods)]

        def above(end: End) -> Ids:
            tiers = [self._leaf(end, rails), leaves + (end.node // self.pod_nodes if pods > 1 else 0 * end.node)]
            tiers.append(np.full_like(end.node, leaves + pods))
            return np.stack(tiers[: len(sizes)], axis=1)

        up = np.concatenate([*links[: len(sizes) - 1], [-1]])
        return SwitchTree(above, up, np.where(up < 0, -1, up + 1))

    def _backbone(self, ranges: Sequence[LinkRange], rails: int, first: int, pods: int) -> Backbone:
        """Routes over links numbered leaf by leaf, then pod by pod. first: the number of links of leaves."""

        def routes(a: End, b: End) -> Ids:
            up, down = self._leaf(a, rails), self._leaf(b, rails)
            apart = up != down
            if not apart.any():
                return np.empty((len(up), 0), dtype=np.int64)
            climb, fall = np.where(apart, 2 * up, -1), np.where(apart, 2 * down + 1, -1)
            if pods == 1:
                return np.stack((climb, fall), axis=1)
            out, into = a.node // self.pod_nodes, b.node // self.pod_nodes
            over = out != into
            middle = np.where(over, first + 2 * out, fall), np.where(over, first + 2 * into + 1, -1)
            return np.stack((climb, *middle, np.where(over, fall, -1)), axis=1)

        return Backbone(tuple(links for links in ranges if links.count), routes)

    def _tier(self, noun: str, switches: int, capacity: float, each: tuple[int, int], rails: int = 1) -> LinkRange:
        """Up and down of every switch of a tier; a single switch is its own top and has none."""

        def name(link: int) -> str:
            return f"{noun} {link // 2} {'down' if link % 2 else 'up'}"

        return LinkRange("spine", 2 * switches if switches > 1 else 0, capacity, self.hop_latency, name, each, rails)

    def _tiers(self, noun: str, capacity: Values) -> Iterator[LinkRange]:
        """Up and down of switches of these rates; a single switch has none."""
        edges = np.flatnonzero(np.diff(capacity, prepend=np.nan, append=np.nan))
        for start, end in pairwise(edges.tolist() if len(capacity) > 1 else []):

            def name(link: int, before: int = start) -> str:
                return f"{noun} {link // 2 + before} {'down' if link % 2 else 'up'}"

            yield LinkRange("spine", 2 * (end - start), float(capacity[start]), self.hop_latency, name)


@fabrics("rail")
class Rail(FatTree):
    """NIC i of `leaf_nodes` nodes hangs on one leaf; another rail or another group of nodes is reached over the spine.

    NVIDIA's SuperPODs: docs.nvidia.com DGX SuperPOD reference architecture H100, network fabrics (8 leaves per 32 nodes).
    """

    def rails(self, node: Node) -> int:
        """One leaf per NIC of a node."""
        return max(1, len(node.board().bundles))
