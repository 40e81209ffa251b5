"""A cluster for people: what it consists of in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from reports.formatting import digits
from topologies.cluster import Cluster
from topologies.overview import across, link_sorts
from topologies.units import show


def overview(cluster: Cluster) -> RenderableType:
    """GPUs, links by kind, what crosses the middle, which GPU uses which NIC, and what was ignored or assumed."""
    topology, node = cluster.topology(), cluster.node
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("links", "count", "GB/s each way", "latency", "the first of them"):
        table.add_column(name, justify="left" if name in ("links", "the first of them") else "right")
    for sort in link_sorts(topology):
        rate, wait = digits(sort.capacity / 1e9), show(sort.latency, "s", 3)
        table.add_row(sort.kind, f"{sort.number:,}", rate, wait, sort.example)
    gpus = f"{cluster.gpus:,} GPU{'s' * (cluster.gpus > 1)} {node.gpu.name}"
    title = f"{cluster.name}: {cluster.nodes:,} × {node.gpus} = {gpus}, wiring {node.wiring}, fabric {cluster.fabric.kind}"
    lines = []
    if cluster.gpus > 1:
        total = across(topology) / 1e9
        each = digits(total / (cluster.gpus // 2))
        lines.append(f"across the middle: {digits(total)} GB/s each way, {each} GB/s per GPU, all sending to all")
    if topology.multicast:
        lines.append("the switch of a node adds and copies (NVLink SHARP)")
    if node.nics:
        lines.append(f"NICs of a node: {node.nics} × {digits(node.nic / 1e9)} GB/s; {affinity(cluster)}")
    return Group(title, table, *lines, *cluster.notes)


def as_data(cluster: Cluster) -> dict[str, Any]:
    """For machines, with stable keys; bytes per second of one direction, seconds."""
    topology, node = cluster.topology(), cluster.node
    board = node.board()
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "gpus_per_node": node.gpus,
        "gpu": node.gpu.name,
        "wiring": node.wiring,
        "fabric": cluster.fabric.kind,
        "nics_per_node": node.nics,
        "nic": node.nic,
        "links": [sort._asdict() for sort in link_sorts(topology)],
        "across": across(topology),
        "multicast": topology.multicast,
        "nics_of_gpu": [list(board.bundles[board.rail[gpu]]) if node.nics else [] for gpu in range(node.gpus)],
        "notes": list(cluster.notes),
    }


def affinity(cluster: Cluster) -> str:
    """Which GPUs of a node use which NIC: `GPU 0–1 → NIC 0, GPU 2–3 → NIC 1`."""
    board = cluster.node.board()
    parts = []
    for rail, users in groupby(range(cluster.node.gpus), key=lambda gpu: board.rail[gpu]):
        parts.append(f"GPU {_span(tuple(users))} → NIC {_span(board.bundles[rail])}")
    return ", ".join(parts if len(parts) <= 8 else [*parts[:4], "…", parts[-1]])


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
