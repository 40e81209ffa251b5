"""Processes of one machine without GPUs, talking through its memory (gloo over the loopback device)."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import Node


@wirings("loopback")
def loopback(node: Node) -> Board:
    """Route inside: the sender's port out, the receiver's port in; a port stands for what one core can copy and reduce."""
    board = Board(node)
    ports = [board.port("loopback", f"process {gpu} loopback") for gpu in range(node.gpus)]
    for a in range(node.gpus):
        for b in range(node.gpus):
            if a != b:
                board.join(a, b, (ports[a][0], ports[b][1]))
    board.uplink({gpu: ((), ()) for gpu in range(node.gpus)})
    return board
