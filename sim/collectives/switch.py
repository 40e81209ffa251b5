"""The switch adds and copies (NVLink SHARP, NCCL's NVLS): the traffic of a member does not grow with their number.

Each member looks after one n-th of the buffer: it reads the sum of everybody's through the switch and writes the result to all
through the switch (NCCL's kernels do so with multimem instructions, github.com/NVIDIA/nccl src/device/all_reduce.h). On a
member's wires that is S + S/n out and in for an all-reduce. All members are below one switch, in one node (NVLink domain). In an
NVLS tree each node's switch does this for its members, whose shares are added across the nodes by trees, each through its NIC.
"""

from __future__ import annotations

import numpy as np

from sim.collectives import PIECES, NotApplicable, Phase, Place, Schedule, algorithms, backwards, lift, together, turning
from sim.collectives.hierarchical import levels
from sim.collectives.tree import trees


def _members(place: Place, name: str) -> int:
    """Number of members, all below one switch, which is endpoint n. Raises NotApplicable elsewhere."""
    _switched(place, name)
    if (place.switch != place.switch[0]).any():
        raise NotApplicable(f"{name}: the members are below {place.switch.max() + 1} switches, not one")
    return place.size


def _switched(place: Place, name: str) -> None:
    if not len(place.switch):
        raise NotApplicable(f"{name}: no switch beside all members that adds and multicasts (node.multicast)")
    if place.size < 2:
        raise NotApplicable(f"{name}: one member needs no switch")


def collect(n: int) -> tuple[Phase, Phase]:
    """Everything goes up to the switch, which adds; each member's piece comes down to it."""
    member, switch = np.arange(n), np.full(n, n)
    return together(member, switch, np.tile(member, (n, 1)), reduce=True), together(switch, member, member)


def spread(n: int) -> tuple[Phase, Phase]:
    """Each member's piece goes up to the switch and down to all; a multicast counts once on each wire."""
    member, switch = np.arange(n), np.full(n, n)
    return together(member, switch, member), together(switch, member, np.tile(member, (n, 1)))


@algorithms("all_reduce/in_switch")
def all_reduce(place: Place) -> Schedule:
    """Sums come down piece by piece, each to its member, which sends them up again to all."""
    n = _members(place, "all_reduce/in_switch")
    return Schedule(n, (*collect(n), *spread(n)), PIECES)


@algorithms("all_gather/in_switch")
def all_gather(place: Place) -> Schedule:
    """Each member sends its piece up once."""
    n = _members(place, "all_gather/in_switch")
    return Schedule(n, spread(n), PIECES)


@algorithms("reduce_scatter/in_switch")
def reduce_scatter(place: Place) -> Schedule:
    """Each member receives the sum of its piece, and nothing else."""
    n = _members(place, "reduce_scatter/in_switch")
    return Schedule(n, collect(n), PIECES)


@algorithms("broadcast/in_switch")
def broadcast(place: Place) -> Schedule:
    """The root sends to the switch, the switch to all others."""
    n = _members(place, "broadcast/in_switch")
    switch, others = np.full(n - 1, n), np.arange(1, n)
    return Schedule(
        1, (together(np.array([0]), switch[:1], np.array([0])), together(switch, others, np.zeros_like(others))), PIECES
    )


@algorithms("reduce/in_switch")
def reduce(place: Place) -> Schedule:
    """All others send to the switch, which adds and sends the sum to the root."""
    return backwards(broadcast(place), reduce=True)


@algorithms("all_reduce/in_switch_tree")
@turning
def all_reduce_tree(place: Place) -> Schedule:
    """The switch of each node gives each member its share of the node's sum; trees add across nodes; the switches spread it."""
    name = "all_reduce/in_switch_tree"
    _switched(place, name)
    grid = levels(place, name)
    nodes, each = grid.shape
    groups = np.concatenate([grid, place.switch[grid[:, :1]] + place.size], axis=1)
    shares = np.broadcast_to(np.arange(2 * each).reshape(1, each, 2), (nodes, each, 2))  # a half for each of the two trees
    inside: list[tuple[Phase, ...]] = [collect(each), spread(each)]
    if place.turned:
        inside = [tuple(_of_first_member(phase, each) for phase in phases) for phases in inside]
    up, down = (lift(Schedule(each, phases), groups, shares) for phases in inside)
    across = trees([column[:, None] for column in (grid.T[:1] if place.turned else grid.T)], place.size)
    return Schedule(2 * each, (*up, *across, *down), PIECES)


def _of_first_member(phase: Phase, switch: int) -> Phase:
    """The transfer of a phase between member 0 and the switch."""
    chunk = phase.chunk(0)[:1]
    source, destination = phase.source[:1], phase.destination[:1]
    assert {int(source[0]), int(destination[0])} == {0, switch}
    return together(source, destination, chunk, phase.reduce)
