"""The switches of the fabric add and copy (InfiniBand SHARP, NCCL's CollNet): a NIC sends and receives its share once.

NCCL gives each NIC of a node a head, the GPU beside it, and each head a share of the buffer (github.com/NVIDIA/nccl
src/transport/coll_net.cc). The members of a node hand every head its share of their sum; the heads of equal number of all nodes
send up the tree of switches, which adds on the way and sends the sum down again; each head hands it on in its node. CollNetDirect
does the first and last step between all pairs of GPUs, CollNetChain along a chain, and NCCL's NVLS with CollNet in the NVSwitch
(issues 320 and 1725 of github.com/NVIDIA/nccl).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.collectives import PIECES, Ids, NotApplicable, Phase, Place, Schedule, algorithms, lift, together
from sim.collectives.switch import collect, spread


def heads(place: Place, name: str, every: bool = False) -> tuple[Ids, Ids]:
    """(members of each node, shape (nodes, each); heads of each node, shape (nodes, NICs)).

    every: all members must be heads. Raises NotApplicable where the fabric's switches do not add, or not for these members.
    """
    if place.size < 2 or not len(place.leaf):
        raise NotApplicable(
            f"{name}: no switches above these members that add (fabric.sharp), or more groups at once than they serve"
        )
    nodes = place.per_node()
    if len(nodes) == 1:
        raise NotApplicable(f"{name}: the members are in one node")
    if len({len(node) for node in nodes}) > 1:
        raise NotApplicable(f"{name}: the nodes have different numbers of members")
    first = [
        [member for number, member in enumerate(node) if place.nic[member] not in _nics(place, node[:number])] for node in nodes
    ]
    if len({len(node) for node in first}) > 1:
        raise NotApplicable(f"{name}: the members of nodes use different numbers of NICs")
    if every and len(first[0]) < len(nodes[0]):
        raise NotApplicable(f"{name}: {len(nodes[0])} members of a node share {len(first[0])} NICs; each needs one")
    return np.array(nodes), np.array(first)


def _nics(place: Place, members: list[int]) -> set[int]:
    return set(place.nic[members].tolist())


def up(place: Place, heads: Ids, chunks: Ids, apart: bool = True, reduce: bool = True) -> list[Phase]:
    """Chunks of each head through the switches to the first one that all of its number have above them.

    heads: shape (nodes, shares); chunks: labels that each head sends, shape (nodes, shares, width) or (shares, width); apart:
    each share is a channel; reduce: switches add, or else pass on all that they get.
    """
    share = np.broadcast_to(np.arange(heads.shape[1]), heads.shape).ravel()
    rows = np.broadcast_to(chunks, (*heads.shape, chunks.shape[-1])).reshape(heads.size, -1)
    begin = place.size + len(np.unique(place.switch))
    source, at = heads.ravel(), begin + place.leaf[heads.ravel()]
    phases = []
    while True:
        phases.append(together(source, at, rows, reduce, share * apart))
        (source, share), rows = _merged(np.stack([at, share]), rows)
        if len(source) == heads.shape[1]:
            return phases
        at = begin + place.above[source - begin]


def _merged(keys: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Distinct columns of `keys`, and the labels of all rows of each, padded with −1."""
    keys, number = np.unique(keys, axis=1, return_inverse=True)
    labels = [np.unique(rows[number.ravel() == each]) for each in range(keys.shape[1])]
    labels = [each[each >= 0] for each in labels]
    merged = np.full((len(labels), max(map(len, labels))), -1)
    for row, each in zip(merged, labels, strict=True):
        row[: len(each)] = each
    return keys, merged


def down(place: Place, heads: Ids, chunks: Ids, own: Ids | None = None, apart: bool = True) -> list[Phase]:
    """Sums the same way back to all heads. own: what each head gets of it, shape (nodes, shares); everything unless given."""
    *inner, last = (_turned(phase) for phase in reversed(up(place, heads, chunks, apart)))
    return [*inner, last if own is None else together(last.source, last.destination, own.ravel(), channel=last.channel)]


def _turned(phase: Phase) -> Phase:
    """The same chunks the other way, copied."""
    return replace(phase, source=phase.destination, destination=phase.source, reduce=False)


@algorithms("all_reduce/collnet_direct")
def all_reduce(place: Place) -> Schedule:
    """Everybody hands every head of its node its share; the switches add; the heads hand out the sum."""
    members, head = heads(place, "all_reduce/collnet_direct")
    if not place.switched:
        raise NotApplicable("all_reduce/collnet_direct: not all members of a node reach each other through a switch")
    share = np.arange(head.shape[1])[:, None]
    gather, scatter = _between(members, head, share)
    return Schedule(len(share), (*gather, *up(place, head, share), *down(place, head, share), *scatter), PIECES)


@algorithms("all_reduce/collnet_chain")
def all_reduce_chain(place: Place) -> Schedule:
    """As direct, but a node adds up along a chain that ends at each head, and spreads the sum along it."""
    members, head = heads(place, "all_reduce/collnet_chain")
    nodes, each = members.shape
    share = np.arange(head.shape[1])[:, None]
    position = np.array(
        [[row.index(member) for member in line] for row, line in zip(members.tolist(), head.tolist(), strict=True)]
    )
    inward = []
    for distance in range(each - 1, 0, -1):
        source, target = (np.take_along_axis(members, (position + step) % each, axis=1) for step in (distance, distance - 1))
        inward.append(
            together(source.ravel(), target.ravel(), np.tile(share.ravel(), nodes), True, np.tile(share.ravel(), nodes))
        )
    outward = [_turned(phase) for phase in reversed(inward)]
    return Schedule(len(share), (*inward, *up(place, head, share), *down(place, head, share), *outward), PIECES)


@algorithms("all_reduce/in_switch_collnet")
def all_reduce_in_switch(place: Place) -> Schedule:
    """The switch of each node gives each member its share of the node's sum; the fabric adds across; the switches spread it."""
    name = "all_reduce/in_switch_collnet"
    members, _ = heads(place, name, every=True)
    if not len(place.switch):
        raise NotApplicable(f"{name}: no switch beside all members that adds and multicasts (node.multicast)")
    nodes, each = members.shape
    groups = np.concatenate([members, place.switch[members[:, :1]] + place.size], axis=1)
    labels = np.broadcast_to(np.arange(each).reshape(1, each, 1), (nodes, each, 1))
    first, last = (lift(Schedule(each, phases), groups, labels) for phases in (collect(each), spread(each)))
    share = np.arange(each)[:, None]
    across = *up(place, members, share, apart=False), *down(place, members, share, apart=False)
    return Schedule(each, (*first, *across, *last), PIECES)


@algorithms("all_gather/collnet_direct")
def all_gather(place: Place) -> Schedule:
    """Each member sends its piece up once; the switches send it to the members of its number, which hand it on in their nodes.

    NCCL asks for a NIC per member (src/graph/tuning.cc, 2.23 and later).
    """
    members, pieces = _one_each(place, "all_gather/collnet_direct")
    climb = up(place, members, members[:, :, None], reduce=False)
    return Schedule(place.size, (*climb, *down(place, members, pieces), *_between(members, members, pieces)[1]), PIECES)


@algorithms("reduce_scatter/collnet_direct")
def reduce_scatter(place: Place) -> Schedule:
    """The members of a node hand each other what is for their number; the switches add and give each member its piece."""
    members, pieces = _one_each(place, "reduce_scatter/collnet_direct")
    gather = _between(members, members, pieces)[0]
    return Schedule(place.size, (*gather, *up(place, members, pieces), *down(place, members, pieces, own=members)), PIECES)


def _one_each(place: Place, name: str) -> tuple[Ids, Ids]:
    """Members of each node, and the pieces of the members of each number, shape (each, nodes)."""
    members, _ = heads(place, name, every=True)
    if not place.switched:
        raise NotApplicable(f"{name}: not all members of a node reach each other through a switch")
    return members, members.T


def _between(members: Ids, heads: Ids, chunks: Ids) -> tuple[list[Phase], list[Phase]]:
    """All members of each node to its heads, adding, and back. chunks: of each head, shape (heads, width)."""
    nodes, each = members.shape
    source = np.repeat(members, heads.shape[1], axis=1).ravel()
    target = np.tile(heads, (1, each)).ravel()
    share = np.tile(np.arange(heads.shape[1]), nodes * each)
    other = source != target
    if not other.any():
        return [], []
    source, target, content = source[other], target[other], chunks[share[other]]
    way = together(source, target, content, True, share[other])
    return [way], [_turned(way)]
