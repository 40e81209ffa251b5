"""Routes of a whole cluster by arithmetic: one node's tables, shifted; memory does not grow with the number of nodes.

Link ids: node n's links are n·per_node … (n+1)·per_node − 1 in the order of its board; then, leaf by leaf, the way up to the
spine and the way down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from topologies.board import KINDS
from topologies.topology import Ids, Values

if TYPE_CHECKING:
    from topologies.cluster import Cluster

_SPINE = KINDS.index("spine")


class _End(NamedTuple):
    """One end of every route: node, and number inside the node."""

    node: Ids
    local: Ids

    def pick(self, mask: NDArray[np.bool_]) -> _End:
        return _End(self.node[mask], self.local[mask])


class Network:
    """The `Topology` of a cluster.

    A route between nodes is: GPU to NIC, NIC out, leaf up and leaf down when the NICs hang on different leaves, NIC in, NIC to
    GPU. Leaf and spine switches do not block; the uplinks of one leaf are one link per direction, of the summed rate of its NICs
    over the oversubscription (uneven spreading of flows over uplinks is not modelled). A half-filled leaf has all its uplinks.
    Latency of switches: the first leaf's is on NIC out, the spine's on leaf up, the second leaf's on leaf down.
    Messages leave through the sender's own NIC: NCCL's PXN, which first crosses NVLink to the receiver's rail, is not modelled.
    """

    def __init__(self, cluster: Cluster) -> None:
        node, fabric, board = cluster.node, cluster.fabric, cluster.node.board()
        self.gpus, self.gpus_per_node, self.nodes = cluster.gpus, node.gpus, cluster.nodes
        self._inside, self._out, self._in = board.tables()
        self._ragged = bool((self._out < 0).any() or (self._in < 0).any())
        self._multicast = node.multicast and node.gpus > 1
        self._names = [link.name for link in board.links]
        self._kind = np.array([KINDS.index(link.kind) for link in board.links] + [_SPINE], dtype=np.int64)
        leaf_nics = fabric.leaf_nodes * (node.nics // node.rails if fabric.kind == "rail" else node.nics) if node.nics else 0
        self._capacity = np.array([link.capacity for link in board.links] + [leaf_nics * node.nic / fabric.oversubscription])
        self._latency = np.array([link.latency for link in board.links] + [fabric.hop_latency])
        if node.nics:
            self._latency[np.unique([path[path >= 0][-1] for path in self._out])] += fabric.hop_latency
        self._per_node = len(board.links)
        self._leaf_nodes = fabric.leaf_nodes or cluster.nodes
        self._rails = node.rails if fabric.kind == "rail" else 1
        self._leaves = -(-cluster.nodes // self._leaf_nodes) * self._rails
        self._spine = cluster.nodes * self._per_node  # the first link of the fabric

    @property
    def links(self) -> int:
        """Number of directed links."""
        return self._spine + (2 * self._leaves if self._leaves > 1 else 0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of link; the same for every cluster."""
        return KINDS

    def node_of(self, gpu: Ids) -> Ids:
        """Node of each GPU."""
        return np.asarray(gpu, dtype=np.int64) // self.gpus_per_node

    def local(self, gpu: Ids) -> Ids:
        """Number of each GPU inside its node."""
        return np.asarray(gpu, dtype=np.int64) % self.gpus_per_node

    def switch_of(self, gpu: Ids) -> Ids:
        """Endpoint number of the NVSwitch beside each GPU, gpus + node; −1 where it does not add and multicast."""
        node = self.node_of(gpu)
        return self.gpus + node if self._multicast else np.full_like(node, -1)

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """Links from source[e] to destination[e], in order: shape (E, hops), padded with −1.

        One end may be the switch of the other's node. Raises IndexError when an endpoint does not exist.
        """
        source, destination = np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64)
        up, down = destination >= self.gpus, source >= self.gpus
        if not self._multicast or not (up | down).any():
            return self._between(source, destination)
        near, far = np.where(down, destination, source), np.where(up, source, destination)
        if ((self.switch_of(near) != np.maximum(source, destination)) & (up | down)).any():
            raise IndexError("a switch is reached from the GPUs of its node only")
        routes = self._between(near, far)  # a GPU to itself has no links
        port = self._inside[self.local(near), (self.local(near) + 1) % self.gpus_per_node]
        back = self._inside[(self.local(near) + 1) % self.gpus_per_node, self.local(near)]
        one = np.where(up, port[:, 0], back[:, -1]) + self.node_of(near) * self._per_node
        routes[:, 0] = np.where(up | down, one, routes[:, 0])
        return routes

    def _between(self, source: Ids, destination: Ids) -> Ids:
        ends = []
        for gpu in (source, destination):
            if gpu.size and (gpu.min() < 0 or gpu.max() >= self.gpus):
                raise IndexError(f"GPUs are numbered 0 to {self.gpus - 1}")
            node = self.node_of(gpu)
            ends.append(_End(node, gpu - node * self.gpus_per_node))
        a, b = ends
        near = a.node == b.node
        if near.all():
            return self._near(a, b)
        routes = self._far(a, b)
        if near.any():
            inside = self._near(a.pick(near), b.pick(near))
            routes = np.pad(routes, ((0, 0), (0, max(0, inside.shape[1] - routes.shape[1]))), constant_values=-1)
            routes[near] = np.pad(inside, ((0, 0), (0, routes.shape[1] - inside.shape[1])), constant_values=-1)
        return routes

    def _near(self, a: _End, b: _End) -> Ids:
        return _shift(self._inside[a.local, b.local], a.node * self._per_node)

    def _far(self, a: _End, b: _End) -> Ids:
        out = _shift(self._out[a.local], a.node * self._per_node)
        into = _shift(self._in[b.local], b.node * self._per_node)
        leaf_a, leaf_b = self._leaf(a), self._leaf(b)
        crossing = leaf_a != leaf_b
        if not crossing.any():
            routes = np.concatenate((out, into), axis=1)
        else:
            spine = np.stack((self._spine + 2 * leaf_a, self._spine + 2 * leaf_b + 1), axis=1)
            routes = np.concatenate((out, spine, into), axis=1)
            first = out.shape[1]
            routes[~crossing, first : first + into.shape[1]] = into[~crossing]
            routes[~crossing, first + into.shape[1] :] = -1
        return _compact(routes) if self._ragged else routes

    def _leaf(self, end: _End) -> Ids:
        """Leaf switch of each GPU's NIC."""
        if self._leaves == 1:
            return np.zeros_like(end.node)
        return end.node // self._leaf_nodes * self._rails + end.local * self._rails // self.gpus_per_node

    def kind(self, link: Ids) -> Ids:
        """Index into `kinds` for each link id."""
        return self._kind[self._slot(link)]

    def capacity(self, link: Ids) -> Values:
        """Nominal bytes per second in the link's direction."""
        return self._capacity[self._slot(link)]

    def latency(self, link: Ids) -> Values:
        """Nominal seconds that a message spends on the link besides its transfer time; sources: `Latency` and `Fabric`."""
        return self._latency[self._slot(link)]

    def _slot(self, link: Ids) -> Ids:
        """Row of each link in the tables of one node, whose last row is the spine."""
        link = np.asarray(link, dtype=np.int64)
        return np.where(link < self._spine, link % self._per_node, self._per_node)

    def name(self, link: int) -> str:
        """For people: `"node 3 nic 2 out"`, `"leaf 5 up"`."""
        if link >= self._spine:
            leaf, down = divmod(link - self._spine, 2)
            return f"leaf {leaf} {'down' if down else 'up'}"
        node, slot = divmod(link, self._per_node)
        return f"node {node} {self._names[slot]}"


def _shift(table: Ids, base: Ids) -> Ids:
    return np.where(table < 0, -1, table + base[:, None])


def _compact(routes: Ids) -> Ids:
    """Padding to the end of every row, links in order."""
    return np.take_along_axis(routes, np.argsort(routes < 0, axis=1, kind="stable"), axis=1)
