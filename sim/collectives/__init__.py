"""Collective algorithms: one schedule function each, from which every other form is derived.

A schedule is a list of phases; a phase is `times` rounds of the same transfers, in which only the chunks that move change. That
is compact (a ring over 16,384 ranks is one phase with 16,384 transfers) and complete: the stepped form plays every round, the
fluid form adds up its latency and its bytes per link, and the tests move numpy arrays with it.

A group's members are 0 … n − 1 here; `Place` says which of them share a node. Roots are member 0.

The buffer S is what nccl-tests counts: of all-gather, gather, scatter, reduce-scatter and all-to-all the n pieces together; piece
i is the one that member i starts or ends with. A chunk's number is a label of its content: it stays when the chunk moves. In an
all-to-all the chunk from member i to member j is number i·n + j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from topologies.reading import UserError
from topologies.registry import Registry

Ids = NDArray[np.int64]


class NotApplicable(UserError):  # noqa: N818
    """An algorithm does not work for these members; the reason is one line. `auto` passes over it."""


def _nothing() -> Ids:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a group's members are, in rank order.

    node: the node of each member. switch: the number (0, 1, …) of the switch beside each member that reduces and multicasts;
    empty where there is none; switch s takes part in schedules as endpoint n + s. counts: of an all_to_allv, what member i has
    for member j, in equal units. rings: orders of members along direct links, where GPUs are wired without a switch.

    Where the fabric's switches add (SHARP): leaf: the switch above each member's NIC; above: of each switch the next one towards
    the top (−1 there); nic: the NIC of each member, equal numbers for members that share one. Switch s is
    endpoint n + (number of switches in nodes) + s. switched: members of a node reach each other through a switch.

    meshed: over several nodes, every two members of a node have a link of their own.

    turned: of a schedule that is the same when the members of every node take each other's places in turn (`turning`), only the
    transfers of one turn are wanted.
    """

    node: Ids
    switch: Ids = field(default_factory=_nothing)
    counts: tuple[tuple[int, ...], ...] = ()
    rings: tuple[tuple[int, ...], ...] = ()
    leaf: Ids = field(default_factory=_nothing)
    above: Ids = field(default_factory=_nothing)
    nic: Ids = field(default_factory=_nothing)
    switched: bool = False
    meshed: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        for name in ("node", "switch", "leaf", "above", "nic"):  # other sequences of numbers will do
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))

    @property
    def size(self) -> int:
        """Number of members n."""
        return len(self.node)

    def per_node(self) -> list[list[int]]:
        """Members of each node, nodes in order of their first member."""
        if (even := self.even()) is not None:
            return cast(list[list[int]], even.tolist())
        nodes: dict[int, list[int]] = {}
        for member, node in enumerate(self.node.tolist()):
            nodes.setdefault(node, []).append(member)
        return list(nodes.values())

    def crossing(self, members: int) -> Ids:
        """In which order a ring or chain crosses a node of so many members that it enters at member 0: one after the other, or
        over links of their own to and fro, 0, 1, −1, 2, −2, …. Of as many paths, each entering at another member, an even
        number of members uses every link once (Williams 1949, doi:10.1071/CH9490149), an odd number none more than twice.

        RCCL crosses a node of eight MI300X by eight paths that use every link once, too: `rome_model_81` in
        github.com/ROCm/rccl src/graph/rome_models.cc.
        """
        order = np.arange(members)
        return np.where(order % 2 == 1, (order + 1) // 2, -(order // 2) % max(members, 1)) if self.meshed else order

    def even(self) -> Ids | None:
        """Members, shape (nodes, members of a node), nodes in order of first members; None where they have unequally many."""
        node = self.node
        if not len(node):
            return None
        if (np.diff(node) < 0).any():
            _, first, number = np.unique(node, return_index=True, return_inverse=True)
            node = first[number]
        order = np.argsort(node, kind="stable")
        begin = np.flatnonzero(np.diff(node[order], prepend=-1))
        each, left = divmod(len(node), len(begin))
        return None if left or (begin != np.arange(len(begin)) * each).any() else order.reshape(-1, each)


@dataclass(frozen=True, slots=True)
class Phase:
    """`times` rounds. In round t, transfer e takes the chunks `chunk(t)[e]` from endpoint source[e] to destination[e].

    `chunk(t)` has shape (E,), or (E, width) padded with −1; amount: how many chunks each transfer takes, 1 unless given.
    Transfers of one channel and member follow each other; `channel[e]` runs on its own. reduce: the receiver adds instead of
    copying.
    """

    source: Ids
    destination: Ids
    channel: Ids
    chunk: Callable[[int], Ids]
    times: int = 1
    reduce: bool = False
    amount: Ids | None = None

    @property
    def amounts(self) -> Ids:
        """Chunks per transfer, shape (E,)."""
        return np.ones(len(self.source), np.int64) if self.amount is None else self.amount


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases over a buffer of S bytes: `pieces` equal pieces of `chunks` equal chunks each.

    Every piece goes through all phases in turn; pieces follow each other without waiting for the end, as in a pipeline. Phases
    and their chunk numbers are those of one piece.
    """

    chunks: int
    phases: tuple[Phase, ...]
    pieces: int = 1

    def sent(self, members: int, turned: int = 1) -> NDArray[np.float64]:
        """Fraction of S that each member sends, shape (members,). turned: the schedule is one of so many turns (`Place`)."""
        total = np.zeros(members)
        for times in {phase.times for phase in self.phases}:
            alike = [phase for phase in self.phases if phase.times == times]
            source = np.concatenate([phase.source for phase in alike])
            amounts = None if all(phase.amount is None for phase in alike) else np.concatenate([phase.amounts for phase in alike])
            total += times * np.bincount(source, amounts, minlength=members)[:members]
        return np.repeat(total.reshape(-1, turned).sum(axis=1), turned) / self.chunks


Algorithm = Callable[[Place], Schedule]

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_allv",
    "barrier",
    "send",
)
PIECES = 64  # of a pipelined message; NCCL's pieces have 0.5 to 2 MiB, so 64 are right for 32 to 128 MiB
algorithms: Registry[Algorithm] = Registry("collective algorithm", package="sim.collectives")  # names are "operation/algorithm"
_TURNING: set[Algorithm] = set()


def turning(algorithm: Algorithm) -> Algorithm:
    """Mark an algorithm of which `Place.turned` asks one turn: among the members of several nodes, all of them alike, its other
    transfers are these with each member replaced by the next one of its node, again and again.
    """
    _TURNING.add(algorithm)
    return algorithm


def is_turning(name: str) -> bool:
    """Whether the algorithm of this full name is `turning`."""
    return name in algorithms and algorithms[name] in _TURNING


# What NCCL chooses among (github.com/NVIDIA/nccl src/graph/tuning.cc) or PyTorch builds from NCCL's send and receive (the last
# three): `auto` offers no more, for nobody runs more by default.
# The names are in order of preference at equal prices. Operations that are not here have all that are registered.
OFFERED = {
    "all_reduce": ("ring", "tree", "in_switch", "in_switch_tree", "in_switch_collnet", "collnet_direct", "collnet_chain"),
    "all_gather": ("ring", "pat", "in_switch", "collnet_direct"),
    "reduce_scatter": ("ring", "pat", "in_switch", "collnet_direct"),
    "broadcast": ("chain",),
    "reduce": ("chain",),
    "scatter": ("flat",),
    "gather": ("flat",),
    "all_to_all": ("direct", "pairwise"),
}


@lru_cache
def offered(operation: str, asked: str = "auto") -> tuple[str, ...]:
    """Names of the algorithms among which the cheapest that is applicable runs `operation`.

    asked: "auto", or names with commas between: "ring" for all operations that have it, "all_reduce/tree" for one; operations of
    which none is named are auto. Raises UserError for names that are not registered.
    """
    names = []
    for part in (part.strip() for part in asked.split(",")):
        whose, slash, name = part.rpartition("/")
        if slash:
            algorithms[part]  # raises with the nearest name
        if whose == operation or (not slash and f"{operation}/{part}" in algorithms):
            names.append(name)
    if names:
        return tuple(names)
    every = tuple(name.split("/")[1] for name in algorithms if name.split("/")[0] == operation)
    return OFFERED.get(operation, every)


def together(source: Ids, destination: Ids, chunk: Ids, reduce: bool = False, channel: Ids | None = None) -> Phase:
    """One round: all these transfers at once, of the chunks `chunk`, shape (E,) or (E, width) padded with −1."""
    amount = None if chunk.ndim == 1 else np.count_nonzero(chunk >= 0, axis=1)
    channels = np.zeros_like(source) if channel is None else channel
    return Phase(source, destination, channels, lambda turn: chunk, reduce=reduce, amount=amount)


def backwards(plan: Schedule, reduce: bool) -> Schedule:
    """`plan` in reversed time and direction: a broadcast becomes a reduce, an all-gather a reduce-scatter, a scatter a gather.

    A chunk that spreads from its owner to everybody, each receiving it once, follows a tree; along the same tree in reversed
    order everybody's contributions come together.
    """

    def turned(phase: Phase) -> Phase:
        chunk, last = phase.chunk, phase.times - 1
        source, destination = phase.destination, phase.source
        return replace(phase, source=source, destination=destination, chunk=lambda turn: chunk(last - turn), reduce=reduce)

    return replace(plan, phases=tuple(turned(phase) for phase in reversed(plan.phases)))


def lift(plan: Schedule, groups: Ids, labels: Ids) -> tuple[Phase, ...]:
    """`plan` run by several groups of members at once.

    groups: (groups, endpoints), whose row g are the members of group g; labels: (groups, chunks, width), the chunks of the whole
    that chunk c of group g stands for.
    """
    width = labels.shape[2]

    def lifted(phase: Phase) -> Phase:
        def chunk(turn: int) -> Ids:
            own = phase.chunk(turn).reshape(len(phase.source), -1)
            chunks = np.where((own >= 0)[None, :, :, None], labels[:, np.maximum(own, 0)], -1)
            return chunks.reshape(len(groups) * len(own), -1)

        return replace(
            phase,
            source=groups[:, phase.source].ravel(),
            destination=groups[:, phase.destination].ravel(),
            channel=np.tile(phase.channel, len(groups)),
            amount=np.tile(phase.amounts * width, len(groups)),
            chunk=chunk,
        )

    return tuple(lifted(phase) for phase in plan.phases)
