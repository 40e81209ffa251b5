"""Communication as tasks: a transfer by itself, and a collective that waits for all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simpy import Environment

from sim.engine.device import Device
from sim.engine.network import FlowPart, Network
from sim.engine.rendezvous import Rendezvous
from sim.engine.task import Task


class Transfer(Task):
    """`parts` one after the other over links of `network`, then `latency` seconds."""

    __slots__ = ("latency", "network", "parts")

    def __init__(self, env: Environment, network: Network, parts: Sequence[FlowPart], latency: float = 0.0) -> None:
        super().__init__(env)
        self.network, self.parts, self.latency = network, parts, latency

    def begin(self) -> None:
        """Wait for the host, then send."""
        wait = self.launched - self.start
        if wait > 0:
            self.network.scheduled.append(self.start)
            self.env.timeout(wait).callbacks.append(self._launched)
        else:
            self.send()

    def _launched(self, _: object) -> None:
        self.start = self.env.now
        self.send()

    def send(self) -> None:
        """Put the bytes on the network."""
        self.network.start(self.parts, self.latency, self.finish)


class CollectiveTransfer(Transfer):
    """One rank's (or lane's) part of a collective: it meets the others, and slows down compute on its device.

    meet: gives the rendezvous of the next collective of this kind; it is asked when the task comes. working: part of the time in
    which it slows compute.
    """

    __slots__ = ("device", "meet", "working")

    def __init__(
        self,
        env: Environment,
        network: Network,
        parts: Sequence[FlowPart],
        latency: float,
        device: Device,
        working: float,
        meet: Callable[[], Rendezvous[CollectiveTransfer]] | None,
    ) -> None:
        super().__init__(env, network, parts, latency)
        self.device, self.working, self.meet = device, working, meet

    def send(self) -> None:
        """Come to the rendezvous; the last to come starts the collective."""
        members = [self]
        if self.meet is not None:
            rendezvous = self.meet()
            if not rendezvous.arrive(self):
                return
            members = rendezvous.members
        for member in members:
            member.start = self.start
            member.device.communicate(member.working)
        self.network.start(self.parts, self.latency, lambda: _ended(members))


def _ended(members: list[CollectiveTransfer]) -> None:
    for member in members:
        member.device.fall_silent(member.working)
        member.finish()
