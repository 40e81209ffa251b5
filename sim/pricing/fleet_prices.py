"""Prices of a cluster with several kinds of GPUs: each kind's own, and what holds where they meet.

A kernel costs what it costs on the GPU of its rank, a link what the profile of its node's GPU says. A collective among GPUs of
several kinds starts when the slowest has launched it (the most of their bases), copies as slowly as the slowest, and has only
protocols that all of them have; the fabric's links are priced as the dearest of the profiles prices them. NCCL uses LL128 among
GPUs of one architecture only, or if all are Hopper or later (github.com/NVIDIA/nccl src/graph/tuning.cc: minCompCap ==
maxCompCap || minCompCap >= 90).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.pricing.kernel_curves import Hardware
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.protocols import LinkPrice, Rates, Transport, rates
from topologies.links.topology import kind_of_link

LL128 = "ll128"


class FleetPrices(Prices):
    """Prices of `members`, one per kind of GPU. Its own profile and GPU are what the slowest of them have of everything: of
    groups in which all kinds meet.
    """

    def __init__(self, members: Sequence[Prices]) -> None:
        super().__init__(_slowest([member.profile for member in members]), _Smallest([member.gpu for member in members]))
        self._members = tuple(members)
        self._among: dict[tuple[int, ...], Prices] = {}

    @property
    def members(self) -> tuple[Prices, ...]:
        """Prices by kind of GPU, as the topology numbers them."""
        return self._members

    def among(self, kinds: tuple[int, ...]) -> Prices:
        """Prices of a group of GPUs of these kinds."""
        prices = self._among.get(kinds)
        if prices is None:
            several = [self.members[kind] for kind in kinds]
            prices = self._among[kinds] = several[0] if len(several) == 1 else FleetPrices(several)
        return prices

    def link(self, kind: str) -> LinkPrice:
        """The price of a link of the nodes of one kind of GPU ("nic h100-sxm"), or of the fabric."""
        return self._owner(kind, {member.gpu.name: member.profile.link(kind_of_link(kind)) for member in self.members})

    def rates(self, kinds: Sequence[str]) -> dict[str, Rates]:
        """By protocol that all members have, its numbers by kind of link."""
        every = [member.profile.every_protocol() for member in self.members]
        names = [name for name in every[0] if all(name in each for each in every)]
        if not self._uniform:
            names = [name for name in names if name != LL128]
        result = {}
        for name in names:
            fields = ("base", "widening", "kernel", "handover", "chunk")
            slowest = {field: max(getattr(each[name], field) for each in every) for field in fields}
            slowest["copy_rate"] = min(each[name].copy_rate for each in every)
            copied = min(member.profile.copy_rate for member in self.members)
            own = {member.gpu.name: each[name].links for member, each in zip(self.members, every, strict=True)}
            links = {kind: self._owner(kind, {gpu: priced[kind_of_link(kind)] for gpu, priced in own.items()}) for kind in kinds}
            result[name] = rates(Transport.model_construct(links=links, **slowest), kinds, copied)
        return result

    @property
    def _uniform(self) -> bool:
        """Whether all GPUs are of one architecture, as far as profiles tell, or all are Hopper or later."""
        profiles = {member.profile.name for member in self.members}
        return len(profiles) == 1 or all(getattr(member.gpu, "multicast", False) for member in self.members)

    @staticmethod
    def _owner(kind: str, prices: Mapping[str, LinkPrice]) -> LinkPrice:
        """The price of a link by the GPU whose nodes have it; the dearest of links that belong to no node, or to nodes of none of
        these GPUs.
        """
        owner = kind.partition(" ")[2]
        return prices[owner] if owner in prices else _dearest(list(prices.values()))


class _Smallest:
    """What every one of several GPUs has at least."""

    def __init__(self, gpus: Sequence[Hardware]) -> None:
        self.name = " + ".join(gpu.name for gpu in gpus)
        shared = [dtype for dtype in gpus[0].peak if all(dtype in gpu.peak for gpu in gpus)]
        self.peak = {dtype: min(gpu.peak[dtype] for gpu in gpus) for dtype in shared}
        self.memory_bandwidth = min(gpu.memory_bandwidth for gpu in gpus)
        self.sms = min(gpu.sms for gpu in gpus)
        self.memory = min(gpu.memory for gpu in gpus)
        self.power = 0.0


def _dearest(prices: Sequence[LinkPrice]) -> LinkPrice:
    return LinkPrice.model_construct(
        efficiency=min(price.efficiency for price in prices),
        latency=max(price.latency for price in prices),
        fill=max(price.fill for price in prices),
    )


def _slowest(profiles: Sequence[Profile]) -> Profile:
    """The dearest price of everything that a group of ranks on several kinds of GPUs pays once for all; nothing of kernels. What
    one of the profiles measured is no measurement of the group.
    """
    first, *others = profiles
    if all(other == first for other in others):
        return first
    wire = {name: max(profile.wire.get(name, 1.0) for profile in profiles) for each in profiles for name in each.wire}
    memory = min((profile.memory for profile in profiles), key=lambda curve: curve.efficiency)
    names = set.intersection(*(set(profile.protocols) for profile in profiles))
    return first.model_copy(
        update={
            "name": " + ".join(dict.fromkeys(profile.name for profile in profiles)),
            "gpu": " + ".join(profile.gpu for profile in profiles),
            "provenance": {},
            "memory": memory,
            "launch": max(profile.launch for profile in profiles),
            "eager": max(profile.eager for profile in profiles),
            "collective_call": max(profile.collective_call for profile in profiles),
            "slowdown": max(profile.slowdown for profile in profiles),
            "collective_launch": max(profile.collective_launch for profile in profiles),
            "protocols": {name: price for name, price in first.protocols.items() if name in names},
            "tables": (),
            "wire": wire,
        }
    )
