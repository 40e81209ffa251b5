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
from sim.pricing.transfers.loads import FramedLoad, Load, random_numbers
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
    frame, times, has = _distinct([patterns.of(stretch).shifted(shift // size) for stretch, shift in laid])
    first, count, flows = patterns.classes()
    used = np.zeros((len(frame), len(first)), dtype=bool)
    for at, pattern in {pair for each in has for pair in each}:
        used[at] |= flows[pattern] > 0
    where, sort = np.nonzero(used)
    example = frames.link(frame[where], first[sort])
    order = np.argsort(example)
    number = np.empty(used.shape, np.int64)
    number[where[order], sort[order]] = np.arange(len(order))
    size_of = (count[sort] * times[where])[order]
    return LinkClasses(example[order], size_of, [_crossing(each, number, flows) for each in has])


class _Has(NamedTuple):
    """Frames that a stretch is on, and the number of its pattern in each."""

    frame: Ids
    pattern: Ids

    def shifted(self, frames: int) -> _Has:
        """The same, so many frames on."""
        return _Has(self.frame + frames, self.pattern)


def _distinct(has: Sequence[_Has]) -> tuple[Ids, Ids, list[list[tuple[int, int]]]]:
    """Of frames in which all stretches have the same patterns the first one, in order; how many they are; for each stretch which
    of these frames it is on, by their numbers, and its pattern there.
    """
    frames = 1 + max((int(frame.max(initial=0)) for frame, _ in has), default=0)
    patterns = 1 + max((int(pattern.max(initial=0)) for _, pattern in has), default=0)
    mark = np.zeros(frames, np.uint64)
    for (frame, pattern), random in zip(has, random_numbers((len(has), patterns)), strict=True):
        mark[frame] += random[pattern]
    _, first, times = np.unique(mark, return_index=True, return_counts=True)
    order = np.argsort(first)
    number = np.full(frames, -1)
    number[first[order]] = np.arange(len(order))
    kept = [(number[frame], pattern) for frame, pattern in has]
    pairs = [list(zip(at[at >= 0].tolist(), pattern[at >= 0].tolist(), strict=True)) for at, pattern in kept]
    return first[order], times[order], pairs


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
    if stretch.turned:
        return stretch
    stands = rotation.stands(stretch.links)
    return replace(stretch, load=Load(stretch.links[stands], stretch.flows[stands]))


def _expanded(rotation: Rotation, stretch: Stretch) -> Stretch:
    if not stretch.turned:
        return stretch
    return replace(stretch, load=Load(*rotation.expanded(stretch.links, stretch.flows)), turned=False)


def _frames(topology: Topology, laid: Sequence[Laid]) -> tuple[Frames, int]:
    """Frames as large as the shifts allow, and how many GPUs are in each; without shifts those of loads that have frames."""
    size = gcd(*(shift for _, shift in laid))
    if is_periodic(topology) and not size and any(isinstance(stretch.load, FramedLoad) for stretch, _ in laid):
        size = topology.period or 0
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
        self._of: dict[int, _Has] = {}

    def of(self, stretch: Stretch) -> _Has:
        """The frames that a stretch is on without a shift, and its pattern in each."""
        known = self._of.get(id(stretch))
        if known is None:
            known = self._of[id(stretch)] = self._has(stretch)
        return known

    def _has(self, stretch: Stretch) -> _Has:
        load = stretch.load
        if isinstance(load, FramedLoad) and load.frames.size == self.frames.size:
            numbers = np.array([self._add(places, flows) for places, flows in load.patterns], dtype=np.int64)
            return _Has(load.frame, numbers[load.pattern])
        pairs = np.array(list(self._split(stretch)), dtype=np.int64)
        return _Has(pairs[:, 0], pairs[:, 1])

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
    random = random_numbers(len(crossings) + 2)
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
