"""Fits the formula of `sim/pricing/transfers/protocols.py` to measured collectives of any machine, of its own or from logs.

NCCL has three protocols inside a node, a kernel of its own in the switch and for point-to-point operations, and a network; gloo
hands over data in one way. What was not measured keeps the prices of the profile that the fit starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from calibration.fit.machine.tables import Point
from calibration.fit.published_collectives.fit import (
    Bounds,
    Free,
    in_switch,
    inside,
    kernel,
    network,
    predicted,
    search,
    series,
    tariffs,
)
from calibration.fit.published_collectives.rows import Row, alternate
from sim.analysis.collective_sweep import transport
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.protocols import IN_SWITCH, P2P, SENDS, SWITCHED, LinkPrice
from topologies.cluster import Cluster
from topologies.reading import UserError

RINGS = ("all_reduce", "all_gather", "reduce_scatter")
PAIRS = ("all_to_all", "send")
LEAST = 4  # rows of a fit
STARTS = 8  # of each search
PLAIN = {"base": (1e-4, 1e-7, 3e-2), "efficiency": (0.5, 0.005, 1.0), "latency": (1e-4, 1e-7, 3e-2), "fill": (1e-6, 1e-9, 1e-2)}


def kinds_inside(cluster: Cluster) -> tuple[str, ...]:
    """Kinds of link between the GPUs of a node."""
    used = {link.kind for link in cluster.node.board().links}
    return next(kinds for kinds in (("loopback",), ("nvlink",), ("pcie", "host")) if set(kinds) & used or kinds[0] == "pcie")


def transports(rows: Sequence[Row], profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """Kinds of links that the measured collectives took."""
    prices, kinds = Prices(profile, cluster.node.gpu), set[str]()
    for operation, ranks, nodes in {(row.operation, row.ranks, row.nodes) for row in rows if row.operation in RINGS}:
        kinds |= transport(cluster.model_copy(update={"nodes": nodes}).topology(), prices, operation, ranks)[1].keys()
    return tuple(sorted(kinds))


def plain(profile: Profile, kind: str) -> Free:
    """The profile that the numbers of PLAIN make: one way to hand over data, over one kind of link."""

    def profile_of(values: Mapping[str, float]) -> Profile:
        price = LinkPrice.model_construct(efficiency=values["efficiency"], latency=values["latency"], fill=values["fill"])
        return profile.model_copy(update={"links": dict(profile.links) | {kind: price}, "collective_launch": values["base"]})

    return profile_of


def fit_links(rows: Sequence[Row], profile: Profile, cluster: Cluster) -> tuple[Profile, list[Point]]:
    """`profile` with prices fitted to half of the sizes in `rows`, and all rows as points. Raises UserError for too few rows."""
    priced = [row for row in rows if row.operation in (*RINGS, *PAIRS)]
    most = max((row.ranks // row.nodes for row in priced), default=0)
    if most > cluster.node.gpus:
        raise UserError(f"cluster {cluster.name}: has {cluster.node.gpus} GPUs in a node, measured were {most}")
    fitted, _ = alternate(priced)
    gloo = kinds_inside(cluster) == ("loopback",)
    steps = list(_gloo(fitted) if gloo else _nccl(fitted, profile, cluster))
    if not steps:
        what = ", ".join((*RINGS, *PAIRS))
        raise UserError(
            f"{len(priced)} measured sizes of {what}: too few for a fit: {LEAST} of one sort must be left when half is kept out"
        )
    for step in steps:
        values = search(
            step.free, step.profile_of(profile), series(step.rows, cluster, profile), cluster.topology().kinds, STARTS
        )
        profile = step.profile_of(profile)(values)
    return profile, _points(priced, fitted, profile, cluster)


class _Step(NamedTuple):
    """Rows that determine some free numbers; profile_of: the way from numbers to a profile, given the profile so far."""

    rows: list[Row]
    free: Bounds
    profile_of: Callable[[Profile], Free]


def _gloo(rows: Sequence[Row]) -> Iterator[_Step]:
    for kind, chosen in (("loopback", [row for row in rows if row.nodes == 1]), ("nic", [row for row in rows if row.nodes > 1])):
        if len(chosen) >= LEAST:
            yield _Step(chosen, dict(PLAIN), partial(plain, kind=kind))


def _nccl(rows: Sequence[Row], profile: Profile, cluster: Cluster) -> Iterator[_Step]:
    kinds = kinds_inside(cluster)
    node = [row for row in rows if row.nodes == 1]
    switched = [row for row in node if row.operation == "all_reduce" and row.ranks >= SWITCHED and cluster.node.gpu.multicast]
    rings = [row for row in node if row.operation in RINGS and row not in switched]
    pairs, sends = ([row for row in node if row.operation == name] for name in PAIRS)
    across = [row for row in rows if row.nodes > 1 and row.operation in RINGS]
    if len(rings) >= LEAST:
        yield _Step(rings, inside(profile, kinds)[0], lambda now: inside(now, kinds)[1])
    if len(switched) >= LEAST and len(rings) >= LEAST:
        yield _Step(switched, kernel(profile, IN_SWITCH, kinds)[0], lambda now: kernel(now, IN_SWITCH, kinds)[1])
    elif len(switched) >= LEAST:
        yield _Step(switched, in_switch(profile, kinds)[0], lambda now: in_switch(now, kinds)[1])
    if len(pairs) >= LEAST:
        yield _Step(pairs, kernel(profile, P2P, kinds)[0], lambda now: kernel(now, P2P, kinds)[1])
    if len(sends) >= LEAST:
        yield _Step(sends, kernel(profile, SENDS, kinds)[0], lambda now: kernel(now, SENDS, kinds)[1])
    if len(across) >= LEAST:
        full = any(row.operation != "all_reduce" for row in across)
        yield _Step(across, network(profile, full)[0], lambda now: network(now, full)[1])


def _points(rows: Sequence[Row], fitted: Sequence[Row], profile: Profile, cluster: Cluster) -> list[Point]:
    result, used = [], set(fitted)
    for key, chosen in _by_series(rows):
        (laid,) = series(chosen, cluster, profile)
        where = key[0] + f" {key[1]}" + (f" on {key[2]} nodes" if key[2] > 1 else "")
        rate = tariffs(profile, cluster.topology().kinds)
        for row, price in zip(chosen, predicted(laid, rate).tolist(), strict=True):
            result.append(Point(where, row.bytes, row.seconds, price, row not in used))
    return result


def _by_series(rows: Sequence[Row]) -> list[tuple[tuple[str, int, int], list[Row]]]:
    by_series: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        by_series.setdefault((row.operation, row.ranks, row.nodes), []).append(row)
    return list(by_series.items())
