"""Nothing inside the node: its accelerators are points of the fabric (TPU hosts on a torus), or it has only one."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts


@wirings("bare")
def bare(node: NodeParts) -> Board:
    """No routes inside. With NICs, which only a node of one GPU can use, the GPU's PCIe slot leads to them."""
    board = Board(node)
    board.slots()
    return board
