"""Equivalent links are merged: a handful of links is left, however many GPUs there are.

Links with equal capacity that carry the same demands behave the same whatever happens; they are one link, with its number. Where
traffic meets, the links of one kind that the same traffic uses are one, too (`_shared`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids
from sim.grid import Grid
from sim.pricing.transfers.link_classes import Laid, fingerprints, link_classes
from sim.pricing.transfers.path_latency import Floats
from sim.pricing.transfers.protocols import Shape
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.translation import original
from sim.pricing.transfers.wiring import stretches
from topologies.links.impaired import varying
from topologies.links.topology import Topology

K = TypeVar("K", bound=Hashable)


class Demand(NamedTuple):
    """A stretch on merged links: `flows[l]` flows of `share`·S bytes each cross link l; `meets` is the same on shared links."""

    share: float
    flows: tuple[tuple[int, float], ...]
    steps: tuple[float, ...]
    wire: float
    meets: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Wiring:
    """Merged links and every traffic's demand on them."""

    capacity: tuple[float, ...]  # nominal bytes per second of each merged link
    kind: tuple[str, ...]
    example: tuple[int, ...]  # one raw link of each merged link
    multiple: tuple[int, ...]  # how many raw links it stands for
    shared_capacity: tuple[float, ...]  # of the links on which traffic meets: see `_shared`
    shared_kind: tuple[str, ...]
    twin: tuple[int, ...]  # shared links with equal numbers carry the same demands and differ in capacity only
    demands: dict[Any, tuple[Demand, ...]]  # by traffic
    kinds: tuple[str, ...]
    varying: tuple[int, ...] = ()  # of the links on which traffic meets: see `ImpairedTopology.varying`
    shapes: dict[Traffic, Shape] = field(default_factory=dict)  # what prices need of each demand, once asked for


@lru_cache(maxsize=1024)
def wire(topology: Topology, grid: Grid, traffics: tuple[Traffic, ...]) -> Wiring:
    """Lay all traffics over the topology and merge links that no demand tells apart."""
    parts = []
    for traffic in traffics:
        first, shift = original(topology, grid, traffic)
        parts += [(traffic, Laid(stretch, shift)) for stretch in stretches(topology, grid, first)]
    return _wired(topology, parts, traffics)


def wire_together(jobs: Sequence[tuple[Topology, Grid, tuple[Traffic, ...]]]) -> list[Wiring]:
    """Lay the traffics of several jobs over the links of one cluster: links that none of them tells apart are merged, and have
    one number for all. Each job's own demands on them.
    """
    keys = tuple((number, traffic) for number, (_, _, traffics) in enumerate(jobs) for traffic in traffics)
    parts = [(key, Laid(stretch)) for key in keys for stretch in stretches(*jobs[key[0]][:2], key[1])]
    whole = _wired(jobs[0][0], parts, keys)
    own = [{traffic: whole.demands[number, traffic] for traffic in traffics} for number, (_, _, traffics) in enumerate(jobs)]
    return [replace(whole, demands=demands, shapes={}) for demands in own]


def _wired(topology: Topology, parts: Sequence[tuple[K, Laid]], traffics: Sequence[K]) -> Wiring:
    links, count, crossings = link_classes(topology, [laid for _, laid in parts])
    capacity, kind, changing = topology.capacity(links), topology.kind(links), varying(topology, links)
    _, first, merged = np.unique(fingerprints(topology, links, crossings), return_index=True, return_inverse=True)
    multiple = np.bincount(merged, count, minlength=len(first)).astype(np.int64)
    flows = np.zeros((len(parts), len(first)))
    for number, crossing in enumerate(crossings):
        flows[number, merged[crossing.at][::-1]] = crossing.flows[::-1]  # of links that are merged, the first
    kinds, nominal, changing = kind[first], capacity[first], changing[first]
    order = {traffic: number for number, traffic in enumerate(traffics)}
    shared = _shared(flows, np.array([order[traffic] for traffic, _ in parts], dtype=np.int64), nominal, kinds, changing)
    demands: dict[Any, tuple[Demand, ...]] = dict.fromkeys(traffics, ())
    for number, (traffic, (stretch, _)) in enumerate(parts):
        steps = tuple(stretch.steps.tolist())
        last = Demand(stretch.share, _pairs(flows[number]), steps, stretch.wire, _pairs(shared.flows[number]))
        demands[traffic] = _joined(demands[traffic], last)
    names = topology.kinds
    return Wiring(
        capacity=tuple(nominal.tolist()),
        kind=tuple(names[k] for k in kinds),
        example=tuple(links[first].tolist()),
        multiple=tuple(multiple.tolist()),
        shared_capacity=tuple(shared.capacity.tolist()),
        shared_kind=tuple(names[k] for k in shared.kind),
        twin=tuple(_twins(shared)) if shared.flows.size else (),
        demands=demands,
        kinds=names,
        varying=tuple(shared.varying.tolist()),
    )


def _pairs(flows: Floats) -> tuple[tuple[int, float], ...]:
    links = np.flatnonzero(flows)
    return tuple(zip(links.tolist(), flows[links].tolist(), strict=True))


class _Shared(NamedTuple):
    """Links as far as traffic meets on them: capacity, kind and `ImpairedTopology.varying` (links,), flows (demands, links)."""

    capacity: Floats
    kind: Ids
    varying: Ids
    flows: Floats


def _twins(shared: _Shared) -> list[int]:
    """A number for each link that links with the same demands, which vary alike, share."""
    columns = np.concatenate([shared.flows, shared.varying[None]]) if shared.varying.any() else shared.flows
    return [int(number) for number in np.unique(columns, axis=1, return_inverse=True)[1].ravel()]


def _shared(flows: Floats, traffic: Ids, capacity: Floats, kind: Ids, varying: Ids) -> _Shared:
    """One link for all of a kind that the same traffic uses, with the most that each of them asks of any; none that cannot limit.

    Links of a symmetric job are alike and nothing changes. Where they are not (a tree loads inner members more than leaves), the
    members of a cohort move together, as fast as the most loaded of them.
    """
    used = np.zeros((int(traffic.max(initial=-1)) + 1, flows.shape[1]), dtype=bool)
    np.logical_or.at(used, traffic, flows > 0)
    sort = np.unique(np.stack([kind, varying]), axis=1, return_inverse=True)[1].ravel()
    _, first, group = np.unique(
        np.concatenate([sort[None].astype(np.uint8), np.packbits(used, axis=0)]), axis=1, return_index=True, return_inverse=True
    )
    count = len(first)
    least = np.full(count, np.inf)
    np.minimum.at(least, group, capacity)
    seconds = np.zeros((len(flows), count))
    for link, column in enumerate(group):
        np.maximum(seconds[:, column], flows[:, link] / capacity[link], out=seconds[:, column])
    kept = np.flatnonzero(_limits(seconds, sort[first]))
    return _Shared(least[kept], kind[first][kept], varying[first][kept], np.round(seconds[:, kept] * least[kept], 9))


def _limits(seconds: Floats, kind: Ids) -> NDArray[np.bool_]:
    """Which links can limit a rate: a link on which no demand takes longer than on another link of its kind cannot."""
    result = np.ones(len(kind), dtype=bool)
    for number in set(kind.tolist()):  # np.unique would import numpy.ma, which takes longer than all of this
        links = np.flatnonzero(kind == number)
        links = links[np.argsort(-seconds[:, links].sum(axis=0), kind="stable")]
        kept, count = np.empty((len(seconds), len(links))), 0
        for link in links:
            asking = np.flatnonzero(seconds[:, link])  # every link takes no less of those that ask nothing of this one
            result[link] = not (seconds[asking, link, None] <= kept[asking, :count]).all(axis=0).any()
            if result[link]:
                kept[:, count] = seconds[:, link]
                count += 1
    return result


def _joined(demands: tuple[Demand, ...], last: Demand) -> tuple[Demand, ...]:
    """`demands` and after them `last`, which is one with the demand before it when it asks the same links for as many flows."""
    if not demands or demands[-1].flows != last.flows:
        return (*demands, last)
    before = demands[-1]
    steps = tuple(a + b for a, b in zip(before.steps, last.steps, strict=True))
    return (*demands[:-1], last._replace(share=before.share + last.share, steps=steps, wire=before.wire + last.wire))
