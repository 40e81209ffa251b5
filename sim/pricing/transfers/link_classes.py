"""Links that are crossed alike, told from each other without looking at every link of a cluster.

Traffics that are copies of each other load links that are copies of each other. So links are sorted by what crosses them in one
frame of the cluster (`topologies.links.frames`), for all the patterns that any frame has, and each frame only says which of the
patterns it has, and whose. Without copies the whole cluster is one frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids
from sim.pricing.transfers.path_latency import Floats
from sim.pricing.transfers.translation import is_periodic, rotation_of
from sim.pricing.transfers.wiring import Stretch
from topologies.links.frames import Frames
from topologies.links.impaired import varying
from topologies.links.rotation import Rotation
from topologies.links.topology import Topology

_VARYING = np.uint64(0x9E3779B97F4A7C15)
FEW = 2  # frames of a stretch whose patterns are not compared
_ODD = 1_000_003  # numbers of flows are distinguished to one part of this


class Laid(NamedTuple):
    """A stretch on links that are shifted by so many GPUs, a multiple of the cluster's period."""

    stretch: Stretch
    shift: int = 0


class Crossing(NamedTuple):
    """Where the flows of a stretch are: numbers of classes, in order, and how many cross each link of them."""

    at: Ids
    flows: Floats


class LinkClasses(NamedTuple):
    """Classes of links that all stretches cross alike. example: the first link of each class, in order; size: its links."""

    example: Ids
    size: Ids
    crossings: list[Crossing]  # of each stretch


def link_classes(topology: Topology, laid: Sequence[Laid]) -> LinkClasses:
    """The links that `laid` cross; links of one class may be in one frame only, so that classes may be alike."""
    laid, turned = _turned(topology, laid)
    frames, size = _frames(topology, laid)
    patterns = _Patterns(topology, frames, turned)
    has = [[(frame + shift // size, pattern) for frame, pattern in patterns.of(stretch)] for stretch, shift in laid]
    first, count, flows = patterns.classes()
    used = np.zeros((1 + max((frame for each in has for frame, _ in each), default=0), len(first)), dtype=bool)
    for frame, pattern in {pair for each in has for pair in each}:
        used[frame] |= flows[pattern] > 0
    where, sort = np.nonzero(used)
    example = frames.link(where, first[sort])
    order = np.argsort(example)
    number = np.empty(used.shape, np.int64)
    number[where[order], sort[order]] = np.arange(len(order))
    return LinkClasses(example[order], count[sort[order]], [_crossing(each, number, flows) for each in has])


def _crossing(has: list[tuple[int, int]], number: Ids, flows: Floats) -> Crossing:
    where = [np.flatnonzero(flows[pattern]) for _, pattern in has]
    at = np.concatenate([number[frame, each] for (frame, _), each in zip(has, where, strict=True)] or [np.empty(0, np.int64)])
    carried = np.concatenate([flows[pattern, each] for (_, pattern), each in zip(has, where, strict=True)] or [np.empty(0)])
    order = np.argsort(at)
    return Crossing(at[order], carried[order])


def _turned(topology: Topology, laid: Sequence[Laid]) -> tuple[Sequence[Laid], Rotation | None]:
    """All stretches on links that stand for their orbits, and the rotation; where not all are the same turned, on all links."""
    rotation = rotation_of(topology)
    if rotation is None or not any(stretch.turned for stretch, _ in laid):
        return laid, None
    known: dict[int, Stretch] = {}
    alike = all(stretch.turned or rotation.is_invariant(stretch.links, stretch.flows) for stretch, _ in laid)
    for stretch, _ in laid:
        if id(stretch) not in known:
            known[id(stretch)] = _standing(rotation, stretch) if alike else _expanded(rotation, stretch)
    return [Laid(known[id(stretch)], shift) for stretch, shift in laid], rotation if alike else None


def _standing(rotation: Rotation, stretch: Stretch) -> Stretch:
    stands = rotation.stands(stretch.links)
    return replace(stretch, links=stretch.links[stands], flows=stretch.flows[stands])


def _expanded(rotation: Rotation, stretch: Stretch) -> Stretch:
    if not stretch.turned:
        return stretch
    links, flows = rotation.expanded(stretch.links, stretch.flows)
    return replace(stretch, links=links, flows=flows, turned=False)


def _frames(topology: Topology, laid: Sequence[Laid]) -> tuple[Frames, int]:
    """Frames as large as the shifts allow, and how many GPUs are in each."""
    size = gcd(*(shift for _, shift in laid))
    if not is_periodic(topology) or not size:
        return Frames([0, topology.links], [topology.links]), 1
    return topology.frames(size // topology.gpus_per_node), size


class _Patterns:
    """What crosses the links of a frame: each pattern has places of links, and the flows on each."""

    def __init__(self, topology: Topology, frames: Frames, turned: Rotation | None) -> None:
        self.topology, self.frames, self.turned = topology, frames, turned
        self.places: list[Ids] = []
        self.flows: list[Floats] = []
        self._known: dict[bytes, int] = {}
        self._of: dict[int, list[tuple[int, int]]] = {}

    def of(self, stretch: Stretch) -> list[tuple[int, int]]:
        """The frames that a stretch is on without a shift, and its pattern in each."""
        known = self._of.get(id(stretch))
        if known is None:
            known = self._of[id(stretch)] = list(self._split(stretch))
        return known

    def _split(self, stretch: Stretch) -> Iterator[tuple[int, int]]:
        links, flows = stretch.links, stretch.flows
        if self.frames.single or not len(links):
            yield 0, self._add(links, flows)
            return
        frame, place = self.frames.split(links)
        order = np.argsort(frame, kind="stable")
        every, first = np.unique(frame[order], return_index=True)
        for each, there in zip(every.tolist(), np.split(order, first[1:]), strict=True):
            content = self._content(place[there], flows[there]) if len(every) > FEW else b""
            number = self._known.get(content)
            if number is None:
                number = self._add(place[there], flows[there])
                if content:
                    self._known[content] = number
            yield each, number

    @staticmethod
    def _content(places: Ids, flows: Floats) -> bytes:
        content = blake2b(places.tobytes())
        content.update(flows.tobytes())
        return content.digest()

    def _add(self, places: Ids, flows: Floats) -> int:
        self.places.append(places)
        self.flows.append(flows)
        return len(self.places) - 1

    def classes(self) -> tuple[Ids, Ids, Floats]:
        """Links of a frame by what crosses them: the first place of each class, its links, and the flows of each pattern on it,
        shape (patterns, classes).
        """
        crossed = np.zeros(self.frames.size, dtype=bool)
        for places in self.places:
            crossed[places] = True
        touched = np.flatnonzero(crossed)
        at = _positions(crossed, touched, self.places)
        links = self.frames.link(np.zeros_like(touched), touched)
        mark = fingerprints(self.topology, links, list(zip(at, self.flows, strict=True)))
        _, first, sort, count = np.unique(mark, return_index=True, return_inverse=True, return_counts=True)
        if self.turned:
            count = np.bincount(sort, self.turned.sizes(links)).astype(np.int64)
        flows = np.zeros((len(self.places), len(first)))
        for number, carried in enumerate(self.flows):
            flows[number, sort[at[number]][::-1]] = carried[::-1]  # of links that are merged, the first
        return touched[first], count, flows


def fingerprints(topology: Topology, links: Ids, crossings: Sequence[tuple[Ids, Floats]]) -> NDArray[np.uint64]:
    """A number for each of `links` that only links of equal kind and capacity, which vary alike, with equal flows share.

    A random number per demand makes the sum over a link's demands its fingerprint; 64 bits over some 10⁵ links never meet.
    """
    random = np.random.default_rng(0).integers(1, 2**63, size=len(crossings) + 2, dtype=np.uint64)
    load = np.zeros(len(links), np.uint64)
    for number, (at, flows) in enumerate(crossings):
        load[at] += np.rint(flows * _ODD).astype(np.uint64) * random[number]
    mark = load + topology.capacity(links).view(np.uint64) * random[-1] + topology.kind(links).astype(np.uint64) * random[-2]
    return np.asarray(mark + varying(topology, links).astype(np.uint64) * _VARYING)


def _positions(crossed: NDArray[np.bool_], touched: Ids, several: Sequence[Ids]) -> list[Ids]:
    """Where links are among those that are touched."""
    if sum(map(len, several)) * 8 < len(crossed):
        return [np.searchsorted(touched, links) for links in several]
    place = np.cumsum(crossed, dtype=np.int64) - 1
    return [place[links] for links in several]
