"""Ring: every GPU linked to the next one, the last to the first. n links, diameter ⌊n/2⌋, bisection 2 links each way."""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts

MAX_GPUS = 128  # GPUs: more than any node that is wired so


@wirings("ring")
def ring(node: NodeParts) -> Board:
    """Route inside: the shorter way round, forwards from GPU a to b > a when both are as long, and back the same way.

    Each of a GPU's two directions has half of node.nvlink, and a message spends the latency of NVLink on every hop.
    """
    board, size = Board(node), node.gpus
    if size < 3:
        raise ValueError(f"node.gpus={size}: wiring='ring' needs at least 3")
    if size > MAX_GPUS:
        raise ValueError(f"node.gpus={size}: wiring='ring' takes at most {MAX_GPUS}")
    rate = node.nvlink / 2

    def links(turn: int) -> list[int]:
        names = [f"gpu {gpu} to {(gpu + turn) % size} nvlink" for gpu in range(size)]
        return [board.link("nvlink", name, rate, node.latency.nvlink) for name in names]

    onwards, backwards = links(1), links(-1)
    for a in range(size):
        for b in range(size):
            ahead = (b - a) % size
            if not ahead:
                continue
            if 2 * ahead < size or (2 * ahead == size and a < b):
                board.join(a, b, tuple(onwards[(a + hop) % size] for hop in range(ahead)))
            else:
                board.join(a, b, tuple(backwards[(a - hop) % size] for hop in range(size - ahead)))
    board.slots()
    return board
