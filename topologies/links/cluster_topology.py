"""Routes of a whole cluster by arithmetic: one node's tables, shifted; only a byte or two per link are kept.

Link ids: node n's links are n·per_node … (n+1)·per_node − 1 in the order of its board; then the links of the fabric.
"""

from __future__ import annotations

from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topologies.board import KINDS, Link
from topologies.fabric import End, Fabric, LinkRange, SwitchTree, pack
from topologies.links.frames import Frames
from topologies.links.rotation import Rotation, Turned, slots_turned
from topologies.links.topology import Ids, Values
from topologies.node import Node

PLACES = ("switch", "cpu", "nvme")  # numbers of ends after the GPUs', each with one per node


class ClusterTopology:
    """The `Topology` of `nodes` nodes on a fabric.

    A route between nodes is: GPU to NIC, NIC out, the links of the fabric, NIC in, NIC to GPU. Latency of switches: the first
    one's is on NIC out, every further one's on the link that leads to it. Messages leave through the sender's own NIC: NCCL's
    PXN, which first crosses NVLink to the receiver's rail, is not modelled. A node whose wiring has no links leaves all to the
    fabric. period: GPUs that are shifted by multiples of it are wired alike, also to each other; None where no number is known.
    """

    def __init__(self, node: Node, fabric: Fabric, nodes: int) -> None:
        board = node.board()
        ranges, self._between = fabric.backbone(node, nodes)
        self.gpus, self.gpus_per_node, self.nodes = nodes * node.gpus, node.gpus, nodes
        self._inside, self._out, self._in = board.tables()
        self.cpu = node.cpu if board.host else None
        self._host = board.host_tables() if board.host else None
        self._memory, self._disk = board.memory, board.disk
        self._rail, self._switched = np.array(board.rail, dtype=np.int64), bool(board.switch)
        self.multicast = node.gpu.multicast and self._switched
        self._ragged = bool((self._out < 0).any() or (self._in < 0).any())
        entries: list[Link | LinkRange] = [*board.links, *ranges]
        self._kind = np.array([KINDS.index(entry.kind) for entry in entries], dtype=np.int64)
        self._capacity = np.array([entry.capacity for entry in entries])
        self._latency = np.array([entry.latency for entry in entries])
        if node.nics:
            self._latency[list({int(path[path >= 0][-1]) for path in self._out})] += fabric.hop_latency
        self._names, self._range_names = [link.name for link in board.links], [links.name for links in ranges]
        self._per_node = len(board.links)
        self._starts = nodes * self._per_node + np.cumsum([0, *(links.count for links in ranges)])
        self.generation = fabric.aggregation
        self._tree = fabric.switch_tree(node, nodes) if self.generation else None
        self._each, self._parts = [links.each for links in ranges], [links.rails for links in ranges]
        tiers = fabric.periods
        self.period = None if tiers is None else node.gpus * lcm(*(below for below in tiers if below < nodes))

    @property
    def links(self) -> int:
        """Number of directed links."""
        return int(self._starts[-1])

    @property
    def has_frames(self) -> bool:
        """Whether GPUs that are shifted by a period have links that are shifted too, and none of the fabric that serve all."""
        return self.period is not None and all(0 < nodes < self.nodes for nodes, _ in self._each)

    @property
    def is_wired_inside(self) -> bool:
        """Whether traffic between GPUs of a node stays inside it."""
        return bool(self._inside.shape[-1])

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

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """Links from source[e] to destination[e], in order: shape (E, hops), padded with −1.

        An end may also be the switch inside a node, gpus + its node, when the other end is a GPU of that node. Raises IndexError
        when an end does not exist or a switch would have to be reached from elsewhere.
        """
        last = max(np.max(source, initial=0), np.max(destination, initial=0)) - self.gpus
        if self._tree is not None and last >= len(PLACES) * self.nodes:
            return self._through_switches(self._tree, np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64))
        if self._host is not None and self.nodes <= last < len(PLACES) * self.nodes:
            return self._copies(np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64))
        a, b = self._end(source), self._end(destination)
        near = a.node == b.node if self.is_wired_inside else a.gpu == b.gpu
        if near.all():
            return self._near(a, b)
        if not near.any():
            return self._far(a, b)
        routes, inside = self._far(_pick(a, ~near), _pick(b, ~near)), self._near(_pick(a, near), _pick(b, near))
        result = np.full((len(near), max(routes.shape[1], inside.shape[1])), -1, dtype=np.int64)
        result[~near, : routes.shape[1]] = routes
        result[near, : inside.shape[1]] = inside
        return result

    def place(self, gpu: Ids, name: str) -> Ids:
        """See `topologies.links.topology.Hosted`: after GPUs and switches the memory of each node is numbered, then its disks."""
        if name == "gpu":
            return np.asarray(gpu, dtype=np.int64)
        return self.gpus + PLACES.index(name) * self.nodes + self.node_of(gpu)

    def _copies(self, source: Ids, destination: Ids) -> Ids:
        """Routes of copies; all sources are of one sort (GPUs, memories, disks), and all destinations."""
        sorts = [np.unique(np.where(end < self.gpus, -1, (end - self.gpus) // self.nodes)) for end in (source, destination)]
        if self._host is None or any(len(sort) > 1 for sort in sorts):
            raise IndexError("there is no way to the CPUs of a node, or ends of several sorts at once")
        gpu, cpu, nvme = -1, PLACES.index("cpu"), PLACES.index("nvme")
        pair = int(sorts[0][0]), int(sorts[1][0])
        links = (np.maximum(source, destination) - self.gpus) % self.nodes * self._per_node  # the first of each one's node
        if pair == (gpu, cpu):
            return _shift(self._host[0][source % self.gpus_per_node], links)
        if pair == (cpu, gpu):
            return _shift(self._host[1][destination % self.gpus_per_node], links)
        link = {(cpu, cpu): self._memory, (nvme, cpu): self._disk[0], (cpu, nvme): self._disk[1]}.get(pair, -1)
        if link < 0:
            raise IndexError("copies go between GPUs and memory, and between memory and disks")
        return (link + links)[:, None]

    def aggregators(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Aggregating`: the fabric's switches are numbered after all places of nodes."""
        assert self._tree is not None
        flat = np.asarray(gpu, dtype=np.int64).ravel()
        above = self._tree.above(self._end(flat)) + self.gpus + len(PLACES) * self.nodes
        return np.reshape(above, (*np.shape(gpu), -1))

    def nic_of(self, gpu: Ids) -> Ids:
        """The link out of it that leads to the fabric."""
        gpu = np.asarray(gpu, dtype=np.int64)
        last = np.array([path[path >= 0][-1] for path in self._out])
        return np.asarray(self.node_of(gpu) * self._per_node + last[self.local(gpu)])

    def _through_switches(self, tree: SwitchTree, source: Ids, destination: Ids) -> Ids:
        """Routes between GPUs and the fabric's switches, and from switch to switch; all sources are of one sort, all destinations
        too.
        """
        first = self.gpus + len(PLACES) * self.nodes
        if (source < first).all():
            return self._ways(self._end(source), self._end(source))[0]
        if (destination < first).all():
            return self._ways(self._end(destination), self._end(destination))[1]
        if (np.minimum(source, destination) < first).any():
            raise IndexError("ways through the fabric's switches begin or end at GPUs, or lead from switch to switch")
        links = np.where(source < destination, tree.up[source - first], tree.down[destination - first])
        return np.asarray(links + self._starts[0])[:, None]

    def switch_of(self, gpu: Ids) -> Ids:
        """The switch beside each GPU that adds and copies (NVLink SHARP), an end of `routes`: gpus + its node; −1 without."""
        return self.gpus + self.node_of(gpu) if self.multicast else np.full(np.shape(gpu), -1, dtype=np.int64)

    def _end(self, gpu: Ids) -> End:
        gpu = np.asarray(gpu, dtype=np.int64)
        if gpu.size and (gpu.min() < 0 or gpu.max() >= self.gpus):
            return self._switches(gpu)
        node = gpu // self.gpus_per_node
        local = gpu - node * self.gpus_per_node
        return End(gpu, node, local, self._rail[local])

    def _switches(self, gpu: Ids) -> End:
        """Ends that are GPUs, or switches, which are numbered after the GPUs (inside a node, too)."""
        if gpu.min() < 0 or gpu.max() >= self.gpus + self.nodes or not self._switched:
            raise IndexError(f"GPUs are numbered 0 to {self.gpus - 1}")
        node = np.where(gpu < self.gpus, gpu // self.gpus_per_node, gpu - self.gpus)
        local = np.where(gpu < self.gpus, gpu % self.gpus_per_node, self.gpus_per_node)
        return End(gpu, node, local, np.where(gpu < self.gpus, self._rail[gpu % self.gpus_per_node], -1))

    def _near(self, a: End, b: End) -> Ids:
        return _shift(self._inside[a.local, b.local], a.node * self._per_node)

    def _ways(self, a: End, b: End) -> tuple[Ids, Ids]:
        """Links from each GPU to the fabric, and from the fabric to each GPU."""
        if max(a.local.max(initial=0), b.local.max(initial=0)) >= self.gpus_per_node:
            raise IndexError("the switch of a node is reached from its own GPUs only")
        return _shift(self._out[a.local], a.node * self._per_node), _shift(self._in[b.local], b.node * self._per_node)

    def _far(self, a: End, b: End) -> Ids:
        out, into = self._ways(a, b)
        between = self._between(a, b)
        if not between.shape[1]:
            routes = np.concatenate((out, into), axis=1)
        else:
            between = np.where(between < 0, -1, between + self._starts[0])
            routes = np.concatenate((out, between, np.full_like(into, -1)), axis=1)
            columns = out.shape[1] + (between >= 0).sum(axis=1)  # where the fabric ends
            routes[np.arange(len(routes))[:, None], columns[:, None] + np.arange(into.shape[1])] = into
        return pack(routes) if self._ragged else routes

    def frames(self, nodes: int) -> Frames:
        """Links by frames of so many nodes, a multiple of the cluster's period."""
        shares = [nodes // below * links for below, links in self._each]
        return Frames([0, *self._starts.tolist()], [nodes * self._per_node, *shares])

    @cached_property
    def rotation(self) -> Rotation | None:
        """The symmetry of GPUs in their nodes; None where their wiring has none, or links have no frames."""
        gpus, rails = self.gpus_per_node, self._rail
        if gpus < 2 or not self.has_frames or not (len(set(rails.tolist())) == 1 or (rails == np.arange(gpus)).all()):
            return None
        ends, inside = np.roll(np.arange(gpus), -1), self._inside
        within = np.append(ends, gpus) if len(inside) > gpus else ends  # a switch stays where it is
        tables = [(table, table[ends]) for table in (self._out, self._in, *(self._host or ()))]
        slots = slots_turned(self._per_node, [*tables, (inside, inside[within][:, within])])
        if slots is None or any(
            (values[slots] != values[: len(slots)]).any() for values in (self._kind, self._capacity, self._latency)
        ):
            return None
        ranges = zip(self._starts.tolist(), self._each, self._parts, strict=False)
        return Rotation(gpus, slots, self.nodes, [Turned(start, each, parts) for start, (_, each), parts in ranges])

    def kind(self, link: Ids) -> Ids:
        """Index into `kinds` for each link id."""
        return self._kind[self._slot(link)]

    def capacity(self, link: Ids) -> Values:
        """Nominal bytes per second in the link's direction."""
        return self._capacity[self._slot(link)]

    def latency(self, link: Ids) -> Values:
        """Nominal seconds that a message spends on the link besides its transfer time; sources: `Latency`, `Fabric`."""
        return self._latency[self._slot(link)]

    def _slot(self, link: Ids) -> Ids:
        """Row of each link in the tables: links of one node, then ranges of the fabric."""
        return np.asarray(self._slots[np.asarray(link, dtype=np.int64)])

    @cached_property
    def _slots(self) -> NDArray[np.unsignedinteger[Any]]:
        """The row of every link."""
        ranges = np.diff(self._starts)
        sort = np.min_scalar_type(self._per_node + len(ranges))
        nodes = np.tile(np.arange(self._per_node, dtype=sort), self.nodes)
        return np.concatenate([nodes, np.repeat(np.arange(self._per_node, self._per_node + len(ranges), dtype=sort), ranges)])

    def name(self, link: int) -> str:
        """A readable name: `"node 3 nic 2 out"`, `"leaf 5 up"`."""
        if link >= self._starts[0]:
            position = int(np.searchsorted(self._starts, link, side="right")) - 1
            return self._range_names[position](link - int(self._starts[position]))
        node, slot = divmod(link, self._per_node)
        return f"node {node} {self._names[slot]}"


def _shift(table: Ids, base: Ids) -> Ids:
    return np.where(table < 0, -1, table + base[:, None])


def _pick(end: End, mask: NDArray[np.bool_]) -> End:
    return End(*(part[mask] for part in end))
