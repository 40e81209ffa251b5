"""Routes of a cluster whose nodes are not alike: a table per kind of node, and where each node's GPUs and links begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topologies.board import KINDS, Board, Link, Path
from topologies.fabric import End, Fabric, LinkRange
from topologies.hardware import Gpu
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.topology import SHARED, Ids
from topologies.node_group import NodeGroup


class UnequalTopology(ClusterTopology):
    """The `Topology` of groups of nodes on a fabric, numbered in order.

    Where nodes have different GPUs, the links of each kind of GPU are kinds of their own ("nic h100-sxm"), which are priced by
    its profile; links of the fabric belong to all. Nothing is offloaded: `cpu` is None.
    """

    def __init__(self, groups: Sequence[NodeGroup], fabric: Fabric) -> None:
        self.generation, self._tree = 0, None
        counts = [group.count for group in groups]
        self.nodes = sum(counts)
        self.gpu_kinds: tuple[Gpu, ...] = tuple(dict.fromkeys(group.node.gpu for group in groups))
        self._kinds = KINDS if len(self.gpu_kinds) == 1 else tuple(_extended(self.gpu_kinds))
        ranges, self._between = fabric.backbone_of([(group.node, group.count) for group in groups])
        boards = [group.node.board() for group in groups]
        kept = [group.gpus for group in groups]  # by their numbers in a whole node
        self._group = np.repeat(np.arange(len(groups)), counts)  # by node
        sizes, links = np.array([len(each) for each in kept])[self._group], np.array([len(each.links) for each in boards])
        self._gpu_starts = np.cumsum([0, *sizes])
        self._link_starts = np.cumsum([0, *links[self._group]])
        self._slots = np.cumsum([0, *links])  # where the links of each kind of node begin in the tables
        self.gpus = int(self._gpu_starts[-1])
        self._node = np.repeat(np.arange(self.nodes), sizes)
        self._local_number = np.arange(self.gpus) - self._gpu_starts[self._node]
        self._gpu_kind = np.array([self.gpu_kinds.index(group.node.gpu) for group in groups])
        self._tables(groups, boards, kept)
        self._starts = self._link_starts[-1] + np.cumsum([0, *(each.count for each in ranges)])
        self._range_names = [each.name for each in ranges]
        self._names = [link.name for board in boards for link in board.links]
        entries: list[Link | LinkRange] = [*(link for board in boards for link in board.links), *ranges]
        names = [self._named(link.kind, gpu) for gpu, board in zip(self._gpu_kind, boards, strict=True) for link in board.links]
        self._kind = np.array([self._kinds.index(name) for name in (*names, *(each.kind for each in ranges))], dtype=np.int64)
        self._capacity = np.array([entry.capacity for entry in entries])
        self._latency = np.array([entry.latency for entry in entries])
        for number, (group, board) in enumerate(zip(groups, boards, strict=True)):
            if group.node.nics:
                last = [path[-1] for path in board.ways_out]
                self._latency[np.unique(last) + self._slots[number]] += fabric.hop_latency
        self.cpu = self._host = None
        self._ragged = True

    def _named(self, kind: str, gpu: int) -> str:
        """The name of a kind of link of nodes with GPUs of kind number `gpu`."""
        return kind if len(self.gpu_kinds) == 1 or kind in SHARED else f"{kind} {self.gpu_kinds[gpu].name}"

    def _tables(self, groups: Sequence[NodeGroup], boards: Sequence[Board], kept: Sequence[tuple[int, ...]]) -> None:
        """Routes of each kind of node as arrays of one size, padded with −1: of the GPUs that are there, and of the switch."""
        switched = [bool(board.switch) for board in boards]
        size = max(len(each) for each in kept) + 1
        inside: list[dict[tuple[int, int], Path]] = []
        out: list[list[Path]] = []
        into: list[list[Path]] = []
        for group, board, gpus in zip(groups, boards, kept, strict=True):
            ends = [*gpus, *([group.node.gpus] if board.switch else [])]
            inside.append({(i, j): board.route(a, b) for i, a in enumerate(ends) for j, b in enumerate(ends) if a != b})
            ways = [group.way(board, gpu) for gpu in gpus]
            out.append([way[0] for way in ways])
            into.append([way[1] for way in ways])
        width = max((len(path) for paths in inside for path in paths.values()), default=0)
        self._inside = np.full((len(groups), size, size, max(1, width)), -1, dtype=np.int64)
        for number, paths in enumerate(inside):
            for (i, j), path in paths.items():
                self._inside[number, i, j, : len(path)] = path
        width = max((len(path) for paths in (*out, *into) for path in paths), default=0)
        self._out, self._in = (np.full((len(groups), size, width), -1, dtype=np.int64) for _ in range(2))
        self._rails = np.zeros((len(groups), size), dtype=np.int64)
        for number, (group, board) in enumerate(zip(groups, boards, strict=True)):
            for local, gpu in enumerate(kept[number]):
                self._out[number, local, : len(out[number][local])] = out[number][local]
                self._in[number, local, : len(into[number][local])] = into[number][local]
                self._rails[number, local] = board.rail[group.through(board, gpu)]
        self._switch_of_group = np.array(switched)
        multicast = [group.node.gpu.multicast and there for group, there in zip(groups, switched, strict=True)]
        self._multicast_group = np.array(multicast)
        self.multicast, self._switched = any(multicast), any(switched)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of link, innermost first."""
        return self._kinds

    def node_of(self, gpu: Ids) -> Ids:
        """Node of each GPU."""
        return np.asarray(self._node[np.asarray(gpu, dtype=np.int64)])

    def node_kind(self, gpu: Ids) -> Ids:
        """A number for each GPU that only GPUs in nodes of one description share."""
        return self._group[self.node_of(gpu)]

    def gpu_kind(self, gpu: Ids) -> Ids:
        """Index into `gpu_kinds` for each GPU."""
        return self._gpu_kind[self.node_kind(gpu)]

    def local(self, gpu: Ids) -> Ids:
        """Number of each GPU inside its node, among those that are there."""
        return np.asarray(self._local_number[np.asarray(gpu, dtype=np.int64)])

    def switch_of(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Multicast`."""
        return np.where(self._multicast_group[self.node_kind(gpu)], self.gpus + self.node_of(gpu), -1)

    def place(self, gpu: Ids, name: str) -> Ids:
        """The GPUs themselves: nothing is copied to the memory of a node."""
        if name != "gpu":
            raise IndexError("nothing is copied to the memory of nodes that are not alike")
        return np.asarray(gpu, dtype=np.int64)

    def _end(self, gpu: Ids) -> End:
        gpu = np.asarray(gpu, dtype=np.int64)
        if gpu.size and (gpu.min() < 0 or gpu.max() >= self.gpus):
            return self._switches(gpu)
        node, local = self._node[gpu], self._local_number[gpu]
        return End(gpu, node, local, self._rails[self._group[node], local])

    def _switches(self, gpu: Ids) -> End:
        if gpu.min() < 0 or gpu.max() >= self.gpus + self.nodes or not self._switched:
            raise IndexError(f"GPUs are numbered 0 to {self.gpus - 1}")
        real = np.minimum(gpu, self.gpus - 1)
        node = np.where(gpu < self.gpus, self._node[real], gpu - self.gpus)
        if not self._switch_of_group[self._group[node[gpu >= self.gpus]]].all():
            raise IndexError("a node without a switch has no end of that number")
        local = np.where(gpu < self.gpus, self._local_number[real], np.diff(self._gpu_starts)[node])
        return End(gpu, node, local, np.where(gpu < self.gpus, self._rails[self._group[node], local], -1))

    def _near(self, a: End, b: End) -> Ids:
        return _shifted(self._inside[self._group[a.node], a.local, b.local], self._link_starts[a.node])

    def _ways(self, a: End, b: End) -> tuple[Ids, Ids]:
        if (a.gpu >= self.gpus).any() or (b.gpu >= self.gpus).any():
            raise IndexError("the switch of a node is reached from its own GPUs only")
        out = _shifted(self._out[self._group[a.node], a.local], self._link_starts[a.node])
        return out, _shifted(self._in[self._group[b.node], b.local], self._link_starts[b.node])

    def _slot(self, link: Ids) -> Ids:
        link = np.asarray(link, dtype=np.int64)
        node = np.minimum(np.searchsorted(self._link_starts, link, side="right") - 1, self.nodes - 1)
        position = np.searchsorted(self._starts, link, side="right") - 1
        slot: Ids = self._slots[self._group[node]] + link - self._link_starts[node]
        return np.where(position < 0, slot, self._slots[-1] + position)

    def name(self, link: int) -> str:
        """A readable name, as in whole nodes: `"node 3 nic 2 out"`."""
        if link >= self._starts[0]:
            return super().name(link)
        node = int(np.searchsorted(self._link_starts, link, side="right")) - 1
        return f"node {node} {self._names[int(self._slot(np.array([link]))[0])]}"


def _extended(gpus: Sequence[Gpu]) -> list[str]:
    """Kinds of link, innermost first, by whose they are."""
    return [name for kind in KINDS for name in ([kind] if kind in SHARED else [f"{kind} {gpu.name}" for gpu in gpus])]


def _shifted(table: Ids, base: Ids) -> Ids:
    return np.where(table < 0, -1, table + base[:, None])
