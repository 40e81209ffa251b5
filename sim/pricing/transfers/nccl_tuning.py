"""Whether NCCL runs an all-reduce between nodes by rings or by trees: its own estimate, which is not what either takes.

github.com/NVIDIA/nccl src/graph/tuning.cc at 5067397c: latency + bytes / bandwidth of both, by protocol; the least wins. The
search for channels (src/graph/search.cc, its second pass) makes rings as fast inside as between nodes; trees of two nodes, whose
NICs are half as busy, may be up to twice as fast inside. They have as many channels as rings (src/init.cc gives the tree's search
those of the ring as its most), each of which counts for what such GPUs reach at most: so two nodes of A100 with four or eight
NICs of 200 Gb/s run rings of large messages, though their trees would be faster (three of four published sweeps of eight NICs
reach 180 to 190 GB/s, a ring's rate). Where NICs are slow beside NVLink, trees win: two p4de reach 78 GB/s with NICs of 50, two
nodes of Alps 123 with 100.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np

from sim.grid import Grid
from sim.pricing.kernel_curves import Hardware
from sim.pricing.transfers.traffic import Traffic, first_members
from topologies.links.sums import distinct
from topologies.links.topology import Topology

US = 1e-6
NVLINK, NIC = 0.8, 0.96  # parts of links that NCCL counts: 20 of 25 GB/s of an NVLink (src/graph/topo.h), 48 of 50 of a NIC
_BASE = {"ring": (6.6 * US, 14 * US, 8.4 * US), "tree": (6.8 * US, 14 * US, 8.4 * US)}  # LL, LL128, Simple
_INSIDE = {"ring": (0.6 * US, 1.9 * US, 3.4 * US), "tree": (0.6 * US, 1.25 * US, 4.0 * US)}  # per step over NVLink
_NET = {"ring": (2.7 * US, 4.0 * US, 14 * US), "tree": (5.0 * US, 8.5 * US, 14 * US)}
_POST = (1 * US, 1 * US, 3 * US)  # posting to the network, at least, for each step of a ring inside a node
_LL = 20.4e9, 39e9  # most that LL reaches on more than two nodes, and on two (Intel)
_PLATEAU = 1.4  # latency of rings in Simple
# A channel as fast as DOUBLED becomes two of half the rate, above compute capability 8.0 only if there are few channels or it is
# as fast as that (ncclTopoDupChannels). That a tree's channel has at most 48 GB/s inside (96 on Blackwell) never counts: trees
# count for less on any GPU, below.
DOUBLED, FEW, ALWAYS_DOUBLED = 25e9, 4, 50e9
# Part of its bandwidth that a tree reaches, by the size's power of two from 64 B on
_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9),
    (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
)


class Limits(NamedTuple):
    """Bytes per second that a channel counts for at most; of trees by number of nodes: two, and more."""

    ring_ll128: float
    tree: tuple[float, float]
    tree_ll128: tuple[float, float]


VOLTA = Limits(20e9, (18.5e9, 10e9), (20e9, 20e9))
AMPERE = Limits(20e9, (23.6e9, 17.8e9), (20e9, 20e9))
HOPPER = Limits(36.7e9, (41.4e9, 36e9), (36.7e9, 29e9))
BLACKWELL = Limits(40e9, (42.8e9, 24e9), (31.67e9, 20e9))


class Communicator(NamedTuple):
    """Equally many ranks on each of several nodes. inside, across: bytes per second of its channels in a node, and of NICs."""

    ranks: int
    nodes: int
    inside: float
    across: float
    channels: int
    limits: Limits


def passed_over(group: Communicator | None, size: float) -> str:
    """The algorithm of the two that NCCL does not take for an all-reduce of `size` bytes; "" where it has no say."""
    if group is None:
        return ""
    return "all_reduce/tree" if prefers_rings(group, size) else "all_reduce/ring"


def limits_of(gpu: Hardware) -> Limits:
    """Of a GPU's generation, as the numbers that it multiplies tell it."""
    known = (("fp4", BLACKWELL), ("fp8", HOPPER), ("bf16", AMPERE))
    return next((limits for dtype, limits in known if dtype in gpu.peak), VOLTA)


@lru_cache(maxsize=4096)
def communicator(topology: Topology, grid: Grid, traffic: Traffic, limits: Limits) -> Communicator | None:
    """The first of these groups; None where it is in one node, unevenly spread, or its nodes have no NVLink inside."""
    first = first_members(grid, traffic)
    node, each = np.unique(topology.node_of(first), return_counts=True)
    if len(node) < 2 or len(set(each.tolist())) > 1:
        return None
    inner = first[topology.node_of(first) == node[0]]
    other = first[topology.node_of(first) != node[0]][:1]
    ways = topology.routes(inner, np.repeat(other, len(inner)))
    kind = np.array([name.partition(" ")[0] for name in (*topology.kinds, "")])
    is_nic = np.where(ways < 0, "", kind[topology.kind(np.maximum(ways, 0))]) == "nic"
    nics = distinct(ways[np.arange(len(ways)), is_nic.argmax(axis=1)])  # out of the node
    across = NIC * float(topology.capacity(nics).sum()) if is_nic.any(axis=1).all() else 0.0
    inside = across
    if len(inner) > 1:
        ways = topology.routes(np.repeat(inner[:1], len(inner) - 1), inner[1:])
        if (kind[topology.kind(ways[ways >= 0])] != "nvlink").any():
            return None
        inside = NVLINK * float(topology.capacity(distinct(ways[:, 0])).sum())
    channel = min(inside, across) / len(nics)
    doubled = channel >= DOUBLED and (limits in (VOLTA, AMPERE) or len(nics) <= FEW or channel >= ALWAYS_DOUBLED)
    return Communicator(len(first), len(node), inside, across, len(nics) * (1 + doubled), limits) if across else None


def prefers_rings(group: Communicator, size: float) -> bool:
    """Whether NCCL takes rings for an all-reduce of `size` bytes, and not trees."""
    return min(_ring(group, size)) <= min(_tree(group, size))


def _ring(group: Communicator, size: float) -> list[float]:
    """Seconds by protocol."""
    ranks, nodes, bandwidth = group.ranks, group.nodes, min(group.inside, group.across)
    ll128 = min(0.92 * bandwidth, group.channels * group.limits.ring_ll128)
    rates = min(_LL[nodes <= 2], bandwidth / 2), ll128, bandwidth
    net = _NET["ring" if ranks > nodes else "tree"]
    across, inside = 2 * (nodes - 1), 2 * (ranks - nodes)
    result = []
    for protocol, rate in enumerate(rates):
        latency = _BASE["ring"][protocol] + inside * max(_INSIDE["ring"][protocol], _POST[protocol]) + across * net[protocol]
        result.append(latency * (_PLATEAU if protocol == 2 else 1) + size * 2 * (ranks - 1) / ranks / rate)
    return result


def _tree(group: Communicator, size: float) -> list[float]:
    ranks, nodes = group.ranks, group.nodes
    pair = nodes <= 2 < ranks
    most, most_ll128 = (group.channels * limit[nodes > 2] for limit in (group.limits.tree, group.limits.tree_ll128))
    bandwidth = min(0.92 * min(group.inside, group.across * (1 + pair)), most)
    rates = min(_LL[nodes <= 2], bandwidth / 3.8), min(bandwidth * 120 / 128, most_ll128), bandwidth
    power = max(0, int(log2(max(size, 64) / 64)))
    result = []
    for protocol, rate in enumerate(rates):
        steps = (ranks / nodes - 1) * _INSIDE["tree"][protocol] + int(log2(nodes)) * _NET["tree"][protocol]
        table = _CORRECTION[protocol]
        result.append(_BASE["tree"][protocol] + 2 * steps + 2 * size / (rate * (table[power] if power < len(table) else 1)))
    return result
