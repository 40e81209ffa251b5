"""NVSwitch: every GPU reaches every other at its full rate; only the GPUs' own ports are shared (DGX-2 and later, NVL72)."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import Node


@wirings("switch")
def switch(node: Node) -> Board:
    """Route inside: the sender's port out, the receiver's port in. To the NIC: the GPU's own PCIe slot, beside the NIC's."""
    board = Board(node)
    ports = [board.port("nvlink", f"gpu {gpu} nvlink") for gpu in range(node.gpus)]
    for a in range(node.gpus):
        for b in range(node.gpus):
            if a != b:
                board.join(a, b, (ports[a][0], ports[b][1]))
    if node.nics:
        slots = [board.port("pcie", f"gpu {gpu} pcie") for gpu in range(node.gpus)]
        board.uplink({gpu: ((out,), (into,)) for gpu, (out, into) in enumerate(slots)})
    return board
