"""Fits the prices of collectives to measured ones, by the formula of `sim/pricing/transfers/protocols.py` and the schedules of
`sim/collectives`.

`calibration/fit/published_collectives/refit.py` runs these fits for the shipped profiles.

A prediction is the cheapest of every registered algorithm and every protocol that NCCL's own estimate leaves, as in the
simulation: an algorithm that is added is fitted with when this runs again. Free are a few numbers per protocol and kind of link;
the loss is robust (soft L1 of the logarithm of predicted over measured).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.fit.published_collectives.rows import ONE_THREAD, Row
from sim.analysis.collective_sweep import lone
from sim.grid import Grid
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.nccl_tuning import ESTIMATED, Communicator, Way, by_estimate, communicator, limits_of
from sim.pricing.transfers.protocols import (
    IN_SWITCH,
    PROTOCOLS,
    RING,
    SIMPLE,
    LinkPrice,
    Rates,
    Shape,
    Transport,
    collective_seconds,
    priced_as,
    rates,
    usable,
)
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.wiring import link_rates
from sim.pricing.transports import with_steps
from topologies.cluster import Cluster

Array = NDArray[np.float64]
Ranges = Mapping[str, tuple[float, float]]  # lowest and highest value by what it is of
Bounds = dict[str, tuple[float, float, float]]  # free number -> start, lowest, highest

STARTS = 32  # of the search, at most, the first from NCCL's own constants
PATIENCE, BETTER = 8, 1e-3  # starts without one that is better by such a part
PRIOR = 0.004  # weight of the start: holds numbers that the measurements do not determine
WORTH = 0.05  # relative error from which on a row counts less than by its square
BASE = {
    "ll": (8e-6, 2e-6, 2e-5),
    "ll128": (1.1e-5, 2e-6, 3e-5),
    SIMPLE: (1.4e-5, 3e-6, 5e-5),
    "p2p_ll": (7e-6, 2e-6, 2e-5),
    "p2p": (1.4e-5, 3e-6, 5e-5),
    "send_ll": (7e-6, 2e-6, 2e-5),
    "send": (5e-6, 1e-6, 5e-5),
    "in_switch": (5e-6, 5e-7, 1e-4),
}
COPY = (6e11, 1e11, 1e13)
WIDENING = (0.2, 0.01, 1.0)
HANDOVER = (5e-7, 1e-8, 1e-5)
COPYING = (1e-5, 1e-8, 1e-4)  # a chunk of a channel out
LAUNCH = (1e-6, 2e-4)  # of the quickest protocol; one process for all GPUs, or PyTorch around it, add tens of microseconds
OVERLAP = {"overlap": (1e-7, 1e-10, 2e-5)}
STEP: dict[str, Bounds] = {  # over links inside a node; efficiencies of LL and LL128 as shares of Simple's; see the format's
    "ll": {"efficiency": (0.3, 0.1, 0.5), "latency": (1e-6, 6e-7, 5e-6), "fill": (5e-7, 1e-9, 5e-5), **OVERLAP},
    "ll128": {"efficiency": (0.7, 0.3, 0.94), "latency": (1.5e-6, 6e-7, 1e-5), "fill": (2e-7, 1e-9, 5e-5)},
    SIMPLE: {"efficiency": (0.8, 0.04, 1.0), "latency": (3e-6, 6e-7, 3e-5), "fill": (6e-7, 1e-9, 5e-5), **OVERLAP},
    "p2p_ll": {"efficiency": (0.02, 0.001, 0.4), "latency": (1e-6, 6e-7, 1e-5), "fill": (1e-7, 1e-9, 1e-5), **OVERLAP},
    "p2p": {"efficiency": (0.8, 0.04, 1.0), "latency": (2e-6, 6e-7, 3e-5), "fill": (6e-7, 1e-9, 1e-4), **OVERLAP},
    "send_ll": {"efficiency": (0.02, 0.001, 0.4), "latency": (1e-6, 6e-7, 1e-5), "fill": (1e-7, 1e-9, 1e-5), **OVERLAP},
    "send": {"efficiency": (0.8, 0.04, 1.0), "latency": (8e-6, 6e-7, 3e-5), "fill": (6e-7, 1e-9, 1e-4), **OVERLAP},
    "in_switch": {"efficiency": (0.7, 0.5, 1.0), "latency": (1e-6, 6e-7, 1e-5)},
}
CUT = (1e-7, 1e-9, 5e-7)  # fill of rings between nodes, whose messages are cut into as many pieces as there are members already
NIC = {  # over the network, the protocols' efficiencies as shares of Simple's; latencies start at NCCL's for NET
    "efficiency": (0.9, 0.02, 1.0),
    "ll.share": (0.4, 0.02, 0.5),
    "ll128.share": (0.8, 0.1, 0.94),
    "ll": (5e-6, 3.9e-6, 3e-4),
    "ll128": (8.5e-6, 3.9e-6, 3e-4),
    SIMPLE: (1.4e-5, 3.9e-6, 1e-3),
    "ll.fill": (1e-7, 1e-9, 1e-5),
    "ll128.fill": (1e-6, 1e-9, 1e-5),
    f"{SIMPLE}.fill": (2e-6, 1e-9, 1e-5),
}


@dataclass
class Series:
    """Rows of one operation among the same GPUs, and what each algorithm asks of the links."""

    operation: str
    size: Array
    seconds: Array
    shapes: dict[str, Shape] = field(default_factory=dict)  # by "operation/algorithm"
    group: Communicator | None = None  # of which NCCL estimates what is fastest
    messages: float = 0.0  # for one peer up to which an all-to-all is in LL
    _left: dict[tuple[Way, ...], NDArray[np.bool_]] = field(default_factory=dict)

    def left(self, ways: tuple[Way, ...]) -> NDArray[np.bool_]:
        """Among which ways NCCL's estimate leaves the choice, shape (ways, rows)."""
        known = self._left.get(ways)
        if known is None:
            each = [by_estimate(self.group, ways, size, self.messages) for size in self.size]
            known = self._left[ways] = np.array([[way in kept for kept in each] for way in ways])
        return known


Free = Callable[[Mapping[str, float]], Profile]


def placed(cluster: Cluster, ranks: int, nodes: int) -> Cluster:
    """`cluster` with as many nodes; of nodes that are used in part, the part with its NICs."""
    each = ranks // nodes
    node = cluster.node
    if nodes > 1 and each < node.gpus:
        nics = max(1, node.nics * each // node.gpus)
        node = node.model_copy(update={"gpus": each, "nics": nics, "nic": node.nic * node.nics * each / (node.gpus * nics)})
    return cluster.model_copy(update={"nodes": nodes, "node": node})


def series(rows: Iterable[Row], cluster: Cluster, profile: Profile) -> list[Series]:
    """Rows by operation, ranks and nodes, with the schedules of every registered algorithm laid over `cluster`."""
    by_group: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        by_group.setdefault((row.operation, row.ranks, row.nodes), []).append(row)
    result = []
    for (operation, ranks, nodes), chosen in by_group.items():
        sweep = Series(operation, np.array([row.bytes for row in chosen]), np.array([row.seconds for row in chosen]))
        part = placed(cluster, ranks, nodes)
        pricing, (work,) = lone(part.topology(), Prices(profile, part.node.gpu), operation, ranks, [1.0])
        sweep.shapes = pricing.shapes(work, 0)
        if operation in ESTIMATED and not (nodes > 1 and profile.tuner):
            sweep.group = communicator(pricing.topology, pricing.grid, pricing.siblings(work, 0), limits_of(part.node.gpu))
            sweep.messages = profile.sends_ll
        result.append(sweep)
    return result


def predicted(sweep: Series, tariffs: Mapping[str, Rates]) -> Array:
    """Seconds of the cheapest algorithm and protocol for each row, among those that NCCL's estimate leaves."""
    best: Array = np.full(len(sweep.size), np.inf)
    ways = tuple((name, protocol) for name in sweep.shapes for protocol in usable(name, "auto", tariffs))
    for (name, protocol), left in zip(ways, sweep.left(ways), strict=True):
        if left.any():
            rest, transfers = collective_seconds(tariffs[priced_as(name, protocol, tariffs)], sweep.shapes[name], sweep.size)
            best = np.where(left, np.minimum(best, rest + sum(transfers)), best)
    return best


def tariffs(profile: Profile, kinds: Sequence[str], names: Collection[str] = ()) -> dict[str, Rates]:
    """The rates of every protocol, or of those that are named."""
    every = profile.every_protocol()
    return {name: rates(every[name], kinds, profile.copy_rate) for name in names or every}


def _only(profile: Profile, names: Collection[str]) -> Profile:
    """`profile` with the protocols that are named and those that they follow from."""
    rings = profile.rings if any(name.startswith(RING) for name in names) else {}
    needed = {"ll", *names, *rings}
    protocols = {name: protocol for name, protocol in profile.protocols.items() if name in needed}
    return profile.model_copy(update={"protocols": protocols, "rings": rings})


def search(
    free: Bounds, profile_of: Free, data: Sequence[Series], kinds: Sequence[str], starts: int = STARTS
) -> dict[str, float]:
    """The free numbers with the least loss: bounded least squares on their logarithms, from several starts, until PATIENCE of
    them in a row find nothing better.
    """
    from scipy.optimize import least_squares

    start, low, high = (np.log([bound[i] for bound in free.values()]) for i in range(3))
    every = tariffs(profile_of({name: bound[0] for name, bound in free.items()}), kinds)
    ways = {(name, protocol) for sweep in data for name in sweep.shapes for protocol in usable(name, "auto", every)}
    names = {own for name, protocol in ways for own in (protocol, priced_as(name, protocol, every))}

    def residuals(x: Array) -> Array:
        profile = profile_of(dict(zip(free, np.exp(x).tolist(), strict=True)))
        rate = tariffs(_only(profile, names), kinds, names)
        solution = [np.log(predicted(sweep, rate) / sweep.seconds) / len(sweep.size) ** 0.5 for sweep in data]
        return np.concatenate([*solution, PRIOR * (x - start)])

    random = np.random.default_rng(0)
    best: Any = None
    since = 0
    for number in range(starts):
        at = np.clip(start + (number > 0) * random.normal(0, 0.5, len(start)), low + 1e-6, high - 1e-6)
        solution = least_squares(residuals, at, bounds=(low, high), loss="soft_l1", f_scale=WORTH / 4, max_nfev=60)
        since = since + 1 if best is not None and solution.cost > (1 - BETTER) * best.cost else 0
        best = solution if best is None or solution.cost < best.cost else best
        if since == PATIENCE:
            break
    return dict(zip(free, np.exp(best.x).tolist(), strict=True))


def _bounds(protocols: Sequence[str], kinds: Sequence[str]) -> Bounds:
    """Free numbers of `protocols` over links of `kinds`: a base each, and what a step over each kind of link costs."""
    free: Bounds = {}
    for protocol in protocols:
        free[f"{protocol}.base"] = BASE[protocol]
        free |= {f"{protocol}.widening": WIDENING} if protocol in ("ll", "p2p_ll") else {}
        free |= {f"{protocol}.copy": COPY} if protocol == "p2p" else {}
        free |= {f"{protocol}.chunk": COPYING} if protocol == "p2p" and "nvlink" in kinds else {}
        free |= {f"{protocol}.handover": HANDOVER} if protocol in IN_SWITCH else {}
        free |= {f"{protocol}.{kind}.{name}": bound for kind in kinds for name, bound in STEP[protocol].items()}
    return free


def inside(profile: Profile, kinds: Sequence[str]) -> tuple[Bounds, Free]:
    """Free numbers of the three protocols over links of `kinds` inside a node, and the profile that they make."""
    free: Bounds = {"copy": COPY} | _bounds(PROTOCOLS, kinds)
    known = {name: transport.links for name, transport in profile.protocols.items()} | {SIMPLE: profile.links}

    def profile_of(values: Mapping[str, float]) -> Profile:
        parts = {}
        for protocol in PROTOCOLS:
            most = {kind: 1.0 if protocol == SIMPLE else values[f"{SIMPLE}.{kind}.efficiency"] for kind in kinds}
            links = dict(known.get(protocol, {})) | {kind: _link(values, f"{protocol}.{kind}", most[kind]) for kind in kinds}
            parts[protocol] = _transport(values, protocol, links)
        simple = parts.pop(SIMPLE)
        own = {name: transport for name, transport in profile.protocols.items() if name not in PROTOCOLS}
        update = {"links": simple.links, "collective_launch": simple.base, "protocols": parts | own, "copy_rate": values["copy"]}
        return profile.model_copy(update=update)

    return free, profile_of


def kernel(profile: Profile, protocols: Sequence[str], kinds: Sequence[str]) -> tuple[Bounds, Free]:
    """Free numbers of a kernel's own protocols inside a node, and the profile that they make."""
    free = _bounds(protocols, kinds)

    def profile_of(values: Mapping[str, float]) -> Profile:
        parts = {}
        for protocol in protocols:
            links = {kind: _link(values, f"{protocol}.{kind}") for kind in kinds}
            parts[protocol] = _transport(values, protocol, links)
        return profile.model_copy(update={"protocols": profile.protocols | parts})

    return free, profile_of


def in_switch(profile: Profile, kinds: Sequence[str]) -> tuple[Bounds, Free]:
    """Free numbers of all-reduces in the switch where nothing else was measured, and the profile that they make.

    Small ones run by rings and trees, whose steps a few sizes cannot tell apart: these stay as they were, and only the launch,
    the same code for all three protocols, is this machine's: it moves all their bases alike.
    """
    bounds, switched_of = kernel(profile, IN_SWITCH, kinds)
    first = min(profile.collective_launch, *(profile.protocols[name].base for name in PROTOCOLS if name in profile.protocols))

    def profile_of(values: Mapping[str, float]) -> Profile:
        made, later = switched_of(values), values["launch"] - first
        moved = {
            name: transport.model_copy(update={"base": transport.base + later, "kernel": min(transport.kernel, transport.base)})
            for name, transport in made.protocols.items()
            if name in PROTOCOLS
        }
        update = {"protocols": made.protocols | moved, "collective_launch": made.collective_launch + later}
        return made.model_copy(update=update)

    return {"launch": (first, *LAUNCH)} | bounds, profile_of


def network(profile: Profile, rings: bool, *, efficiency: bool = False) -> tuple[Bounds, Free]:
    """Free numbers of the network between nodes, and the profile that they make; nodes inside are as they were.

    rings: the measurements are of rings, which fill the NICs and have steps of their own. All-reduce of two nodes runs by trees
    that leave NICs half empty, and says nothing of the efficiency: it stays, unless it is asked for.
    """

    def profile_of(values: Mapping[str, float]) -> Profile:
        most = values.get("efficiency", profile.links["nic"].efficiency)
        steps = {
            name: LinkPrice.model_construct(
                efficiency=most * values.get(f"{name}.share", 1.0), latency=values[name], fill=values[f"{name}.fill"]
            )
            for name in PROTOCOLS
        }
        if rings:
            return with_steps(profile, {}, steps)
        return with_steps(profile, steps, profile.rings)

    free = {name: bound for name, bound in NIC.items() if rings or efficiency or name != "efficiency"}
    return free | ({f"{name}.fill": CUT for name in PROTOCOLS} if rings else {}), profile_of


def _transport(values: Mapping[str, float], protocol: str, links: dict[str, LinkPrice]) -> Transport:
    base, copy = values[f"{protocol}.base"], values.get(f"{protocol}.copy", inf)
    further: dict[str, Any] = {name: values.get(f"{protocol}.{name}", 0.0) for name in ("widening", "handover", "chunk")}
    return Transport.model_construct(base=base, links=links, copy_rate=copy, **further)


def _link(values: Mapping[str, float], prefix: str, most: float = 1.0) -> LinkPrice:
    efficiency, latency = values[f"{prefix}.efficiency"], values[f"{prefix}.latency"]
    fill, overlap = (values.get(f"{prefix}.{name}", 0.0) for name in ("fill", "overlap"))
    return LinkPrice.model_construct(efficiency=efficiency * most, latency=latency, fill=fill, overlap=min(overlap, latency))


def errors(rows: Sequence[Row], cluster: Cluster, profile: Profile) -> dict[str, Array]:
    """Relative errors of the profile's prices by series, sizes ascending."""
    result = {}
    names: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        names.setdefault(row.name, []).append(row)
    for name, chosen in names.items():  # a thread that launches on all GPUs in turn takes as long at least
        (sweep,) = series(chosen, cluster, profile)
        topology = placed(cluster, chosen[0].ranks, chosen[0].nodes).topology()
        launching = profile.launch * chosen[0].ranks if name in ONE_THREAD else 0.0
        result[name] = np.maximum(launching, predicted(sweep, tariffs(profile, topology.kinds))) / sweep.seconds - 1
    return result


def ranges(rows: Iterable[Row], cluster: Cluster) -> Ranges:
    """What was measured, as a profile says it: ranks and bytes in a node, bytes of each series between nodes, rates of links."""
    values: dict[str, set[float]] = {}
    for row in rows:
        series_of = f"{row.operation} {row.ranks} on {row.nodes} nodes" if row.nodes > 1 else "bytes"
        values.setdefault(series_of, set()).add(row.bytes)
        if row.nodes == 1:
            values.setdefault("ranks", set()).add(row.ranks)
        place = cluster.model_copy(update={"nodes": row.nodes})
        for kind, rate in link_rates(place.topology(), Grid.of(dp=row.ranks), Traffic("", ("dp",), ())).items():
            values.setdefault(kind, set()).add(rate)
    return {what: (float(min(each)), float(max(each))) for what, each in values.items()}


def summary(error: Array) -> tuple[float, float]:
    """(median, 90th percentile) of absolute errors."""
    return float(np.median(np.abs(error))), float(np.quantile(np.abs(error), 0.9))
