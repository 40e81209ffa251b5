"""Reductions in the switch go by loops: NCCL's kernel hands a piece from warps that copy it in to those that reduce and multicast
it and to those that copy it out, and two loops go by in which not all work (github.com/NVIDIA/nccl src/device/all_reduce.h).

A loop moves a chunk for each channel and member, of a size that NCCL chooses by the message (src/enqueue.cc, calcCollChunking, at
2.26; channels: src/transport/nvls.cc). It takes what its bytes take on the links and, for each member, a handover; in a tree over
nodes two, as what was reduced goes to the network before it is multicast. All-reduces of eight H100 show it: with loops of 2, 4,
8 and 16 MiB as these rules say, (loops + 2) times 12.6, 20.0, 32.1 and 61.0 us are within 2 % of 2 MiB to 16 GiB; two nodes'
sizes of 64 MiB to 16 GiB are (loops + 3.3) times 66.7 us. The 1.3 are the first loop's way to the other node and back, 44 us
each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

KIB = 1024
CHUNK = 128 * KIB  # NCCL_NVLS_CHUNKSIZE
SHORTER = ((64, 64 * KIB), (8, 32 * KIB), (2, 16 * KIB))  # messages of fewer loops have chunks of at most so many bytes
SHORTER_TREE = ((4, 64 * KIB), (1, 32 * KIB))
FOUR_NODES = 64 * KIB  # chunks of trees over so many nodes have no more
STAGES = 3


class Loops(NamedTuple):
    """members: of a node, each of which reduces a part; channels: that NCCL has; nodes: over which a tree goes, one without;
    inside: numbers of the kinds of links to switches, one for each kind of GPU; across: of those between nodes.
    """

    members: int
    channels: int
    nodes: int = 1
    inside: tuple[int, ...] = (0,)
    across: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[int, ...]:
        """Kinds of links that a loop takes."""
        return *self.inside, *self.across


def count(loops: Loops, size: Any) -> Any:
    """How many loops a message of `size` bytes takes, at least one; `size` may be an array."""
    if isinstance(size, np.ndarray):
        return np.array([count(loops, each) for each in size.tolist()])
    across, chunk = loops.members * loops.channels, FOUR_NODES if loops.nodes >= 4 else CHUNK
    for fewer, shorter in SHORTER if loops.nodes == 1 else SHORTER_TREE:
        if size < fewer * across * chunk:
            chunk = min(chunk, shorter)
    return max(size / (across * chunk), 1.0)


def seconds(loops: Loops, size: Any, transfer: Any, inside: Any, further: Any, handover: float) -> Any:
    """What a message of `size` bytes takes beyond `transfer` seconds on the links, `inside` of them on those to the switch.

    Beside slower links between nodes handovers take no time of their own. handover: seconds for one member; further: seconds on
    links between nodes, times the hops by which a loop goes from node to node.
    """
    number = count(loops, size)
    kernel = inside + number * handover * loops.members * (1 if loops.nodes == 1 else 2)
    whole = np.maximum(transfer, kernel) if isinstance(number, np.ndarray) else max(transfer, kernel)
    return whole - transfer + ((STAGES - 1) * kernel + further) / number
