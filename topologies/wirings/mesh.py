"""Fully connected: a link between each two GPUs. n·(n − 1)/2 links, bisection n²/4 each way for an even n.

Example: 4 A100 of a Perlmutter node, 4 NVLinks of 25 GB/s between every pair (docs.nersc.gov); 8 MI300X, 64 GB/s.
"""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts

MAX_GPUS = 128  # GPUs: more than any node that is wired so


@wirings("mesh")
def mesh(node: NodeParts) -> Board:
    """Route inside: the pair's own link, which has its even share of node.nvlink."""
    board = Board(node)
    if node.gpus < 2:
        raise ValueError(f"node.gpus={node.gpus}: wiring='mesh' needs at least 2")
    if node.gpus > MAX_GPUS:
        raise ValueError(f"node.gpus={node.gpus}: wiring='mesh' takes at most {MAX_GPUS}")
    for a in range(node.gpus):
        for b in range(node.gpus):
            if a != b:
                rate = node.nvlink / (node.gpus - 1)
                board.join(a, b, (board.link("nvlink", f"gpu {a} to {b} nvlink", rate, node.latency.nvlink),))
    board.slots()
    return board
