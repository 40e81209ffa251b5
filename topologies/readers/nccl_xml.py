"""NCCL's topology XML (`NCCL_TOPO_DUMP_FILE`): the PCIe tree of a node with its GPUs, NICs and NVLinks.

`<system>` holds `<cpu>`, these hold `<pci>` in each other, these `<gpu>` with `<nvlink>`, or `<nic>` with `<net>`
(github.com/NVIDIA/nccl src/graph/xml.cc). Rates are derived: NVLink by SM, PCIe by link_speed × link_width, net by speed in Mb/s.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, deque
from itertools import combinations
from typing import Any
from xml.etree.ElementTree import Element

from topologies.readers import NIC, SOCKETS, ClusterDump, readers

# nominal GB/s of one NVLink and direction, by SM architecture; NVIDIA's data sheets of P100, V100, A100, H100, B200
NVLINK = {"60": 20, "70": 25, "80": 25, "90": 25, "100": 50, "103": 50}
# GB/s between sockets, github.com/NVIDIA/nccl src/graph/topo.h: Intel by family and lowest model, then others by vendor
INTEL = ((207, 40), (143, 22), (85, 10), (0, 6))
VENDORS = {"AuthenticAMD": 16, "ARM": 6, "IBM": 32}
_NVSWITCH = "0x068000"


@readers("NCCL topology")
def nccl_xml(text: str) -> ClusterDump | None:
    """The node, as a graph of edges."""
    if "<system" not in text or not re.match(r"\s*<", text):
        return None
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("declares a document type or entities; NCCL's files have none, and they are not read")
    try:
        system = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not valid XML: {error}") from None
    if system.tag != "system":
        raise ValueError(f"the outermost element is '{system.tag}', not 'system'")
    return _Dump(system).read()


class _Dump:
    def __init__(self, system: Element) -> None:
        self.edges: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.slots: list[str] = []  # parts whose PCIe rate is not in the file
        self.switches = 0
        self.names: dict[str, str] = {}  # bus id or number -> vertex
        self.gpus: list[tuple[str, Element]] = []  # vertex above it, and the pci element
        self.nets: list[tuple[str, Element, Element]] = []  # vertex above, the pci (or cpu) element, the net
        hosts: dict[str, list[tuple[str, Element]]] = {}
        for number, cpu in enumerate(system.findall("cpu")):
            hosts.setdefault(cpu.get("host_hash", ""), []).append((f"socket {number}", cpu))
            self._descend(f"socket {number}", cpu)
        for sockets in hosts.values():
            if len(sockets) > 64:
                raise ValueError(f"{len(sockets)} elements 'cpu' of one host: more than 64 sockets are not read")
            self._sockets(sockets)
        other = sorted({child.tag for child in system if child.tag != "cpu"})
        self.notes += [f"ignored: element '{tag}'" for tag in other]

    def read(self) -> ClusterDump:
        """The description of the node."""
        if not self.gpus:
            raise ValueError("there is no 'gpu' element")
        node: dict[str, Any] = {"gpus": len(self.gpus), "wiring": "graph"}
        self.gpus.sort(key=lambda pair: _rank(pair[1]))
        for number, (above, pci) in enumerate(self.gpus):
            self.names[pci.get("busid", "")] = f"gpu {number}"
            self._pcie(f"gpu {number}", above, pci)
        node |= self._nics()
        self._nvlinks()
        if self.slots:
            self.notes.append(f"not in the file: PCIe rate of {', '.join(self.slots)}: 16 lanes as node.gpu has assumed")
        sm = sorted({gpu.get("sm", "?") for _, pci in self.gpus for gpu in pci.findall("gpu")})
        self.notes.append(f"not in the file: node.gpu (SM {', '.join(sm)})")
        return ClusterDump({"node": node | {"edges": self.edges}}, tuple(self.notes))

    def _descend(self, top: str, cpu: Element) -> None:
        """Collect GPUs and NICs below a socket, and the bridges on the way."""
        below = deque((top, child) for child in cpu)
        while below:
            above, element = below.popleft()
            if element.tag == "nic":
                self.nets += [(above, cpu, net) for net in element.findall("net")]
            elif element.tag == "pci" and element.find("gpu") is not None:
                self.gpus.append((above, element))
            elif element.tag == "pci" and element.find("nic") is not None:
                self.nets += [(above, element, net) for net in element.iter("net")]
            elif element.tag == "pci" and element.find("pci") is not None:
                self.switches += 1
                name = f"switch {self.switches - 1}"
                self._pcie(name, above, element)
                below += [(name, child) for child in element]
            else:
                self.notes.append(f"ignored: {element.tag} {element.get('busid', element.get('dev', ''))} without GPU or NIC")

    def _pcie(self, name: str, above: str, pci: Element) -> None:
        edge = {"ends": (name, above), "kind": "pcie"}
        speed = re.match(r"[0-9.]+", pci.get("link_speed", ""))
        width = pci.get("link_width", "")
        if speed and width.isdigit() and int(width):
            lane = float(speed[0]) * (128 / 130 if float(speed[0]) >= 8 else 0.8) / 8  # line code, then bytes
            edge["rate"] = f"{lane * int(width):.6g} GB/s"
        else:
            self.slots.append(name)
        self.edges.append(edge)

    def _sockets(self, sockets: list[tuple[str, Element]]) -> None:
        rate = _between_sockets(sockets[0][1])
        if len(sockets) > 1 and not rate:
            self.notes.append(f"not in the file: {SOCKETS} assumed between sockets")
        pairs = combinations([name for name, _ in sockets], 2)
        self.edges += [{"ends": pair, "kind": "host", "rate": f"{rate} GB/s" if rate else SOCKETS} for pair in pairs]

    def _nics(self) -> dict[str, Any]:
        """The NICs of the fastest kind."""
        speeds = {net: _speed(net) for _, _, net in self.nets}
        fastest = max(speeds.values(), default=0)
        slower = sorted(net.get("name", "?") for _, _, net in self.nets if speeds[net] < fastest)
        if slower:
            self.notes.append(f"ignored: slower NICs {', '.join(slower)}")
        nets = [entry for entry in self.nets if speeds[entry[2]] == fastest]
        for number, (above, pci, _) in enumerate(nets):
            self._pcie(f"nic {number}", above, pci)
        if nets and not fastest:
            self.notes.append(f"not in the file: rate of a NIC, node.nic={NIC} unless given")
        return {"nics": len(nets), "nic": f"{fastest} Mb/s" if fastest else NIC} if nets else {}

    def _nvlinks(self) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        for _, pci in self.gpus:
            name = self.names[pci.get("busid", "")]
            gpu = pci.find("gpu")
            for link in gpu if gpu is not None else ():
                end = "nvswitch" if link.get("tclass") == _NVSWITCH else self.names.get(link.get("target", ""), "")
                count = link.get("count", "")
                if link.tag != "nvlink" or not end:
                    self.notes.append(f"ignored: {link.tag} of '{name}' to {link.get('target', 'the CPU')}")
                elif not count.isdigit() or not int(count):
                    raise ValueError(f"nvlink of '{name}' to '{end}': count='{count}' is not a whole number of at least 1")
                else:
                    counts[name, end] += int(count)
        architectures = {gpu.get("sm", "") for _, pci in self.gpus for gpu in pci.findall("gpu")}
        each = NVLINK.get(architectures.pop(), 0) if len(architectures) == 1 else 0
        for (a, b), total in counts.items():
            back = counts[b, a] if b != "nvswitch" else total
            if back != total:
                raise ValueError(f"not symmetric: '{a}' has {total} NVLinks to '{b}', which has {back} back")
            if b == "nvswitch" or int(a.split()[1]) < int(b.split()[1]):
                rate = {"rate": f"{each * total} GB/s"} if each else {}
                self.edges.append({"ends": (a, b), "kind": "nvlink", "count": total, **rate})


def _rank(pci: Element) -> tuple[int, int]:
    """GPUs are numbered by rank where the file has it, else by device."""
    gpu = pci.find("gpu")
    numbers = [gpu.get(key, "") if gpu is not None else "" for key in ("rank", "dev")]
    rank, dev = (int(number) if number.isdigit() else 1 << 30 for number in numbers)
    return rank, dev


def _speed(net: Element) -> int:
    speed = net.get("speed", "")
    return int(speed) if speed.isdigit() else 0


def _between_sockets(cpu: Element) -> int:
    """GB/s, or 0 when the CPU is not known."""
    vendor, family, model = cpu.get("vendor", ""), cpu.get("familyid", ""), cpu.get("modelid", "")
    if vendor == "GenuineIntel" and family == "6" and model.isdigit():
        return next(rate for lowest, rate in INTEL if int(model) >= lowest)
    return VENDORS.get(vendor, {"arm64": 6, "ppc64": 32}.get(cpu.get("arch", ""), 0))
