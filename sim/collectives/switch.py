"""The switch adds and copies (NVLS on NVSwitch of the third generation and later): each member sends and receives S only once.

Members send to the switch, which adds what arrives and sends the sum to all of them at once; on the wires that is S up and S
down per member, whatever n is. Only one switch is used: all members in one node (NVLink domain). NVLS tree is the same inside the
nodes, with a tree across: every member's share of the sum goes through its own NIC.
"""

from __future__ import annotations

import numpy as np

from sim.collectives import PIECES, Ids, NotApplicable, Phase, Place, Schedule, algorithms, backwards, lift, together
from sim.collectives.hierarchical import levels
from sim.collectives.tree import trees


def _members(place: Place, name: str) -> Ids:
    """Members 0 … n − 1 below one switch. Raises NotApplicable elsewhere."""
    _switched(place, name)
    if len(set(place.switch)) > 1:
        raise NotApplicable(f"{name}: the members are below {len(set(place.switch))} switches, not one")
    return np.arange(place.size)


def _switched(place: Place, name: str) -> None:
    if not place.switch:
        raise NotApplicable(f"{name}: no switch beside all members that adds and multicasts (node.multicast)")
    if place.size < 2:
        raise NotApplicable(f"{name}: one member needs no switch")


def _down(switch: Ids, member: Ids, chunk: Ids) -> Phase:
    """The switch sends to all; a multicast counts once on each wire."""
    return together(switch, member, chunk)


@algorithms("all_reduce/in_switch")
def all_reduce(place: Place) -> Schedule:
    """Up to the switch, which adds, and down to all."""
    member = _members(place, "all_reduce/in_switch")
    down = _down(np.full_like(member, place.size), member, np.zeros_like(member))
    return Schedule(1, (*backwards(Schedule(1, (down,)), reduce=True).phases, down), PIECES)


@algorithms("all_gather/in_switch")
def all_gather(place: Place) -> Schedule:
    """Each member sends its piece to the switch, which sends it to all others."""
    member = _members(place, "all_gather/in_switch")
    switch, n = np.full_like(member, place.size), place.size
    others = (member[:, None] + np.arange(1, n)) % n
    return Schedule(n, (together(member, switch, member), _down(switch, member, others)), PIECES)


@algorithms("reduce_scatter/in_switch")
def reduce_scatter(place: Place) -> Schedule:
    """Everything up to the switch, which adds and sends each member its piece."""
    return backwards(all_gather(place), reduce=True)


@algorithms("broadcast/in_switch")
def broadcast(place: Place) -> Schedule:
    """The root sends to the switch, the switch to all others."""
    member = _members(place, "broadcast/in_switch")[1:]
    switch = np.full_like(member, place.size)
    up = together(np.array([0]), switch[:1], np.array([0]))
    return Schedule(1, (up, _down(switch, member, np.zeros_like(member))), PIECES)


@algorithms("reduce/in_switch")
def reduce(place: Place) -> Schedule:
    """All others send to the switch, which adds and sends the sum to the root."""
    return backwards(broadcast(place), reduce=True)


@algorithms("all_reduce/in_switch_tree")
def all_reduce_tree(place: Place) -> Schedule:
    """The switch of each node gives each member its share of the node's sum; trees add across nodes; the switches spread it."""
    name = "all_reduce/in_switch_tree"
    _switched(place, name)
    grid = levels(place, name)
    nodes, each = grid.shape
    groups = np.concatenate([grid, np.array(place.switch)[grid[:, :1]] + place.size], axis=1)
    shares = np.broadcast_to(np.arange(2 * each).reshape(1, each, 2), (nodes, each, 2))  # a half for each of the two trees
    gather = Schedule(2 * each, lift(all_gather(Place((0,) * each, (0,) * each)), groups, shares))
    across = trees([[[member] for member in column] for column in grid.T.tolist()], place.size)
    return Schedule(2 * each, (*backwards(gather, reduce=True).phases, *across, *gather.phases), PIECES)
