"""What a cluster is made of: GPU, node, fabric. Plain descriptions; `topologies.network` gives them routes.

Every field that a unit applies to is read with its unit ("400 Gb/s") and held in bytes, seconds, FLOP/s, bytes per second. A
bandwidth is one direction's. Zero is the value of a part that is not there.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from topologies.board import Board, wirings
from topologies.reading import Config
from topologies.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


class Gpu(Config):
    """One accelerator, or one CPU process (sms = 0)."""

    name: str
    sms: int = Field(ge=0)  # streaming multiprocessors
    peak: dict[Dtype, FlopsPerSecond] = Field(min_length=1)  # dense, without sparsity; a dtype that is absent is not supported
    memory: Bytes = Field(gt=0)
    memory_bandwidth: BytesPerSecond = Field(gt=0)
    power: float = Field(default=0.0, gt=0)  # watts, the board's limit
    source: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Gpu:
        for dtype, value in self.peak.items():
            if value <= 0:
                raise ValueError(f"gpu.peak.{dtype}=0: must be greater than 0; leave out a dtype that is not supported")
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.sms, self.memory, self.memory_bandwidth, tuple(sorted(self.peak.items()))))


class Latency(Config):
    """Nominal seconds between two GPUs for the smallest message, besides its transfer, per kind of way.

    A way that leaves through one port and arrives through another has half on each. The defaults are NCCL's per-step hardware
    latencies for its low-latency protocol on rings (github.com/NVIDIA/nccl src/graph/tuning.cc at 5067397c, hwLat: NVLINK 0.6,
    PCI 1.0, NET 2.7 us). NCCL names no price for crossing sockets. A profile's measured step includes these defaults: what a
    cluster's description says differently is added to it or taken from it.
    """

    nvlink: Seconds = 0.6e-6
    pcie: Seconds = 1.0e-6
    host: Seconds = 0.0
    nic: Seconds = 2.7e-6
    loopback: Seconds = 0.0


class Node(Config):
    """One machine, or one NVLink domain: GPUs that reach each other without the fabric.

    GPU g uses NIC g·nics // gpus. When a node has more NICs than GPUs, the NICs of one GPU count as one of their summed rate.
    """

    gpu: Gpu
    gpus: int = Field(ge=1)
    wiring: str  # a name in the wiring registry: ls topologies/wirings
    nvlink: BytesPerSecond = Field(default=0.0, gt=0)  # per GPU, all its links together
    pcie: BytesPerSecond = Field(default=0.0, gt=0)  # per GPU slot, and per uplink of a PCIe switch
    multicast: bool = (
        False  # the NVSwitch adds and multicasts (third generation and later: NVLink SHARP, NVIDIA H100 architecture white paper)
    )
    gpus_per_switch: int = Field(default=0, ge=1)  # PCIe switch; absent: GPUs hang on the host bridge (wiring "pcie")
    sockets: int = Field(default=1, ge=1)  # CPU sockets (NUMA domains) that share the GPUs evenly (wiring "pcie")
    host: BytesPerSecond = Field(default=0.0, gt=0)  # between two sockets
    loopback: BytesPerSecond = Field(default=0.0, gt=0)  # per process of a machine without GPUs
    nics: int = Field(default=0, ge=0)
    nic: BytesPerSecond = Field(default=0.0, gt=0)  # per NIC
    latency: Latency = Latency()

    @property
    def rails(self) -> int:
        """Separate ways out of the node: the NICs, or the GPUs when several NICs serve one GPU."""
        return min(self.nics, self.gpus)

    @field_validator("wiring")
    @classmethod
    def _known(cls, wiring: str) -> str:
        wirings[wiring]  # raises with the nearest name
        return wiring

    @model_validator(mode="after")
    def _consistent(self) -> Node:
        if self.nics and self.gpus % self.nics and self.nics % self.gpus:
            raise ValueError(f"node.nics={self.nics} does not divide gpus={self.gpus}, nor the other way round")
        if bool(self.nics) != bool(self.nic):
            raise ValueError(f"node.nics={self.nics} contradicts nic={self.nic:g} B/s: give both or neither")
        used = {link.kind for link in self.board().links}
        for kind in ("nvlink", "host", "loopback"):
            rate = getattr(self, kind)
            if rate and kind not in used:
                raise ValueError(f"node.{kind}={rate:g} B/s contradicts wiring='{self.wiring}': there is no {kind} link here")
        if self.multicast and self.wiring != "switch":
            raise ValueError(f"node.multicast=true contradicts wiring='{self.wiring}': only wiring='switch' has an NVSwitch")
        return self

    def board(self) -> Board:
        """The links inside the node and the routes over them. Raises ValueError when a field that the wiring needs is missing."""
        return wirings[self.wiring](self)


class Fabric(Config):
    """Switches between nodes.

    "single": one non-blocking switch. "rail": NIC i of `leaf_nodes` nodes hangs on one leaf, another rail or another group of
    nodes is reached over the spine. "fat_tree": all NICs of `leaf_nodes` nodes hang on one leaf. With three tiers, describe the
    lowest tier that is oversubscribed as the leaf.
    """

    kind: Literal["single", "rail", "fat_tree"] = "single"
    oversubscription: float = Field(default=1.0, ge=1)  # NIC bandwidth below a leaf over its bandwidth to the spine
    leaf_nodes: int = Field(default=0, ge=1)
    hop_latency: Seconds = 150e-9  # per switch; NDR InfiniBand "under 150 ns" port to port, router-switch.com QM9700 comparison

    @model_validator(mode="after")
    def _consistent(self) -> Fabric:
        if self.kind == "single" and (self.oversubscription > 1 or self.leaf_nodes):
            raise ValueError("fabric.kind='single' contradicts oversubscription or leaf_nodes: it is one non-blocking switch")
        if self.kind != "single" and not self.leaf_nodes:
            raise ValueError(f"fabric.leaf_nodes is required by kind='{self.kind}'")
        return self


def nominal_latency(kind: str) -> float:
    """Seconds between two GPUs whose outermost link is of this kind, with the defaults above: a measured step's share."""
    inside, hop = Latency(), Fabric().hop_latency
    ways = {"nvlink": inside.nvlink, "pcie": inside.pcie, "host": inside.pcie + inside.host, "loopback": inside.loopback}
    ways["nic"] = inside.pcie + inside.nic + hop
    ways["spine"] = ways["nic"] + 2 * hop
    return ways[kind]
