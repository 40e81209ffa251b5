"""Descriptions of GPUs, CPUs and nodes; a wiring adds links and routes (`topologies.board`).

Every field with a unit is read with its unit ("400 Gb/s") and held in bytes, seconds, FLOP/s, bytes per second. A bandwidth is
per direction. Zero is the value of a part that is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import not_
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from topologies.documents.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from topologies.reading import Config

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
MAX_PER_NODE = 1024  # GPUs, and NICs, of a node: the largest NVLink domain that is announced has 576 (Rubin Ultra NVL576)
EDGES = 2048  # of a node that is described edge by edge


AT = " at "  # in the name of a GPU that runs at a part of its clock: "h100-sxm at 0.8"


class Gpu(Config):
    """One accelerator, or one CPU process (sms = 0)."""

    name: str  # as profiles and prices name it
    sms: int = Field(ge=0, le=10**6)  # streaming multiprocessors
    peak: dict[Dtype, FlopsPerSecond] = Field(min_length=1)  # dense, without sparsity; a dtype that is absent is not supported
    memory: Bytes = Field(gt=0)  # that a process can use: what nvidia-smi shows, not the data sheet's
    memory_bandwidth: BytesPerSecond = Field(gt=0)  # nominal
    power: float = Field(default=0.0, gt=0, le=1e6)  # watts, the board's limit; a lower one slows products that reach it
    nvlink: BytesPerSecond = Field(default=0.0, gt=0)  # of one NVLink; for nodes described by their edges
    pcie: BytesPerSecond = Field(default=0.0, gt=0)  # of its slot; for nodes described by their edges
    multicast: bool = False  # takes part in sums and copies inside an NVSwitch (NVLink SHARP, Hopper and later)
    mxfp8: bool = False  # multiplies fp8 numbers of which 32 share a scale (OCP MX; Blackwell, CDNA 4 and later)
    fp8_columns: bool = False  # multiplies fp8 numbers that lie by columns, too: nothing is turned before (NVIDIA's Blackwell)
    source: str = ""  # where the numbers come from

    @property
    def model(self) -> str:
        """Its name at any clock, as profiles and prices name it."""
        return self.name.partition(AT)[0]

    def at_clock(self, clock: float) -> Gpu:
        """The GPU at a part of its clock: arithmetic is slower, memory and links are not."""
        peak = {dtype: rate * clock for dtype, rate in self.peak.items()}
        return self.model_copy(update={"name": f"{self.name}{AT}{clock:g}", "peak": peak})

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

    nvlink: Seconds = 0.6e-6  # over NVLink
    pcie: Seconds = 1.0e-6  # over PCIe
    host: Seconds = 0.0  # between sockets
    nic: Seconds = 2.7e-6  # between nodes
    loopback: Seconds = 0.0  # between processes of a machine without GPUs


class Cpu(Config):
    """What the GPUs of a node share beside them: the memory of its CPUs, and NVMe disks. Their copies cross the GPUs' PCIe slots
    and, with gpus_per_switch, the uplink of their PCIe switch.
    """

    memory: Bytes = Field(gt=0)  # of all sockets together
    memory_bandwidth: BytesPerSecond = Field(gt=0)  # of all sockets together, nominal
    efficiency: float = Field(default=0.4, gt=0, le=1)  # of it that an optimizer's pass over the states reaches; 0.4 is assumed
    disk: Bytes = Field(default=0.0, gt=0)  # what NVMe disks have room for
    disk_read: BytesPerSecond = Field(default=0.0, gt=0)  # of all disks together
    disk_write: BytesPerSecond = Field(default=0.0, gt=0)  # of all disks together

    @model_validator(mode="after")
    def _consistent(self) -> Cpu:
        if not bool(self.disk) == bool(self.disk_read) == bool(self.disk_write):
            raise ValueError(f"node.cpu.disk={self.disk:g} B: give disk, disk_read and disk_write, or none of them")
        return self


class Edge(Config):
    """A cable or trace inside a node, the same in both directions, for the wiring "graph"."""

    ends: tuple[str, str]  # "gpu 0", "nic 1", "nvswitch"; PCIe switches and sockets by any other name
    kind: Literal["nvlink", "pcie", "host"]
    count: int = Field(default=1, ge=1, le=1000)  # NVLinks side by side
    rate: BytesPerSecond = Field(default=0.0, gt=0)  # of all of them; absent: what the GPU's description says

    @model_validator(mode="after")
    def _consistent(self) -> Edge:
        if self.ends[0] == self.ends[1]:
            raise ValueError(f"node.edges: ends={list(self.ends)} are one and the same")
        return self


class NodeParts(Config):
    """The fields of a node's description, which its wiring reads; `topologies.node.Node` checks them against the wiring.

    GPU g uses NIC g·nics // gpus. When a node has more NICs than GPUs, the NICs of one GPU count as one of their summed rate.
    """

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("gpuspernode", "numgpus", "ngpus"), "gpus"),
        **dict.fromkeys(("nicbandwidth", "networkbandwidth", "network", "infiniband"), "nic"),
        **dict.fromkeys(("numnics", "nnics"), "nics"),
        **dict.fromkeys(("nvlinkbandwidth", "xgmi"), "nvlink"),
    }

    gpu: Gpu  # its accelerators: a name of the catalogue, or fields
    gpus: int = Field(ge=1, le=MAX_PER_NODE)  # of one node
    wiring: str  # a name in the wiring registry: ls topologies/wirings
    nvlink: BytesPerSecond = Field(default=0.0, gt=0)  # per GPU, all its links together (or Infinity Fabric …)
    pcie: BytesPerSecond = Field(
        default=0.0, gt=0
    )  # per GPU slot, and per uplink of a PCIe switch; wiring "pcie": by default the GPU's
    gpus_per_switch: int = Field(
        default=0, ge=1, le=MAX_PER_NODE
    )  # PCIe switch; absent: they hang on the host bridge (wiring "pcie", copies)
    sockets: int = Field(default=1, ge=1, le=64)  # CPU sockets (NUMA domains) that share the GPUs evenly (wiring "pcie")
    host: BytesPerSecond = Field(default=0.0, gt=0)  # between two sockets
    loopback: BytesPerSecond = Field(default=0.0, gt=0)  # per process of a machine without GPUs
    edges: tuple[Edge, ...] = Field((), max_length=EDGES)  # wiring "graph"
    nics: int = Field(default=0, ge=0, le=MAX_PER_NODE)  # network interfaces of one node
    nic: BytesPerSecond = Field(default=0.0, gt=0)  # per NIC
    integrated_nics: bool = Field(False, exclude_if=not_)  # NICs are ports of the accelerators themselves (Gaudi), behind no PCIe
    latency: Latency = Latency()  # of the smallest message, by kind of way
    cpu: Cpu | None = None  # absent: nothing can be offloaded to the host

    @property
    def rails(self) -> int:
        """Separate ways out of the node: the NICs, or the GPUs when several NICs serve one GPU."""
        return min(self.nics, self.gpus)
