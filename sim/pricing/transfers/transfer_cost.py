"""What a collective or send costs without contention: bytes per link, and latency."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from sim.clock import on_grid
from sim.engine.network import FlowPart
from sim.pricing.transfers.traffic import Traffic
from sim.program import Collective, Send

Demands = dict[tuple[int, str], float]  # bytes per second by link and stream inside a block; "" of no block


@dataclass(frozen=True)
class TransferCost:
    """The cost of a collective or send on merged links."""

    traffic: Traffic
    parts: tuple[FlowPart, ...]
    rates: tuple[float, ...]  # bytes per second of each part that has its links for itself
    latency: float  # seconds, of all its rounds
    sent: float  # bytes that one rank of the cohort sends
    alone: float  # seconds without contention
    is_send: bool  # from one rank to another, without a rendezvous
    protocol: str  # as NCCL names it
    working: float = 1.0  # part of its time in which it slows compute beside it; in the rest it waits for other ranks
    lanes: int = 1  # lanes of its cohort that take part
    slowing: float | None = None  # the factor by which it slows compute beside it; None: the profile's

    @cached_property
    def links(self) -> frozenset[int]:
        """The links that it is on at any time."""
        return frozenset(link for part in self.parts for link, _ in part.flows)

    @cached_property
    def seconds(self) -> float:
        """As long as it has its links for itself, as the network has it."""
        return sum(on_grid(part.bytes / rate) for part, rate in zip(self.parts, self.rates, strict=True)) + self.latency

    @cached_property
    def demands(self) -> Demands:
        """The most that it then puts on each link; one object for transfers over equal links."""
        return _demands(tuple(part.flows for part in self.parts), self.rates)


@lru_cache(maxsize=4096)
def _demands(flows: tuple[tuple[tuple[int, float], ...], ...], rates: tuple[float, ...]) -> Demands:
    demands: Demands = {}
    for every, rate in zip(flows, rates, strict=True):
        for link, count in every:
            demands[link, ""] = max(demands.get((link, ""), 0.0), rate * count)
    return demands


def cost_key(work: Collective | Send) -> Hashable:
    """The fields of `work` that its price depends on, besides its groups."""
    if isinstance(work, Send):
        return "send", work.bytes
    return work.operation, work.bytes, work.repeat, work.algorithm, work.pieces, work.width == 2, work.sms
