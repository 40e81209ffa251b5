"""A cluster: nodes on a fabric (from the catalogue or the user's own file: `topologies.cluster_files`).

`nodes` is how many, or where they are not alike a list of groups in the order of their ranks: `[{count: 8, node: dgx-a100},
{count: 1, missing: [gpu 3]}]`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import cached_property
from math import gcd
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from topologies.fabric import Fabric, fabrics, read_fabric
from topologies.hardware import Dtype, Gpu, Latency
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.unequal_topology import UnequalTopology
from topologies.node import Node
from topologies.node_group import NodeGroup
from topologies.reading import Config, UserError, folded
from topologies.storage import Storage, load_storage

__all__ = [
    "Cluster",
    "Dtype",
    "Fabric",
    "Gpu",
    "Latency",
    "Node",
    "NodeGroup",
    "UnequalCluster",
]

MAX_GPUS = 2**20  # GPUs
GROUPS = 1000  # of nodes that are alike
MAX_LINKS = 2**24
ETHERNET = 12.5e9  # bytes per second: slower NICs than 100 Gb/s are taken for plain Ethernet (assumed)


def _storage(given: object) -> object:
    return None if given is None else load_storage(given, "storage")


class Cluster(Config):
    """`nodes` equal nodes on a fabric. Hashable: equal clusters are one key of a cache. storage: the file system that all share;
    None: not said.
    """

    other_names: ClassVar[Mapping[str, str]] = {folded(name): f"node.{name}" for name in Node.model_fields}

    name: str  # what answers call it
    node: Node  # one node: GPUs, links inside, NICs
    nodes: int = Field(default=1, ge=1)  # how many; or a list of groups that are not alike
    fabric: Annotated[SerializeAsAny[Fabric], BeforeValidator(read_fabric)] = Field(
        default_factory=lambda: fabrics["single"](), description="the network between nodes"
    )
    source: str = ""  # where the numbers come from
    storage: Annotated[SerializeAsAny[Storage] | None, BeforeValidator(_storage)] = Field(
        default=None, exclude_if=lambda at: at is None, description="the file system that all nodes share"
    )
    notes: tuple[str, ...] = ()  # what was ignored or assumed where a machine's own output was read

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return self.nodes * self.node.gpus

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        if self.nodes * self.node.gpus > MAX_GPUS:
            raise ValueError(f"nodes·gpus = {self.nodes}·{self.node.gpus}: more than {MAX_GPUS:,} GPUs are not simulated")
        if self.nodes > 1 and not self.node.nics and not self.fabric.direct:
            raise ValueError(f"nodes={self.nodes} contradicts node.nics=0: nodes reach each other through NICs")
        board = self.node.board()
        if self.node.gpus > 1 and not board.joined and (self.node.nics or not self.fabric.direct):
            raise ValueError(f"node.wiring='{self.node.wiring}' gives gpus={self.node.gpus} no way to each other")
        ranges = self.fabric.backbone(self.node, self.nodes).ranges  # raises when the fabric does not fit
        links = self.nodes * len(board.links) + sum(each.count for each in ranges)
        if links > MAX_LINKS:
            raise ValueError(f"nodes={self.nodes} and the fabric have {links:,} links: more than {MAX_LINKS:,} are not simulated")
        return self

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """Nodes that are alike, in the order of their GPUs."""
        return (NodeGroup.model_construct(count=self.nodes, node=self.node, missing=()),)

    @cached_property
    def gpu_kinds(self) -> tuple[Gpu, ...]:
        """The different GPUs."""
        return tuple(dict.fromkeys(group.node.gpu for group in self.groups))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node; where nodes have different numbers, the most that divides all of them."""
        return gcd(*(len(group.gpus) for group in self.groups))

    @property
    def described(self) -> str:
        """Its nodes in a few words."""
        return f"{self.nodes} × {self.name}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats of the description: rates that cannot be reached, networks that were not measured."""
        return self._remarks(self.node)

    def _remarks(self, node: Node) -> tuple[str, ...]:
        remarks = []
        if node.nics and node.pcie and not node.integrated_nics:
            into, out = node.nic * node.nics / node.rails, node.pcie * node.gpus / node.rails
            if into > out:
                remarks.append(f"node.nic: {into / 1e9:.3g} GB/s of NICs are more than {out / 1e9:.3g} GB/s of PCIe lets through")
        if self.nodes > 1 and node.nics and node.gpu.sms and node.nic < ETHERNET:
            remarks.append(
                f"node.nic={node.nic / 1e9:.3g} GB/s: nodes are priced as joined by InfiniBand or RoCE; TCP over Ethernet was "
                "not measured: it starts later (give node.latency.nic) and may reach less"
            )
        return tuple(remarks)

    def topology(self) -> ClusterTopology:
        """Links and routes (a `Topology`); built once per cluster."""
        return _topology(self)


class UnequalCluster(Cluster):
    """Groups of nodes on a fabric, numbered in order. What asks for the `node` of a cluster is for nodes that are alike, and is
    refused: nothing takes some of them for all.
    """

    nodes: int = 0  # in all
    every: tuple[NodeGroup, ...] = Field(min_length=1, max_length=GROUPS)

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """Nodes that are alike, in the order of their GPUs."""
        return self.every

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return sum(group.count * len(group.gpus) for group in self.every)

    @property
    def described(self) -> str:
        """Its nodes in a few words."""
        parts = [
            f"{group.count} × {len(group.gpus)} {group.node.gpu.name}"
            + (f" without {', '.join(group.missing)}" * bool(group.missing))
            for group in self.every
        ]
        return f"{self.name} ({', '.join(parts)})"

    @model_validator(mode="after")
    def _consistent(self) -> UnequalCluster:
        if self.fabric.aggregation:
            raise ValueError(f"fabric.sharp={self.fabric.aggregation}: needs nodes that are alike")
        if self.gpus > MAX_GPUS:
            raise ValueError(f"nodes have {self.gpus:,} GPUs: more than {MAX_GPUS:,} are not simulated")
        for number, group in enumerate(self.every):
            board = group.node.board()
            if not group.node.nics:
                raise ValueError(f"nodes.{number}: nodes that are not alike must all have NICs")
            if group.node.gpus > 1 and not board.joined:
                raise ValueError(f"nodes.{number}: wiring='{group.node.wiring}' gives GPUs no way to each other")
        names = [gpu.name for gpu in self.gpu_kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"nodes: GPUs that differ need names that differ: {', '.join(names)}")
        ranges = self.fabric.backbone_of(
            [(group.node, group.count) for group in self.every]
        ).ranges  # raises when it does not fit
        links = sum(group.count * len(group.node.board().links) for group in self.every) + sum(each.count for each in ranges)
        if links > MAX_LINKS:
            raise ValueError(f"nodes and the fabric have {links:,} links: more than {MAX_LINKS:,} are not simulated")
        return self

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats of the descriptions."""
        return tuple(dict.fromkeys(remark for group in self.every for remark in self._remarks(group.node)))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy. Raises UserError where the number of nodes or their description would change: they are a list."""
        if {"node", "nodes"} & set(update or ()):
            raise UserError(_not_alike(self))
        return super().model_copy(update=update, deep=deep)


def _not_alike(cluster: Cluster) -> str:
    return f"cluster {cluster.described}: its nodes are not alike, which simulate, advise, whatif and compare take, but not this"


def _no_node(cluster: Cluster) -> Node:
    raise UserError(_not_alike(cluster))


UnequalCluster.node = property(_no_node)  # type: ignore[assignment]  # pydantic takes one in the class for the field's default


@functools.lru_cache(maxsize=64)
def _topology(cluster: Cluster) -> ClusterTopology:
    if isinstance(cluster, UnequalCluster):
        return UnequalTopology(cluster.every, cluster.fabric)
    return ClusterTopology(cluster.node, cluster.fabric, cluster.nodes)
