"""Processes of one machine without GPUs, talking through its memory (gloo over the loopback device)."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts


@wirings("loopback")
def loopback(node: NodeParts) -> Board:
    """Route inside: the sender's port out, the receiver's port in; a port stands for what one core can copy and reduce."""
    board = Board(node)
    board.star("loopback", "process")
    board.uplink([((), ())] * node.gpus)
    return board
