"""`nvidia-smi topo -m`: a matrix of how each two GPUs and NICs reach each other.

Cells, from the legend that the command prints: X itself; NV# so many bonded NVLinks; PIX at most one PCIe bridge between; PXB
several; PHB a PCIe host bridge; NODE several host bridges of a NUMA node; SYS another NUMA node (SOC in old drivers).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, takewhile
from typing import Any

from topologies.readers import NIC, SOCKETS, ClusterDump, readers

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CELL = re.compile(r"X|NV[1-9][0-9]{0,3}|PIX|PXB|PHB|NODE|SYS|SOC")
_MOST_LINKS = 18  # NVLinks of one GPU, Hopper and Blackwell: more in a row of the matrix means that a switch spreads them
_MOST = 128  # GPUs and NICs of a node whose driver prints a matrix
Cells = dict[tuple[str, str], str]


@readers("nvidia-smi topo -m")
def topo_matrix(text: str) -> ClusterDump | None:
    """The node. PCIe switches and sockets follow from the cells; rates come from the GPU's description."""
    lines = [_ANSI.sub("", line).split() for line in text.splitlines()]
    start = next((at for at, words in enumerate(lines) if words[:1] == ["GPU0"] and words[1:2] != ["X"]), None)
    if start is None:
        return None
    names = list(takewhile(lambda word: word not in ("CPU", "NUMA", "GPU"), lines[start]))
    if len(names) > _MOST:
        raise ValueError(f"{len(names)} columns: more than {_MOST} GPUs and NICs are not read")
    cells, numa = _cells(names, lines[start + 1 :])
    gpus = [name for name in names if re.fullmatch(r"GPU\d+", name)]
    nics = [name for name in names if name not in gpus]
    called = {name: f"gpu {i}" for i, name in enumerate(gpus)} | {name: f"nic {i}" for i, name in enumerate(nics)}
    edges = _nvlinks(gpus, cells, called) + _boards(names, cells, numa, called)
    node: dict[str, Any] = {"gpus": len(gpus), "wiring": "graph", "edges": edges}
    notes = ["ignored: CPU affinity", "not in the file: rates of NVLink and PCIe are those of node.gpu"]
    if any(edge["kind"] == "host" for edge in edges):
        notes.append(f"not in the file: {SOCKETS} assumed between sockets")
    if nics:
        node |= {"nics": len(nics), "nic": NIC}
        notes.append(f"not in the file: rate of a NIC, node.nic={NIC} unless given")
    return ClusterDump({"node": node}, tuple(notes))


def _cells(names: list[str], rows: list[list[str]]) -> tuple[Cells, dict[str, str]]:
    """The checked cells, and the NUMA node of each row that names one."""
    cells: Cells = {}
    numa: dict[str, str] = {}
    for words in rows:
        name = words[0] if words else ""
        if name not in names or (name, name) in cells:
            continue
        row = words[1 : len(names) + 1]
        if len(row) < len(names):
            raise ValueError(f"row '{name}' has {len(row)} cells, but there are {len(names)} columns")
        for other, cell in zip(names, row, strict=True):
            if not _CELL.fullmatch(cell) or (cell == "X") != (name == other):
                raise ValueError(f"row '{name}', column '{other}': '{cell}' is not expected there")
            cells[name, other] = "SYS" if cell == "SOC" else cell
        rest = words[len(names) + 1 :]
        if len(rest) > 1 and rest[1].isdigit():
            numa[name] = rest[1]
    for name in names:
        if (name, name) not in cells:
            raise ValueError(f"row '{name}' is missing")
    for a, b in combinations(names, 2):
        if cells[a, b] != cells[b, a]:
            raise ValueError(f"not symmetric: '{a}' to '{b}' is {cells[a, b]}, but '{b}' to '{a}' is {cells[b, a]}")
    return cells, numa


def _nvlinks(gpus: list[str], cells: Cells, called: dict[str, str]) -> list[dict[str, Any]]:
    """Links between pairs; or to a switch, when all pairs have equally many and more than a GPU has in all."""
    counts = {pair: int(cells[pair][2:]) for pair in combinations(gpus, 2) if cells[pair].startswith("NV")}
    bonded = set(counts.values())
    everywhere = len(bonded) == 1 and len(counts) == len(gpus) * (len(gpus) - 1) // 2
    if everywhere and min(bonded) * (len(gpus) - 1) > _MOST_LINKS:
        return [{"ends": (called[gpu], "nvswitch"), "kind": "nvlink", "count": min(bonded)} for gpu in gpus]
    return [{"ends": (called[a], called[b]), "kind": "nvlink", "count": count} for (a, b), count in counts.items()]


def _boards(names: list[str], cells: Cells, numa: dict[str, str], called: dict[str, str]) -> list[dict[str, Any]]:
    """PCIe: parts under a switch, switches under a bridge, and all of them at their socket."""

    def near(*classes: str) -> Callable[[str, str], bool]:
        return lambda a, b: cells[a, b] in classes

    def local(a: str, b: str) -> bool:
        if a in numa and b in numa:
            return numa[a] == numa[b]
        nothing_known = all(cells[x, y] == "X" or cells[x, y].startswith("NV") for x in (a, b) for y in names)
        return cells[a, b] in ("PIX", "PXB", "PHB", "NODE") or (nothing_known and not numa)

    edges, tops = [], {name: called[name] for name in names}
    for noun, related in (("switch", near("PIX")), ("bridge", near("PIX", "PXB")), ("socket", local)):
        for number, group in enumerate(_groups(names, related)):
            below = list(dict.fromkeys(tops[name] for name in group))
            if len(below) > 1 or noun == "socket":
                edges += [{"ends": (part, f"{noun} {number}"), "kind": "pcie"} for part in below]
                tops |= dict.fromkeys(group, f"{noun} {number}")
    sockets = list(dict.fromkeys(tops.values()))
    return edges + [{"ends": pair, "kind": "host", "rate": SOCKETS} for pair in combinations(sockets, 2)]


def _groups(names: list[str], related: Callable[[str, str], bool]) -> list[list[str]]:
    """Names that are related, directly or through others; in the order of their first."""
    groups: list[list[str]] = []
    for name in names:
        touching = [group for group in groups if any(related(name, other) for other in group)]
        merged = [other for group in touching for other in group] + [name]
        groups = [group for group in groups if group not in touching] + [merged]
    return sorted((sorted(group, key=names.index) for group in groups), key=lambda group: names.index(group[0]))
