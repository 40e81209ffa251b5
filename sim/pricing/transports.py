"""What carries messages between nodes where it is not the InfiniBand or RoCE that profiles were measured over.

A transport is a file of `sim/pricing/networks`, named by a cluster's `fabric.transport`: EFA, Slingshot, GPUDirect-TCPX … It
prices a step between two NICs by NCCL's protocol, for rings or for other algorithms, whichever a published sweep ran; the other
kind takes as much longer, or shorter, than the profile's own network as the smallest message of the measured kind does.
`calibration/fit/published_collectives/transports.py` fits them.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import Field, model_validator

from sim.pricing.prices import Profile
from sim.pricing.provenance import Provenance, is_between_nodes
from sim.pricing.transfers.protocols import BETWEEN, PROTOCOLS, RING, SIMPLE, LinkPrice, between_nodes
from topologies.reading import Config, UserError, build, load_yaml, nearest

FOLDER = Path(__file__).parent / "networks"
Steps = dict[str, LinkPrice]  # by protocol: ll, ll128, simple


class NetworkTransport(Config):
    """Prices of a step between two NICs."""

    what: str  # in a few words
    profile: str  # of the GPUs that it was measured with
    source: str  # the sweep that it was fitted to, and where tuner and anything assumed come from
    steps: Steps = Field(default_factory=dict)  # of trees and chains
    rings: Steps = Field(default_factory=dict)  # of rings and sends
    tuner: bool = False  # a plugin chooses algorithms by its own measurements instead of NCCL's estimate
    errors: dict[str, float] = Field(default_factory=dict)  # median and 90th percentile on sizes kept out, and of other sweeps
    measured_range: dict[str, tuple[float, float]] = Field(default_factory=dict)  # as of a profile's links

    @model_validator(mode="after")
    def _complete(self) -> NetworkTransport:
        for steps in (self.steps, self.rings):
            if steps and set(steps) != set(PROTOCOLS):
                raise ValueError(f"steps={sorted(steps)}: must price ll, ll128 and simple, or nothing")
        if not (self.steps or self.rings):
            raise ValueError("steps={}: give steps or rings, or both")
        return self


def transport_names() -> list[str]:
    """Names of the transports, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@functools.cache
def load_transport(name: str) -> NetworkTransport:
    """The transport of that name. Raises UserError."""
    if name not in transport_names():
        raise UserError(f"fabric.transport={name!r}: unknown{nearest(name, transport_names())}")
    path = FOLDER / f"{name}.yaml"
    return build(NetworkTransport, load_yaml(path), str(path))


_CARRIED: dict[tuple[str, str], tuple[Profile, Profile]] = {}


def carried(profile: Profile, transport: str) -> Profile:
    """`profile` with the prices between nodes that `transport` has; as it is for "". Raises UserError."""
    if not transport:
        return profile
    known = _CARRIED.get((profile.name, transport))
    if known is None or known[0] is not profile:
        known = _CARRIED[profile.name, transport] = profile, with_network(profile, load_transport(transport))
    return known[1]


def with_network(profile: Profile, network: NetworkTransport) -> Profile:
    """`profile` with the prices of `network` between nodes."""
    if "ll" not in profile.protocols:
        raise UserError(f"fabric.transport: profile '{profile.name}' has no prices of NCCL's protocols, which transports replace")
    every = profile.every_protocol()
    steps: Steps = {name: every[name].links["nic"] for name in PROTOCOLS}
    rings: Steps = {name: every[RING + name if RING + name in every else name].links["nic"] for name in steps}
    steps, rings = network.steps or _moved(steps, rings, network.rings), network.rings or _moved(rings, steps, network.steps)
    update = {"tuner": network.tuner, "provenance": _provenance(profile, network)}
    return with_steps(profile, steps, rings).model_copy(update=update)


def with_steps(profile: Profile, steps: Steps, rings: Steps) -> Profile:
    """`profile` with these prices of a step between nodes; steps: {} leaves what trees and chains pay."""
    further = profile.links["spine"].latency - profile.links["nic"].latency
    links = dict(profile.links) | (between_nodes(steps[SIMPLE], further) if steps else {})
    protocols = {
        name: protocol.model_copy(
            update={"links": dict(protocol.links) | (between_nodes(steps[name], further) if name in steps else {})}
        )
        for name, protocol in profile.protocols.items()
    }
    return profile.model_copy(update={"links": links, "protocols": protocols, "rings": rings})


def _moved(prices: Steps, measured: Steps, network: Steps) -> Steps:
    """`prices` of one kind of algorithm over another network, by what the other kind's, `measured`, became there."""
    further = network["ll"].latency - measured["ll"].latency
    rate = network[SIMPLE].efficiency / measured[SIMPLE].efficiency
    return {
        name: LinkPrice.model_construct(
            efficiency=min(1.0, price.efficiency * rate), latency=max(0.0, price.latency + further), fill=price.fill
        )
        for name, price in prices.items()
    }


def _provenance(profile: Profile, network: NetworkTransport) -> dict[str, Provenance]:
    """Of a profile's own network nothing remains; the transport's errors hold with the GPUs that it was measured with."""
    note = profile.provenance.get("links")
    if note is None:
        return dict(profile.provenance)
    same, of = network.profile == profile.name, network.measured_range
    known = {key: span for key, span in note.measured_range.items() if not is_between_nodes(key)}
    between = {key if is_between_nodes(key) else f"{key} between nodes": of[key] for key in of} if same else {}
    update = {
        "errors": {key: error for key, error in note.errors.items() if " nodes" not in key} | (network.errors if same else {}),
        "transports": tuple(kind for kind in note.transports if kind not in BETWEEN) + ("nic",) * same,
        "measured_range": known | between,
    }
    return dict(profile.provenance) | {"links": note.model_copy(update=update)}
