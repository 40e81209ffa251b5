"""The inside of one node: a short list of links, and tables of the routes over them.

A wiring is a function `NodeParts → Board` in one file of `topologies/wirings`, registered under the name that descriptions use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from topologies.hardware import NodeParts
from topologies.links.topology import Ids
from topologies.registry import Registry

KINDS = ("nvlink", "pcie", "host", "loopback", "nic", "spine", "memory", "disk")
UNPRICED = ("memory", "disk")  # of the node's CPUs: descriptions give the rate that is reached
Path = tuple[int, ...]
Duplex = tuple[int, int]  # link ids: away from the GPU, towards the GPU


class Link(NamedTuple):
    """A directed link: kind of KINDS, name for people, bytes per second, seconds."""

    kind: str
    name: str
    capacity: float
    latency: float


class Board:
    """Links of a node and routes over them, filled by a wiring. Link ids count from 0 in the order of `link`."""

    def __init__(self, node: NodeParts) -> None:
        self.node = node
        self.links: list[Link] = []
        self.rail = [gpu * node.rails // node.gpus for gpu in range(node.gpus)]  # number of each GPU's way out of the node
        self.bundles: list[tuple[int, ...]] = []  # the NICs behind each rail
        self.switch: list[tuple[Path, Path]] = []  # from each GPU up to the NVSwitch, and down; empty without one
        self.slots_of: list[Duplex] = []  # the PCIe slot of each GPU
        self.host: list[tuple[Path, Path]] = []  # from each GPU to the CPUs' memory, and back; empty without a way
        self.memory, self.disk = -1, (-1, -1)  # links of an optimizer's pass over the CPUs' memory, and from and to the disks
        self._inside: dict[tuple[int, int], Path] = {}
        self._ways: list[tuple[Path, Path]] = [((), ()) for _ in range(node.gpus)]

    def link(self, kind: str, name: str, capacity: float, latency: float = 0.0) -> int:
        """Add a directed link; returns its id. Raises ValueError when its capacity is missing from the description."""
        if capacity <= 0:
            raise ValueError(f"node.{kind} is required by wiring='{self.node.wiring}'")
        self.links.append(Link(kind, name, capacity, latency))
        return len(self.links) - 1

    def port(self, kind: str, name: str, scale: float = 1.0, latency: float | None = None) -> Duplex:
        """Add a link in each direction at the node's rate for `kind` times `scale`, by default each with half its latency."""
        each = getattr(self.node.latency, kind) / 2 if latency is None else latency
        capacity = getattr(self.node, kind) * scale
        return self.link(kind, f"{name} out", capacity, each), self.link(kind, f"{name} in", capacity, each)

    def join(self, source: int, destination: int, path: Path) -> None:
        """Declare the route from one GPU to another of the node."""
        self._inside[source, destination] = path

    def route(self, source: int, destination: int) -> Path:
        """Links from one GPU of the node to another, or from or to the switch, numbered after them; none without a way."""
        if destination == self.node.gpus:
            return self.switch[source][0]
        return self.switch[destination][1] if source == self.node.gpus else self._inside.get((source, destination), ())

    def way(self, gpu: int) -> tuple[Path, Path]:
        """Links from a GPU to the fabric, and back."""
        return self._ways[gpu]

    @property
    def ways_out(self) -> list[Path]:
        """Links from each GPU to the fabric."""
        return [out for out, _ in self._ways]

    @property
    def joined(self) -> int:
        """Number of ordered pairs of GPUs with a route inside the node."""
        return len(self._inside)

    def star(self, kind: str, noun: str) -> list[Duplex]:
        """A port per GPU through which it reaches every other: out of the one, into the other. Returns the ports."""
        ports = [self.port(kind, f"{noun} {gpu} {kind}") for gpu in range(self.node.gpus)]
        for a, (out, _) in enumerate(ports):
            for b, (_, into) in enumerate(ports):
                if a != b:
                    self.join(a, b, (out, into))
        return ports

    def slots(self) -> None:
        """A PCIe slot per GPU with its NIC beside it under the same switch, or the GPUs' own NICs; nothing without NICs."""
        if self.node.integrated_nics:
            self.uplink([((), ())] * self.node.gpus)
        elif self.node.nics:
            self.slots_of = [self.port("pcie", f"gpu {gpu} pcie") for gpu in range(self.node.gpus)]
            self.uplink([((out,), (into,)) for out, into in self.slots_of])

    def attach(self) -> None:
        """Join the GPUs with the CPUs' memory and the disks; nothing where the node does not describe them, or no PCIe."""
        node, cpu = self.node, self.node.cpu
        if cpu is None or not (self.host or self.slots_of or node.pcie):
            return
        if not self.host:
            slots = self.slots_of or [self.port("pcie", f"gpu {gpu} pcie") for gpu in range(node.gpus)]
            each = node.gpus_per_switch if node.pcie else 0
            trunks = [self.port("pcie", f"switch {i} pcie", latency=0.0) for i in range(-(-node.gpus // each))] if each else []
            rises = [[slot, *([trunks[gpu // each]] if each else [])] for gpu, slot in enumerate(slots)]
            self.host = [(tuple(out for out, _ in rise), tuple(into for _, into in reversed(rise))) for rise in rises]
        self.memory = self.link("memory", "cpu memory", cpu.memory_bandwidth * cpu.efficiency)
        if cpu.disk:
            self.disk = self.link("disk", "disk read", cpu.disk_read), self.link("disk", "disk write", cpu.disk_write)

    def uplink(self, ways: Sequence[tuple[Path, Path]], bundles: Sequence[Sequence[int]] = ()) -> None:
        """Add the NICs; `ways[g]` is the path from GPU g to its NIC and the path back. Without NICs nothing is added.

        bundles: the NICs behind each rail, where they are not spread evenly in order.
        """
        node = self.node
        if not node.nics:
            return
        each = node.nics // node.rails
        self.bundles = [tuple(nics) for nics in bundles or [range(i * each, (i + 1) * each) for i in range(node.rails)]]
        names = [f"nic {bundle[0] if len(bundle) == 1 else rail}" for rail, bundle in enumerate(self.bundles)]
        nics = [self.port("nic", name, scale=len(bundle)) for name, bundle in zip(names, self.bundles, strict=True)]
        for gpu, (away, back) in enumerate(ways):
            out, into = nics[self.rail[gpu]]
            self._ways[gpu] = ((*away, out), (into, *back))

    def host_tables(self) -> tuple[Ids, Ids]:
        """Link ids padded with −1 from each GPU to the CPUs' memory, and back: (gpus, hops)."""
        return _padded([away for away, _ in self.host]), _padded([back for _, back in self.host])

    def tables(self) -> tuple[Ids, Ids, Ids]:
        """Link ids padded with −1: inside (gpus, gpus, hops), out to the fabric (gpus, hops), in from the fabric (gpus, hops).

        With a switch between the GPUs, it is one more end inside: (gpus + 1, gpus + 1, hops).
        """
        ends = self.node.gpus + bool(self.switch)
        paths = dict(self._inside)
        for gpu, (up, down) in enumerate(self.switch):
            paths |= {(gpu, self.node.gpus): up, (self.node.gpus, gpu): down}
        inside = _padded([paths.get((a, b), ()) for a in range(ends) for b in range(ends)])
        return inside.reshape(ends, ends, -1), _padded([out for out, _ in self._ways]), _padded([into for _, into in self._ways])


def _padded(paths: list[Path]) -> Ids:
    width = max(len(path) for path in paths)
    return np.array([path + (-1,) * (width - len(path)) for path in paths], dtype=np.int64).reshape(len(paths), width)


wirings: Registry[Callable[[NodeParts], Board]] = Registry("wiring", package="topologies.wirings")
