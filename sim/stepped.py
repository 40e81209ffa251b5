"""The reference form of a collective: every round's transfers played on the network, one flow each.

A member starts its transfers of a round when everything it sent in earlier rounds of that channel has left and everything it
was to receive has arrived; nobody waits for members that it does not exchange data with. This is what the fluid form must
agree with when nothing else uses the links.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
from simpy import Environment

from sim.clock import on_grid
from sim.collectives import Ids, Phase, Schedule
from sim.network import Network, Part
from sim.prices import Profile
from sim.protocols import SIMPLE, Transport
from topologies.hardware import nominal_latency
from topologies.topology import Topology

Actor = tuple[int, int, int]  # group, channel, member


def stepped(schedule: Schedule, groups: Ids, size: float, topology: Topology, profile: Profile, protocol: str = SIMPLE) -> float:
    """Seconds until every group of `groups` (groups, n) has run `schedule` on `size` bytes, all starting together.

    What a protocol adds for cutting messages in pieces (`fill`) and for a rank's own piece belongs to no round: it is left out.
    """
    return _Rounds(schedule, groups, size, topology, profile.every_protocol()[protocol]).play()


class _Rounds:
    def __init__(self, schedule: Schedule, groups: Ids, size: float, topology: Topology, protocol: Transport) -> None:
        self.schedule, self.groups, self.chunk = schedule, groups, size / schedule.chunks
        self.topology, self.protocol = topology, protocol
        links = np.arange(topology.links)
        kinds = topology.kind(links)
        efficiency = np.array([protocol.links[kind].efficiency for kind in topology.kinds])
        self.env = Environment()
        self.network = Network(self.env, (topology.capacity(links) * efficiency[kinds]).tolist())
        self.rounds = [(phase, turn) for phase in schedule.phases for turn in range(phase.times)]
        self.round: dict[Actor, int] = defaultdict(int)
        self.left: dict[Actor, int] = {}
        self.routes = {id(phase): self._routes(phase) for phase in schedule.phases}
        self.sends = {id(phase): _by_sender(phase) for phase in schedule.phases}
        self.touches = {id(phase): _touches(phase) for phase in schedule.phases}

    def _routes(self, phase: Phase) -> list[list[tuple[Part, float]]]:
        """Per group and transfer: its part and its latency."""
        result = []
        for members in self.groups:
            routes = self.topology.routes(members[phase.source], members[phase.destination])
            result.append([self._route(route[route >= 0]) for route in routes])
        return result

    def _route(self, links: Ids) -> tuple[Part, float]:
        flows = tuple((int(link), 1.0) for link in links)
        if not flows:
            return Part(self.chunk, ()), 0.0
        outermost = self.topology.kinds[int(self.topology.kind(links).max())]
        step = max(0.0, self.protocol.links[outermost].latency - nominal_latency(outermost))
        latency = step + float(self.topology.latency(links).sum())
        return Part(self.chunk, flows), on_grid(latency)

    def play(self) -> float:
        """Start everybody; run to the end."""
        channels = {int(c) for phase in self.schedule.phases for c in phase.channel}
        for group, members in enumerate(self.groups):
            for channel in sorted(channels):
                for member in range(len(members)):
                    self._advance((group, channel, member))
        self.env.run()
        return self.env.now + on_grid(self.protocol.base)

    def _advance(self, actor: Actor) -> None:
        """Begin the next round in which the actor takes part."""
        group, channel, member = actor
        while self.round[actor] < len(self.rounds):
            phase, _ = self.rounds[self.round[actor]]
            touches = self.touches[id(phase)].get((channel, member), 0)
            if touches:
                self.left[actor] = self.left.get(actor, 0) + touches  # may be below zero: a sender can be ahead
                for transfer in self.sends[id(phase)].get((channel, member), ()):
                    part, latency = self.routes[id(phase)][group][transfer]
                    receiver = (group, channel, int(phase.destination[transfer]))
                    self.network.start((part,), latency, partial(self._done, receiver), partial(self._done, actor))
                if self.left[actor] > 0:
                    return
            self.round[actor] += 1

    def _done(self, actor: Actor) -> None:
        """One transfer less that the actor waits for in its present round (or, of a sender that is ahead, in its next)."""
        self.left[actor] = self.left.get(actor, 0) - 1
        if self.left[actor] == 0 and self.round[actor] < len(self.rounds):
            self.round[actor] += 1
            self._advance(actor)


def _by_sender(phase: Phase) -> dict[tuple[int, int], list[int]]:
    result: dict[tuple[int, int], list[int]] = defaultdict(list)
    for transfer, key in enumerate(zip(phase.channel.tolist(), phase.source.tolist(), strict=True)):
        result[key].append(transfer)
    return result


def _touches(phase: Phase) -> dict[tuple[int, int], int]:
    """Transfers of a round that each (channel, member) sends or receives."""
    result: dict[tuple[int, int], int] = defaultdict(int)
    for ends in (phase.source, phase.destination):
        for key in zip(phase.channel.tolist(), ends.tolist(), strict=True):
            result[key] += 1
    return result
