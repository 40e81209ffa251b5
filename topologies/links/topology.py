"""The contract between hardware and engine: links with capacity and latency per direction, and routes between GPUs.

A `Topology` never builds its whole graph: link ids are integers found by arithmetic, so 16,384 GPUs cost no more memory than 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from topologies.hardware import Cpu, Gpu

SHARED = ("spine",)  # kinds of links of the fabric, which belong to no node
Ids = NDArray[np.int64]
Values = NDArray[np.float64]


class Topology(Protocol):
    """The wiring of GPUs. GPUs are numbered 0 … gpus − 1; directed links are numbered 0 … links − 1. Hashable."""

    def __hash__(self) -> int: ...

    @property
    def gpus(self) -> int:
        """Number of GPUs."""

    @property
    def links(self) -> int:
        """Number of directed links."""

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """Links from source[e] to destination[e], in order: shape (E, hops), padded with −1. A GPU to itself has no links."""

    def node_of(self, gpu: Ids) -> Ids:
        """The node of each GPU."""

    def kind(self, link: Ids) -> Ids:
        """Index into `kinds` for each link id."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of link, e.g. ("nvlink", "pcie", "nic", "leaf"), innermost first; a profile prices each kind."""

    def capacity(self, link: Ids) -> Values:
        """Nominal bytes per second in the link's direction."""

    def latency(self, link: Ids) -> Values:
        """Seconds that a message spends on the link besides its transfer time."""

    def name(self, link: int) -> str:
        """A readable name: `"node 3 nic 2 out"`."""


class Hosted(Topology, Protocol):
    """A `Topology` whose nodes describe their CPUs."""

    @property
    def cpu(self) -> Cpu | None:
        """Memory and disks of each node."""

    def place(self, gpu: Ids, name: str) -> Ids:
        """Endpoint numbers, which `routes` knows too, of what a copy of each GPU begins or ends at: "gpu", "cpu" (the memory
        of its node) or "nvme" (the disks of its node). From "cpu" to "cpu" is an optimizer's pass over the memory.
        """


class Unequal(Topology, Protocol):
    """A `Topology` whose nodes are not alike."""

    @property
    def gpu_kinds(self) -> Sequence[Gpu]:
        """The different GPUs."""

    def node_kind(self, gpu: Ids) -> Ids:
        """A number for each GPU that only GPUs in nodes of one description share."""

    def gpu_kind(self, gpu: Ids) -> Ids:
        """Index into `gpu_kinds` for each GPU."""


def is_hosted(topology: Topology) -> TypeGuard[Hosted]:
    """Whether nodes describe their CPUs. A topology that stands for another (`ImpairedTopology`) has its attributes, which
    isinstance does not see from Python 3.12 on.
    """
    return hasattr(topology, "cpu") and hasattr(topology, "place")


def is_unequal(topology: Topology) -> TypeGuard[Unequal]:
    """Whether nodes may be unlike."""
    return hasattr(topology, "gpu_kinds")


def is_multicast(topology: Topology) -> TypeGuard[Multicast]:
    """Whether there are switches that add and multicast."""
    return hasattr(topology, "switch_of")


def aggregation(topology: Topology) -> Aggregating | None:
    """The topology as one whose fabric's switches may add; None where no fabric has such switches."""
    found: Aggregating | None = topology if hasattr(topology, "aggregators") else None  # type: ignore[assignment]
    return found if found is not None and found.generation else None


def gpu_kind(topology: Topology, gpu: Ids) -> Ids:
    """The kind of each GPU, 0 where all are alike."""
    return topology.gpu_kind(gpu) if is_unequal(topology) else np.zeros(np.shape(gpu), dtype=np.int64)


def node_kind(topology: Topology, gpu: Ids) -> Ids:
    """The kind of each GPU's node, 0 where all are alike."""
    return topology.node_kind(gpu) if is_unequal(topology) else np.zeros(np.shape(gpu), dtype=np.int64)


def kind_of_link(name: str) -> str:
    """`nic` of `nic h100-sxm`: the kind of a link without the GPU whose nodes have it."""
    return name.partition(" ")[0]


class Multicast(Topology, Protocol):
    """A `Topology` with switches that add and multicast (NVLink SHARP)."""

    def switch_of(self, gpu: Ids) -> Ids:
        """The endpoint number (gpus or more) of the switch beside each GPU, which `routes` knows too; −1 where there is none."""


class Aggregating(Topology, Protocol):
    """A `Topology` whose fabric has switches that may add and copy (InfiniBand SHARP)."""

    @property
    def generation(self) -> int:
        """Of SHARP, as jobs use it; 0: not at all."""

    def aggregators(self, gpu: Ids) -> Ids:
        """Endpoint numbers of the switches above the NIC of each GPU, from the leaf to the top, shape (…, tiers). `routes` knows
        the way from a GPU to its leaf and from each switch to the next one, and back.
        """

    def nic_of(self, gpu: Ids) -> Ids:
        """A number for each GPU that only GPUs with the same NIC share."""
