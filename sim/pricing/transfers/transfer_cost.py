"""What a collective or send costs without contention: bytes per link, and latency."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sim.engine.network import FlowPart
from sim.pricing.transfers.traffic import Traffic
from sim.program import Collective, Send


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The cost of a collective or send on merged links."""

    traffic: Traffic
    parts: tuple[FlowPart, ...]
    latency: float  # seconds, of all its rounds
    sent: float  # bytes that one rank of the cohort sends
    alone: float  # seconds without contention
    is_send: bool  # from one rank to another, without a rendezvous
    protocol: str  # as NCCL names it
    working: float = 1.0  # part of its time in which it slows compute beside it; in the rest it waits for other ranks
    lanes: int = 1  # lanes of its cohort that take part
    slowing: float | None = None  # the factor by which it slows compute beside it; None: the profile's

    @property
    def links(self) -> set[int]:
        """The links that it is on at any time."""
        return {link for part in self.parts for link, _ in part.flows}


def cost_key(work: Collective | Send) -> Hashable:
    """The fields of `work` that its price depends on, besides its groups."""
    if isinstance(work, Send):
        return "send", work.bytes
    return work.operation, work.bytes, work.repeat, work.algorithm, work.pieces, work.width == 2, work.sms
