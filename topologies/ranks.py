"""Placement of processes: rank, node, local rank, and the GPUs that each holds."""

from __future__ import annotations

from typing import NamedTuple

from topologies.reading import UserError

MAX_GPUS = 2**18  # GPUs in a table


class RankRow(NamedTuple):
    """One process; `gpus` are numbers inside its node."""

    rank: int
    node: int
    local_rank: int
    gpus: tuple[int, ...]


def rank_table(nodes: int, gpus_per_node: int, gpus_per_process: int = 1) -> list[RankRow]:
    """Every process in rank order: rank = node · P + local rank, with P = gpus_per_node / gpus_per_process processes per node.

    World size W = nodes · P, as in PyTorch's tutorial on DDP: 2 nodes of 4 GPUs make W = 8, or W = 4 when a process spans 2 GPUs.
    Raises UserError when a number is below 1 or gpus_per_process does not divide gpus_per_node.
    """
    for field, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node), ("gpus_per_process", gpus_per_process)):
        if value < 1:
            raise UserError(f"{field}={value}: must be at least 1")
    if nodes * gpus_per_node > MAX_GPUS:
        raise UserError(f"nodes·gpus_per_node = {nodes}·{gpus_per_node}: a table of more than {MAX_GPUS:,} GPUs is not made")
    processes, rest = divmod(gpus_per_node, gpus_per_process)
    if rest:
        raise UserError(f"gpus_per_process={gpus_per_process} does not divide gpus_per_node={gpus_per_node}")
    span = range(gpus_per_process)
    return [
        RankRow(node * processes + local, node, local, tuple(local * gpus_per_process + i for i in span))
        for node in range(nodes)
        for local in range(processes)
    ]
