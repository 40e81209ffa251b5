"""What NCCL runs a collective by: its own estimate of algorithms and protocols, which is not what they take.

github.com/NVIDIA/nccl src/graph/tuning.cc at 5067397c: latency + bytes / bandwidth by algorithm and protocol; the least wins.

In a node behind an NVSwitch it decides between LL, LL128 and Simple, and whether the switch reduces: two A100 run an all-reduce
of 1 MiB in Simple, 41 us, though LL would take 23; eight stay in LL. Trees never have the least estimate there.

Between nodes it decides between rings and trees. The search for channels (src/graph/search.cc, its second pass) makes rings as
fast inside as between nodes; trees of two nodes, whose NICs are half as busy, may be up to twice as fast inside. They have as
many channels as rings (src/init.cc gives the tree's search those of the ring as its most), each of which counts for what such
GPUs reach at most: so two nodes of A100 with four or eight NICs of 200 Gb/s run rings of large messages, though their trees
would be faster (three of four published sweeps of eight NICs reach 180 to 190 GB/s, a ring's rate). Where NICs are slow beside
NVLink, trees win: two p4de reach 78 GB/s with NICs of 50, two nodes of Alps 123 with 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, log2
from typing import NamedTuple

import numpy as np

from sim.grid import Grid
from sim.pricing.kernel_curves import Hardware
from sim.pricing.transfers.protocols import P2P, PROTOCOLS
from sim.pricing.transfers.traffic import Traffic, first_members
from sim.pricing.transfers.wiring import nics_between
from topologies.links.sums import distinct
from topologies.links.topology import Ids, Topology, kind_of_link

US = 1e-6
NVLINK, NIC = 0.8, 0.96  # parts of links that NCCL counts: 20 of 25 GB/s of an NVLink (src/graph/topo.h), 48 of 50 of a NIC
PCIE = 0.75  # of what PCIe's lanes carry before encoding, twice as much in each generation: 48 of 64 GB/s (kvDictPciGen)
_BASE = {"ring": (6.6 * US, 14 * US, 8.4 * US), "tree": (6.8 * US, 14 * US, 8.4 * US)}  # LL, LL128, Simple
_INSIDE = {"ring": (0.6 * US, 1.9 * US, 3.4 * US), "tree": (0.6 * US, 1.25 * US, 4.0 * US)}  # per step over NVLink
_NET = {"ring": (2.7 * US, 4.0 * US, 14 * US), "tree": (5.0 * US, 8.5 * US, 14 * US)}
_IN_SWITCH = 25 * US
_POST = (1 * US, 1 * US, 3 * US)  # posting to the network, at least, for each step of a ring inside a node
_LL = 20.4e9, 39e9  # most that LL reaches on more than two nodes, and on two (Intel)
_LL128 = 0.92  # part of a ring's bandwidth
_PLATEAU = 1.4  # latency of rings in Simple
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # trips around a ring
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
    """What a GPU's generation counts for, in bytes per second.

    In a node: ll: of all channels in LL, at most; in_switch: the part of the links' rate at which the switch reduces. Of a
    channel at most: ring_ll128; of trees by number of nodes, two and more: tree, tree_ll128. switch_channels: of reductions in
    the switch in one node, and between nodes (src/transport/nvls.cc).
    """

    ll: float
    in_switch: float
    ring_ll128: float
    tree: tuple[float, float]
    tree_ll128: tuple[float, float]
    switch_channels: tuple[int, int] = (16, 16)


# In the switch: efficiency · (channels − 1) / channels, of 16 channels of 20 GB/s (a ring: 360), of 24 that have all 720
VOLTA = Limits(39e9, 0.0, 20e9, (18.5e9, 10e9), (20e9, 20e9))
AMPERE = Limits(87.7e9, 0.0, 20e9, (23.6e9, 17.8e9), (20e9, 20e9))
HOPPER = Limits(141e9, 0.85 * 15 / 16 * 320 / 360, 36.7e9, (41.4e9, 36e9), (36.7e9, 29e9))
BLACKWELL = Limits(282e9, 0.74 * 23 / 24, 40e9, (42.8e9, 24e9), (31.67e9, 20e9), (24, 32))
# Of point-to-point messages in a node A100, H100 and B200 print "32 p2p channels, 32 p2p channels per peer" (NCCL_DEBUG=INFO)
_PEER_CHANNELS = 32
_CHUNK = 512 * 1024.0  # NCCL_P2P_NVL_CHUNKSIZE
# Channels of a ring in a node: of 40, 60 and 90 GB/s, doubled. Not so on B200: 16 of them would run an all-gather of 16 MiB in
# LL128, where the 104 us that eight GPUs take belong to Simple (114 of 32 MiB; LL takes 44 of 8)
_CHANNELS = {VOLTA: 6, AMPERE: 12, HOPPER: 12, BLACKWELL: 8}


class Communicator(NamedTuple):
    """Equally many ranks on each of several nodes, or ranks of one. inside, across: bytes per second of its channels in a node,
    and of NICs.
    """

    ranks: int
    nodes: int
    inside: float
    across: float
    channels: int
    limits: Limits


Way = tuple[str, str]  # "operation/algorithm", protocol
ESTIMATED = (*_ROUNDS, "all_to_all")  # operations of which an estimate decides


def by_estimate(group: Communicator | None, ways: Sequence[Way], size: float, messages: float) -> list[Way]:
    """The ways among which NCCL's own estimate leaves the choice for a collective of `size` bytes; all where it has no say.

    messages: bytes for one peer up to which an all-to-all inside a node is in LL.
    """
    if group is None:
        return list(ways)
    if group.nodes > 1:
        both = {"all_reduce/ring", "all_reduce/tree"} <= {name for name, _ in ways}
        passed = ("all_reduce/tree" if prefers_rings(group, size) else "all_reduce/ring") if both else ""
        return [way for way in ways if way[0] != passed]
    if {protocol for _, protocol in ways} == set(P2P):
        kept = P2P[int(size / group.ranks > messages)]
        return [way for way in ways if way[1] == kept]
    seconds = [_in_node(group, *way, size) for way in ways]
    least = min(seconds)
    return [way for way, each in zip(ways, seconds, strict=True) if each == least]


def chunks(ranks: int) -> float:
    """Chunks in a channel's part of a message, for each byte of the buffers of an all-to-all among `ranks` of a node.

    Peers share the channels (src/enqueue.cc, addP2pToPlan): with 2, 4 and 8 ranks a channel has a whole chunk in buffers of
    16 MiB. Up to there all-to-alls of two H100 take 2.6 us more for each MB, and from there on 1.7.
    """
    each = _PEER_CHANNELS
    while each * ranks > _PEER_CHANNELS and each > 1:
        each //= 2
    return 1 / (ranks * each * _CHUNK)


def limits_of(gpu: Hardware) -> Limits:
    """Of a GPU's generation, as the numbers that it multiplies tell it."""
    known = (("fp4", BLACKWELL), ("fp8", HOPPER), ("bf16", AMPERE))
    return next((limits for dtype, limits in known if dtype in gpu.peak), VOLTA)


@lru_cache(maxsize=4096)
def communicator(topology: Topology, grid: Grid, traffic: Traffic, limits: Limits) -> Communicator | None:
    """The first of these groups; None where it is unevenly spread, has no NVLink in nodes, or its one node has no NVSwitch."""
    first = first_members(grid, traffic)
    node, each = np.unique(topology.node_of(first), return_counts=True)
    if len(set(each.tolist())) > 1 or len(first) < 2:
        return None
    inner = first[topology.node_of(first) == node[0]]
    kind = np.array([name.partition(" ")[0] for name in (*topology.kinds, "")])
    inside, switched = 0.0, False
    if len(inner) > 1:
        ways = topology.routes(np.repeat(inner[:1], len(inner) - 1), inner[1:])
        if (kind[topology.kind(ways[ways >= 0])] != "nvlink").any():
            return None
        ports = distinct(ways[:, 0])
        inside, switched = NVLINK * float(topology.capacity(ports).sum()), len(ports) == 1 and bool((ways[:, 1:2] >= 0).any())
    if len(node) == 1:
        return Communicator(len(first), 1, inside, 0.0, _CHANNELS[limits], limits) if switched else None
    other = first[topology.node_of(first) != node[0]][:1]
    nics = nics_between(topology, inner, other)
    if not len(nics):
        return None
    across = _across(topology, topology.routes(inner, np.repeat(other, len(inner))), nics)
    inside = inside or across
    channel = min(inside, across) / len(nics)
    doubled = channel >= DOUBLED and (limits in (VOLTA, AMPERE) or len(nics) <= FEW or channel >= ALWAYS_DOUBLED)
    return Communicator(len(first), len(node), inside, across, len(nics) * (1 + doubled), limits)


def _across(topology: Topology, ways: Ids, nics: Ids) -> float:
    """Bytes per second of NICs, each of no more than PCIe lets through from the GPU that has the best way to it."""
    link = np.maximum(ways, 0)
    rate, kind = topology.capacity(link), np.array([kind_of_link(name) for name in topology.kinds])[topology.kind(link)]
    slots = (ways >= 0) & (kind == "pcie")
    slot = np.where(slots, PCIE * 1e9 * 2.0 ** np.ceil(np.log2(rate / 1e9)), np.inf).min(axis=1)
    through = [slot[(ways == nic).any(axis=1)].max() for nic in nics]
    return float(np.minimum(NIC * topology.capacity(nics), through).sum())


def prefers_rings(group: Communicator, size: float) -> bool:
    """Whether NCCL takes rings for an all-reduce of `size` bytes between nodes, and not trees."""
    return min(_ring(group, size)) <= min(_tree(group, size))


def _in_node(group: Communicator, name: str, protocol: str, size: float) -> float:
    """Seconds inside a node; infinitely many of what NCCL does not run there."""
    operation, _, algorithm = name.partition("/")
    steps, limits = _ROUNDS.get(operation, 0) * (group.ranks - 1), group.limits
    if name == "all_reduce/in_switch" and limits.in_switch:
        return _IN_SWITCH + size * steps / group.ranks / (2 * limits.in_switch * group.inside)
    if not steps or algorithm != "ring":
        return inf
    rates = min(limits.ll, group.inside / 2), min(_LL128 * group.inside, group.channels * limits.ring_ll128), group.inside
    at = PROTOCOLS.index(protocol)
    return _BASE["ring"][at] + steps * _INSIDE["ring"][at] + size * steps / group.ranks / rates[at]


def _ring(group: Communicator, size: float) -> list[float]:
    """Seconds between nodes by protocol."""
    ranks, nodes, bandwidth = group.ranks, group.nodes, min(group.inside, group.across)
    ll128 = min(_LL128 * bandwidth, group.channels * group.limits.ring_ll128)
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
