"""Hybrid cube mesh of the DGX-1 with V100: 24 NVLinks between 16 pairs of 8 GPUs, no switch.

Link counts per pair as `nvidia-smi topo -m` and NCCL's topology dump of that machine show them (github.com/NVIDIA/nccl issue 671
has GPUs 0–3): a cube with all 12 edges, some doubled, and the diagonals of two faces (iitr.ac.in/dgx).
"""

from __future__ import annotations

from topologies.board import Board, wirings
from topologies.hardware import NodeParts

GPUS, LINKS_PER_GPU = 8, 6
PAIRS = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (1, 2): 2,
    (1, 3): 1,
    (2, 3): 2,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
    (0, 4): 2,
    (1, 5): 2,
    (2, 6): 1,
    (3, 7): 1,
}


@wirings("cube_mesh")
def cube_mesh(node: NodeParts) -> Board:
    """Route inside: the pair's own NVLinks; pairs without any go over two NVLink hops.

    The hop between is the GPU that leaves the widest way, the lowest number among equals. NCCL does the same and calls it NVB
    (`src/graph/topo.h`: "NVLink through an intermediate GPU"); over PCIe the pair would share the host bridges at 16 GB/s.
    """
    if node.gpus != GPUS:
        raise ValueError(f"node.gpus={node.gpus}: wiring='cube_mesh' has {GPUS}")
    board = Board(node)
    counts = PAIRS | {(b, a): count for (a, b), count in PAIRS.items()}
    pair = {
        (a, b): board.link("nvlink", f"gpu {a} to {b} nvlink", node.nvlink * count / LINKS_PER_GPU, node.latency.nvlink)
        for (a, b), count in sorted(counts.items())
    }
    for a in range(GPUS):
        for b in range(GPUS):
            if (a, b) in pair:
                board.join(a, b, (pair[a, b],))
            elif a != b:
                between = max(range(GPUS), key=lambda c: (min(counts.get((a, c), 0), counts.get((c, b), 0)), -c))
                board.join(a, b, (pair[a, between], pair[between, b]))
    board.slots()
    return board
