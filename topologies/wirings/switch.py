"""NVSwitch: every GPU reaches every other at its full rate; only the GPUs' own ports are shared (DGX-2 and later, NVL72)."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts


@wirings("switch")
def switch(node: NodeParts) -> Board:
    """Route inside: the sender's port out, the receiver's port in. To the NIC: the GPU's own PCIe slot."""
    board = Board(node)
    board.switch = [((out,), (into,)) for out, into in board.star("nvlink", "gpu")]
    board.slots()
    return board
