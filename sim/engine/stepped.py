"""The reference form of a collective: every round's transfers played on the network, one flow each.

A member begins a round of a channel when everything it sent in the round before has left and everything it was to receive has
arrived; no member waits for members that it does not exchange data with. In a pipeline it also waits for the piece before in the
same round. This is what the fluid form must agree with when nothing else uses the links.

Transfers that are equivalent are played once (`sim.pricing.transfers.symmetry`), which changes no time: a ring over 1,024 members
behind one switch is one transfer per round. Without any symmetry all are played, one by one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from simpy import Environment

from sim.clock import on_grid
from sim.collectives import Ids, Schedule
from sim.engine.network import FlowPart, Network
from sim.pricing.prices import Profile
from sim.pricing.transfers.protocols import SIMPLE
from sim.pricing.transfers.symmetry import classes
from topologies.fabric import nominal_latency
from topologies.links.topology import Topology

Floats = NDArray[np.float64]
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)


def stepped(
    schedule: Schedule,
    groups: Ids,
    size: float,
    topology: Topology,
    profile: Profile,
    *,
    protocol: str = SIMPLE,
    fold: bool = True,
) -> float:
    """Seconds until every group has run `schedule` on `size` bytes, all starting together.

    groups: endpoints of each group, shape (groups, members and switches). fold=False plays every transfer: the same, slower. What
    a protocol adds for cutting messages in pieces (`fill`) and for a rank's own piece belongs to no round: it is left out.
    """
    price = profile.every_protocol()[protocol]
    if not sum(len(phase.source) for phase in schedule.phases):
        return 0.0
    kinds, moves = topology.kinds, _moves(schedule, groups, topology)
    kind, wire = topology.kind(moves.links), topology.latency(moves.links)
    efficiency = np.array([price.links[name].efficiency for name in kinds])
    steps = np.array([max(0.0, price.links[name].latency - nominal_latency(name)) for name in kinds])
    real = moves.routes >= 0
    outermost = np.where(real, kind[moves.routes], -1).max(axis=1)
    latency = np.where(real, wire[moves.routes], 0.0).sum(axis=1) + np.where(outermost < 0, 0.0, steps[outermost])
    rounds = _Rounds(schedule, size, moves, topology.capacity(moves.links) * efficiency[kind], latency, fold)
    return rounds.play() + on_grid(price.base)


@dataclass(slots=True)
class _Moves:
    """Transfers of all phases and groups: phase, chunks, actors (a member in a channel), links; shapes (E,), (E, hops)."""

    phase: Ids
    amount: Ids
    source: Ids
    destination: Ids
    routes: Ids  # places in `links`; −1 pads
    links: Ids


def _moves(schedule: Schedule, groups: Ids, topology: Topology) -> _Moves:
    count, width = groups.shape
    phases = [phase for phase in schedule.phases if len(phase.source)]
    channels = 1 + max(int(phase.channel.max()) for phase in phases)
    first = [(np.arange(count)[:, None] * channels + phase.channel) * width for phase in phases]
    ends = [
        np.concatenate([(base + getattr(phase, end)).ravel() for base, phase in zip(first, phases, strict=True)])
        for end in ("source", "destination")
    ]
    actors = np.unique(np.stack(ends), return_inverse=True)[1].reshape(2, -1)
    of_phases = [topology.routes(groups[:, phase.source].ravel(), groups[:, phase.destination].ravel()) for phase in phases]
    hops = max(routes.shape[1] for routes in of_phases)
    routes = np.concatenate([np.pad(r, ((0, 0), (0, hops - r.shape[1])), constant_values=-1) for r in of_phases])
    links, places = np.unique(routes, return_inverse=True)
    padding = int(links[0] < 0)
    return _Moves(
        phase=np.repeat(np.arange(len(phases)), [count * len(phase.source) for phase in phases]),
        amount=np.concatenate([np.tile(phase.amounts, count) for phase in phases]),
        source=actors[0],
        destination=actors[1],
        routes=places.reshape(routes.shape) - padding,
        links=links[padding:],
    )


@dataclass(slots=True)
class _Transfer:
    """A class of transfers: `each` of the sending and of the receiving actor's."""

    phase: int
    part: FlowPart
    latency: float
    source: int
    destination: int
    sends: int
    receives: int


@dataclass(slots=True)
class _Actor:
    """A class of actors: the phases it takes part in, with the number of its first round of each, and how far it is."""

    first: dict[int, int] = field(default_factory=dict)
    phases: list[int] = field(default_factory=list)  # by round
    needs: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # transfers per round, by phase
    sends: dict[int, list[_Transfer]] = field(default_factory=lambda: defaultdict(list))  # by phase
    at: list[int] = field(default_factory=list)  # round of each piece
    left: dict[tuple[int, int], int] = field(default_factory=dict)  # (piece, round) -> transfers that have not ended


class _Rounds:
    def __init__(self, schedule: Schedule, size: float, moves: _Moves, capacity: Floats, latency: Floats, fold: bool) -> None:
        self.pieces, self.end = schedule.pieces, 0.0
        self.times = [phase.times for phase in schedule.phases if len(phase.source)]
        ticks = np.rint(latency * 2.0**40).astype(np.int64)
        colour = np.zeros(len(ticks), np.uint64) if fold else np.arange(len(ticks), dtype=np.uint64)
        for part, odd in zip((moves.phase, moves.amount, ticks), _ODD, strict=True):
            colour += part.astype(np.uint64) * odd
        alike = classes(colour, moves.source, moves.destination, moves.routes, capacity.view(np.uint64))
        _, some_link = np.unique(alike.link, return_index=True)
        self.env = Environment()
        self.network = Network(self.env, capacity[some_link].tolist())
        flows = _flows(alike.transfer, moves.routes, alike.link)
        chunk = size / schedule.chunks / schedule.pieces
        _, example, counts = np.unique(alike.transfer, return_index=True, return_counts=True)
        members = np.bincount(alike.member)
        self.actors = [_Actor(at=[0] * self.pieces) for _ in members]
        for phase, amount, tick, source, destination, count, own in zip(
            moves.phase[example].tolist(),
            moves.amount[example].tolist(),
            ticks[example].tolist(),
            alike.member[moves.source[example]].tolist(),
            alike.member[moves.destination[example]].tolist(),
            counts.tolist(),
            flows,
            strict=True,
        ):
            each = count // int(members[source]), count // int(members[destination])
            self._join(_Transfer(phase, FlowPart(amount * chunk, own), tick / 2.0**40, source, destination, *each))
        self._number()

    def _join(self, transfer: _Transfer) -> None:
        source, destination = self.actors[transfer.source], self.actors[transfer.destination]
        source.sends[transfer.phase].append(transfer)
        source.needs[transfer.phase] += transfer.sends
        destination.needs[transfer.phase] += transfer.receives

    def _number(self) -> None:
        for actor in self.actors:
            for phase in sorted(actor.needs):
                actor.first[phase] = len(actor.phases)
                actor.phases += [phase] * self.times[phase]

    def play(self) -> float:
        """Run all rounds of all pieces; seconds until the last transfer has arrived."""
        for number in range(len(self.actors)):
            self._begin(number, 0, 0)
        self.env.run()
        return self.end  # the clock may run on to events that are no longer meant

    def _begin(self, number: int, piece: int, turn: int) -> None:
        actor = self.actors[number]
        phase = actor.phases[turn]
        left = actor.left[piece, turn] = actor.left.get((piece, turn), 0) + actor.needs[phase]  # some may have ended before
        for transfer in actor.sends.get(phase, ()):
            receiver = self.actors[transfer.destination].first[phase] + turn - actor.first[phase]
            arrived = partial(self._ended, transfer.destination, piece, receiver, transfer.receives)
            sent = partial(self._ended, number, piece, turn, transfer.sends)
            self.network.start((transfer.part,), transfer.latency, arrived, sent)
        if not left:
            self._through(number, piece, turn)

    def _ended(self, number: int, piece: int, turn: int, count: int) -> None:
        self.end = self.env.now
        left = self.actors[number].left
        left[piece, turn] = left.get((piece, turn), 0) - count  # below zero while the round has not begun
        if not left[piece, turn]:
            self._through(number, piece, turn)

    def _through(self, number: int, piece: int, turn: int) -> None:
        """The piece may go on to the next round, and the next piece to this one."""
        actor = self.actors[number]
        del actor.left[piece, turn]
        actor.at[piece] = turn + 1
        if turn + 1 < len(actor.phases) and (piece == 0 or actor.at[piece - 1] > turn + 1):
            self._begin(number, piece, turn + 1)
        if piece + 1 < self.pieces and actor.at[piece + 1] == turn:
            self._begin(number, piece + 1, turn)


def _flows(transfer: Ids, routes: Ids, link: Ids) -> list[tuple[tuple[int, float], ...]]:
    """Per class of transfers: the classes of links that it crosses, and how many of them cross one link."""
    own, crossed = np.broadcast_to(transfer[:, None], routes.shape)[routes >= 0], link[routes[routes >= 0]]
    width = int(link.max(initial=0)) + 1
    pairs, count = np.unique(own * width + crossed, return_counts=True)
    each = count / np.bincount(link)[pairs % width]
    result: list[list[tuple[int, float]]] = [[] for _ in range(int(transfer.max()) + 1)]
    for row, column, flows in zip((pairs // width).tolist(), (pairs % width).tolist(), each.tolist(), strict=True):
        result[row].append((column, flows))
    return [tuple(flows) for flows in result]
