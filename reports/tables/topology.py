"""A cluster for people: what it consists of in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from reports.formatting import digits
from topologies.cluster import Cluster, Node, NodeGroup, UnequalCluster
from topologies.documents.units import show
from topologies.overview import across, link_sorts


def overview(cluster: Cluster) -> RenderableType:
    """GPUs, links by kind, what crosses the middle, which GPU uses which NIC, and what was ignored or assumed."""
    topology = cluster.topology()
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("links", "count", "GB/s each way", "latency", "the first of them"):
        table.add_column(name, justify="left" if name in ("links", "the first of them") else "right")
    for sort in link_sorts(topology):
        rate, wait = digits(sort.capacity / 1e9), show(sort.latency, "s", 3)
        table.add_row(sort.kind, f"{sort.number:,}", rate, wait, sort.example)
    parts = [_nodes(group) for group in cluster.groups]
    title = f"{cluster.name}: {'; '.join(parts)}, fabric {cluster.fabric.kind}"
    if len(parts) > 1:
        title += f"; {cluster.gpus:,} GPUs in all"
    lines = []
    if cluster.gpus > 1:
        total = across(topology) / 1e9
        each = digits(total / (cluster.gpus // 2))
        lines.append(f"across the middle: {digits(total)} GB/s each way, {each} GB/s per GPU, all sending to all")
    if topology.multicast:
        lines.append("the switch of a node adds and copies (NVLink SHARP)")
    if topology.generation:
        lines.append(f"the fabric's switches add and copy (SHARPv{topology.generation})")
    for node in dict.fromkeys(group.node for group in cluster.groups):
        if node.nics:
            lines.append(f"NICs of a node: {node.nics} × {digits(node.nic / 1e9)} GB/s; {affinity(node)}")
    return Group(title, table, *lines, *cluster.notes)


def _nodes(group: NodeGroup) -> str:
    """Nodes of one description in a few words."""
    node, each = group.node, len(group.gpus)
    gpus = group.count * each
    without = f" without {', '.join(group.missing)}" if group.missing else ""
    return f"{group.count:,} × {each}{without} = {gpus:,} GPU{'s' * (gpus > 1)} {node.gpu.name}, wiring {node.wiring}"


def as_data(cluster: Cluster) -> dict[str, Any]:
    """For machines, with stable keys; bytes per second of one direction, seconds."""
    topology = cluster.topology()
    whole = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "fabric": cluster.fabric.kind,
        "links": [sort._asdict() for sort in link_sorts(topology)],
        "across": across(topology),
        "multicast": topology.multicast,
        "sharp": topology.generation,
        "notes": list(cluster.notes),
    }
    if isinstance(cluster, UnequalCluster):
        groups = [{"nodes": group.count, "missing": list(group.missing), **_node(group.node)} for group in cluster.groups]
        return {**whole, "groups": groups}
    return {**whole, **_node(cluster.node)}


def _node(node: Node) -> dict[str, Any]:
    """A node, whole."""
    board = node.board()
    return {
        "gpus_per_node": node.gpus,
        "gpu": node.gpu.name,
        "wiring": node.wiring,
        "nics_per_node": node.nics,
        "nic": node.nic,
        "nics_of_gpu": [list(board.bundles[board.rail[gpu]]) if node.nics else [] for gpu in range(node.gpus)],
    }


def affinity(node: Node) -> str:
    """Which GPUs of a node use which NIC: `GPU 0–1 → NIC 0, GPU 2–3 → NIC 1`."""
    board = node.board()
    parts = []
    for rail, users in groupby(range(node.gpus), key=lambda gpu: board.rail[gpu]):
        parts.append(f"GPU {_span(tuple(users))} → NIC {_span(board.bundles[rail])}")
    return ", ".join(parts if len(parts) <= 8 else [*parts[:4], "…", parts[-1]])


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
