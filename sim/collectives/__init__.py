"""Collective algorithms: one schedule function each, from which every other form is derived.

A schedule is a list of phases; a phase is `times` rounds of the same transfers, in which only the chunk that moves changes.
That is
compact (a ring over 16,384 ranks is one phase with 16,384 transfers) and complete: the stepped form plays every round, the fluid
form adds up its latency and its bytes per link, and the tests move numpy arrays with it.

A group's members are 0 … n − 1 here; `Place` says which of them share a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from topologies.registry import Registry

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group's members are: `node[i]` is the node of member i, in rank order."""

    node: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of members n."""
        return len(self.node)

    def per_node(self) -> list[list[int]]:
        """Members of each node, nodes in order of their first member."""
        nodes: dict[int, list[int]] = {}
        for member, node in enumerate(self.node):
            nodes.setdefault(node, []).append(member)
        return list(nodes.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """`times` rounds. In round t, transfer e takes `chunk(t)[e]` from member source[e] to member destination[e].

    Transfers of one channel and member follow each other; `channel[e]` runs on its own. reduce: the receiver adds instead of
    copying.
    """

    source: Ids
    destination: Ids
    channel: Ids
    chunk: Callable[[int], Ids]
    times: int = 1
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases over a buffer of S bytes that is cut in `chunks` equal chunks (member-major where members own pieces)."""

    chunks: int
    phases: tuple[Phase, ...]

    def sent(self, members: int) -> NDArray[np.float64]:
        """Fraction of S that each member sends, shape (members,)."""
        total = np.zeros(members)
        for phase in self.phases:
            total += np.bincount(phase.source, minlength=members) * float(phase.times)
        return total / self.chunks


Algorithm = Callable[[Place], Schedule]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
algorithms: Registry[Algorithm] = Registry("collective algorithm", package="sim.collectives")  # names are "operation/algorithm"


@lru_cache
def algorithms_of(operation: str) -> tuple[str, ...]:
    """Algorithms registered for `operation`, by name."""
    return tuple(name.split("/")[1] for name in algorithms if name.split("/")[0] == operation)
