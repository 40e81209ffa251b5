"""Fabrics, the networks between nodes: their descriptions, and the backbone of links that each turns into.

A fabric is a class in one file of `topologies/fabrics`, registered under the name that descriptions use as `kind`. Its fields are
what a description may say; its `backbone` gives links and routes by arithmetic, never a table of pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import ValidationError, model_validator

from topologies.documents.units import Seconds
from topologies.hardware import Latency
from topologies.links.topology import Ids
from topologies.node import Node
from topologies.reading import CompleteError, Config, UserError, line_of
from topologies.registry import Registry

HOP_LATENCY = 150e-9  # NDR InfiniBand "under 150 ns" port to port, router-switch.com QM9700 comparison


class End(NamedTuple):
    """One end of every route: GPU, its node, its number inside the node, and the rail (NIC) it uses; each of shape (E,)."""

    gpu: Ids
    node: Ids
    local: Ids
    rail: Ids


@dataclass(frozen=True)
class LinkRange:
    """`count` equal directed links of a fabric, numbered in a row; `name` tells them apart for people.

    each: where so many neighbouring nodes in a row have so many links in a row for themselves: (nodes, links); else (0, 0).
    rails: these links are those of so many rails, in order.
    """

    kind: str
    count: int
    capacity: float  # bytes per second
    latency: float  # seconds
    name: Callable[[int], str]
    each: tuple[int, int] = (0, 0)
    rails: int = 1


class Backbone(NamedTuple):
    """Links between nodes and routes over them.

    ranges: links are numbered from 0, range after range. routes: from NIC to NIC (without NICs, from GPU to GPU), shape (E, hops)
    in order, padded with −1 at the end of a row.
    """

    ranges: tuple[LinkRange, ...]
    routes: Callable[[End, End], Ids]


class SwitchTree(NamedTuple):
    """Switches above the NICs, numbered from 0, tier after tier.

    above: the switches above each end, from the leaf to the top, shape (E, tiers). up, down: of each switch the link of the
    backbone to the next tier and back; −1 at the top.
    """

    above: Callable[[End], Ids]
    up: Ids
    down: Ids


class Fabric(Config):
    """Base of all fabrics."""

    direct: ClassVar[bool] = False  # can link accelerators that have no NICs

    kind: str = "single"  # a name in the registry of fabrics: ls topologies/fabrics
    hop_latency: Seconds = HOP_LATENCY  # per switch
    transport: str = ""  # what carries messages, where it is not InfiniBand or RoCE: ls sim/pricing/networks

    @property
    def periods(self) -> tuple[int, ...] | None:
        """The number of nodes below one switch of each tier: ranks shifted by multiples of all of them are wired alike. None
        where that does not hold for all ranks.
        """
        return None

    @property
    def aggregation(self) -> int:
        """The generation of SHARP that jobs use on its switches; 0: they do not add."""
        return 0

    def switch_tree(self, node: Node, nodes: int) -> SwitchTree:
        """The switches that add."""
        raise NotImplementedError

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """Links and routes between `nodes` nodes. Raises ValueError when the fabric does not fit the nodes."""
        raise NotImplementedError

    def backbone_of(self, nodes: Sequence[tuple[Node, int]]) -> Backbone:
        """Links and routes between nodes that are not alike: descriptions and how many of each, in order. Here links have rates
        of their own. Raises ValueError when the fabric does not fit the nodes.
        """
        if not all(node.nics for node, _ in nodes):
            raise ValueError(f"fabric.kind='{self.kind}': nodes that are not alike must all have NICs")
        return self.backbone(nodes[0][0], sum(count for _, count in nodes))


class AggregatingFabric(Fabric):
    """Switches that may add what passes them: InfiniBand with SHARP.

    sharp: its generation, 2 (Quantum: one streaming tree at a time per switch) or 3 (Quantum-2 and later: one per port), where
    jobs use it; 0 where they do not, which is NCCL's default (NCCL_COLLNET_ENABLE=1 and its plugin switch it on). All types that
    gradients are added in are supported (16- and 32-bit floats, bf16), no fp8. Source: docs.nvidia.com/networking SHARP 3.13
    general information, 3.10 collective library; HPC-X 2.26 NCCL-RDMA-SHARP plugins.
    """

    sharp: Literal[0, 2, 3] = 0  # generation of SHARP, sums in the switches; 0: none

    @model_validator(mode="after")
    def _over_infiniband(self) -> Self:
        if self.sharp and self.transport:
            raise ValueError(f"fabric.sharp={self.sharp} contradicts transport='{self.transport}': SHARP is InfiniBand's")
        return self

    @property
    def aggregation(self) -> int:
        """See `Fabric.aggregation`."""
        return self.sharp


fabrics: Registry[type[Fabric]] = Registry("fabric", package="topologies.fabrics")
F = TypeVar("F", bound=Fabric)


def read_fabric(data: object) -> object:
    """The fabric that a mapping describes, as its own class. Raises ValueError with one complete line."""
    if not isinstance(data, Mapping):
        return data
    data = {field: value for field, value in data.items() if value is not None}
    kind = data.get("kind", "single")
    try:
        config = fabrics[str(kind)]
    except UserError as error:
        raise CompleteError(f"fabric.kind={kind!r}: {error}") from None
    foreign = [field for field in data if field not in config.model_fields and _anywhere(field)]
    if foreign:
        known = ", ".join(field for field in config.model_fields if field != "kind")
        raise CompleteError(f"fabric.kind='{kind}' contradicts {' and '.join(foreign)}: its fields are {known}")
    required = [name for name, field in config.model_fields.items() if field.is_required() and data.get(name) is None]
    if required:
        raise CompleteError(f"fabric.{required[0]} is required by kind='{kind}'")
    try:
        return config.model_validate(dict(data))
    except ValidationError as error:
        raise CompleteError(line_of(error, config, "fabric")) from None


def _anywhere(field: str) -> bool:
    return any(field in fabrics[kind].model_fields for kind in fabrics)


def points(node: Node, nodes: int) -> tuple[int, str]:
    """Number and sort of the points that a fabric without a tree links: nodes with a router each, or GPUs without NICs."""
    return (nodes, "node") if node.nics else (nodes * node.gpus, "gpu")


def place(end: End, node: Node) -> Ids:
    """The point that each end is at."""
    return end.node if node.nics else end.gpu


def price(fabric: Fabric, node: Node) -> tuple[str, float]:
    """Kind and latency of a link between two points: a switch to the next one, or an accelerator to its neighbour."""
    return ("spine", fabric.hop_latency) if node.nics else ("nvlink", node.latency.nvlink)


def pack(routes: Ids) -> Ids:
    """Padding to the end of every row, links in order; columns that no row needs are dropped."""
    real = routes >= 0
    lengths = real.sum(axis=1)
    width = int(lengths.max(initial=0))
    if (lengths == routes.shape[1]).all():
        return routes
    packed = np.full((len(routes), width), -1, dtype=np.int64)
    packed[np.arange(width) < lengths[:, None]] = routes[real]  # both in row order
    return packed


@functools.cache
def nominal_latency(kind: str) -> float:
    """Default latency between two GPUs whose outermost link is of `kind`: the share of it in a measured step, in seconds."""
    inside, hop = Latency(), HOP_LATENCY
    ways = {"nvlink": inside.nvlink, "pcie": inside.pcie, "host": inside.pcie + inside.host, "loopback": inside.loopback}
    ways |= {"memory": 0.0, "disk": 0.0}
    ways["nic"] = inside.pcie + inside.nic + hop
    ways["spine"] = ways["nic"] + 2 * hop
    return ways[kind]
