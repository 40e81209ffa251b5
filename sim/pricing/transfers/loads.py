"""How much of a phase crosses each link.

Transfers that are copies of each other, shifted by periods of the cluster, are of one kind: routes are looked up for one of each.
What they load is a pattern of links in each frame of the cluster (`topologies.links.frames`), and frames that have the same kinds
of transfers have the same pattern: neither routes nor loads grow with the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids, Phase
from sim.pricing.transfers.path_latency import Floats, Hops, hops_of, worst
from sim.pricing.transfers.translation import Copies, is_periodic
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.frames import Frames
from topologies.links.rotation import Rotation
from topologies.links.sums import distinct, summed
from topologies.links.topology import Topology


class Kinds(NamedTuple):
    """Transfers by kind. first: the first transfer of each kind; of: each transfer's kind; frame: of each transfer's sender."""

    first: Ids
    of: Ids
    frame: Ids


class Load(NamedTuple):
    """Flows that cross each of `links`."""

    links: Ids
    flows: Floats

    def divided(self, parts: float) -> Load:
        """Flows in so many parts."""
        return Load(self.links, self.flows / parts)


class Piece(NamedTuple):
    """The same load in several frames: what crosses the links at `places` of each."""

    frame: Ids
    places: Ids
    load: Floats


class FramedLoad:
    """Flows on the links of frames: frame[i] has pattern[i] of `patterns`, each of places and their flows."""

    def __init__(self, frames: Frames, frame: Ids, pattern: Ids, patterns: Sequence[tuple[Ids, Floats]]) -> None:
        self.frames, self.frame, self.pattern, self.patterns = frames, frame, pattern, patterns

    def pieces(self, factor: float = 1.0) -> list[Piece]:
        """All of it, times `factor`."""
        return [
            Piece(self.frame[self.pattern == number], places, flows * factor)
            for number, (places, flows) in enumerate(self.patterns)
        ]

    def divided(self, parts: float) -> FramedLoad:
        """Flows in so many parts."""
        return FramedLoad(self.frames, self.frame, self.pattern, [(places, flows / parts) for places, flows in self.patterns])

    @cached_property
    def _expanded(self) -> Load:
        parts = [(self.frames.link(piece.frame[:, None], piece.places), piece) for piece in self.pieces()]
        links = np.concatenate([np.empty(0, np.int64), *(links.ravel() for links, _ in parts)])
        flows = np.concatenate([np.empty(0), *(np.tile(piece.load, len(piece.frame)) for _, piece in parts)])
        order = np.argsort(links)
        return Load(links[order], flows[order])

    @property
    def links(self) -> Ids:
        """All links that are crossed, in order."""
        return self._expanded.links

    @property
    def flows(self) -> Floats:
        """Flows on each of `links`."""
        return self._expanded.flows


def on_links(
    topology: Topology, groups: Ids, phase: Phase, again: Copies, rotation: Rotation | None
) -> tuple[Load | FramedLoad, Hops]:
    """What a phase of `groups` and their copies loads, and the hops of each transfer of the slowest group."""
    source, destination = groups[:, phase.source].ravel(), groups[:, phase.destination].ravel()
    amounts = np.tile(phase.amounts, len(groups))
    alike = again.times == 1 and len(amounts) and (amounts == amounts[0]).all()
    if alike and is_periodic(topology) and (kinds := _kinds_of_transfers(topology, source, destination)):
        routes = topology.routes(source[kinds.first], destination[kinds.first])
        rows, of = hops_of(topology, routes)
        load = _framed(topology, kinds, routes, int(amounts[0]), rotation)
        return load, worst(Hops(rows, of[kinds.of]), len(groups))
    routes = topology.routes(source, destination)
    links, flows = again.load(topology, *_loads(routes, amounts, rotation))
    return Load(links, flows), worst(hops_of(topology, routes), len(groups))


def total(loads: Sequence[tuple[Load | FramedLoad, int]]) -> Load | FramedLoad:
    """All loads, each so many times."""
    by_frame = [(load, times) for load, times in loads if isinstance(load, FramedLoad)]
    if by_frame and len(by_frame) == len(loads):
        return _composed(by_frame[0][0].frames, [piece for load, times in by_frame for piece in load.pieces(times)])
    links, flows = [np.empty(0, np.int64)], [np.empty(0)]
    for load, times in loads:
        links.append(load.links)
        flows.append(load.flows * times)
    return Load(*summed(np.concatenate(links), np.concatenate(flows)))


def _loads(routes: Ids, carried: Ids, rotation: Rotation | None = None) -> tuple[Ids, Floats]:
    """(links, chunks that cross each): routes, shape (transfers, hops), are padded with −1; carried: chunks of each transfer;
    rotation: the links are those that stand for their orbits, which all turns of these transfers cross.
    """
    real = routes >= 0
    links = rotation.standing(routes[real]) if rotation else routes[real]
    if len(carried) and (carried == carried[0]).all():
        links, times = summed(links)
        links, load = (links, times * float(carried[0])) if carried[0] else (links[:0], times[:0])
    else:
        links, load = summed(links, np.broadcast_to(carried[:, None], routes.shape)[real].astype(float))
    return links, rotation.times(links, load) if rotation else load


def _kinds_of_transfers(topology: Topology, source: Ids, destination: Ids) -> Kinds | None:
    """Transfers that are shifted by periods are of one kind; None where there are few, or the cluster has no period."""
    if not is_periodic(topology) or not topology.period:
        return None
    if max(int(source.max()), int(destination.max())) >= topology.gpus + topology.nodes:
        return None  # ends in the fabric
    each = topology.gpus_per_node
    period, slots = topology.period // each, each + 1
    (node, local), (to, other) = _place(topology, source), _place(topology, destination)
    frame = node // period  # numpy divides by a number fast, by its divmod it does not
    below = node - frame * period
    distance = (to - node) * slots + other
    ways = distinct(distance)
    key = (below * slots + local) * len(ways) + np.searchsorted(ways, distance)
    number = np.zeros(period * slots * len(ways), np.int64)
    number[key[::-1]] = np.arange(len(key), 0, -1)  # the first transfer of each key, and one
    used = np.flatnonzero(number)
    first = number[used] - 1
    number[used] = np.arange(len(used))
    return Kinds(first, number[key], frame)


def _place(topology: ClusterTopology, ends: Ids) -> tuple[Ids, Ids]:
    """Node of each end, and its number there; that of the switch is last."""
    node = ends // topology.gpus_per_node
    local = ends - node * topology.gpus_per_node
    beyond = ends >= topology.gpus
    if beyond.any():
        node, local = np.where(beyond, ends - topology.gpus, node), np.where(beyond, topology.gpus_per_node, local)
    return node, local


def _framed(topology: ClusterTopology, kinds: Kinds, routes: Ids, chunks: int, rotation: Rotation | None) -> FramedLoad:
    """What transfers of these kinds load, of so many chunks each, whose first ones take `routes`.

    rotation: on links that stand for their orbits.
    """
    frames = topology.frames((topology.period or 0) // topology.gpus_per_node)
    content = _contents(kinds)
    kind, hop = np.nonzero(routes >= 0)
    links = routes[kind, hop]
    frame, place = frames.split(rotation.standing(links) if rotation else links)
    offset = frame - kinds.frame[kinds.first[kind]]
    pieces = []
    for frame_numbers, times in content:
        carried = times[kind] * float(chunks)
        for shift in distinct(offset[carried > 0]).tolist():
            here = (offset == shift) & (carried > 0)
            pieces.append(Piece(frame_numbers + shift, *summed(place[here], carried[here])))
    load = _composed(frames, pieces)
    if rotation:
        zero = np.zeros(1, np.int64)
        load.patterns = [(places, rotation.times(frames.link(zero, places), flows)) for places, flows in load.patterns]
    return load


def _contents(kinds: Kinds) -> list[tuple[Ids, Ids]]:
    """Frames that have the same transfers, and how many of each kind."""
    number = len(kinds.first)
    mark = np.zeros(int(kinds.frame.max()) + 1, np.uint64)
    np.add.at(mark, kinds.frame, random_numbers(number)[kinds.of])
    frame = np.flatnonzero(mark)
    _, first, same = np.unique(mark[frame], return_index=True, return_inverse=True)
    content = np.full(len(mark), -1)
    content[frame[first]] = np.arange(len(first))
    there = content[kinds.frame]
    chosen = there >= 0
    times = np.bincount(there[chosen] * number + kinds.of[chosen], minlength=len(first) * number).reshape(-1, number)
    return [(frame[same == each], times[each]) for each in range(len(first))]


def _composed(frames: Frames, pieces: Sequence[Piece]) -> FramedLoad:
    """Sum of the pieces in every frame."""
    if not pieces:
        return FramedLoad(frames, np.empty(0, np.int64), np.empty(0, np.int64), [])
    mark = np.zeros(max(int(piece.frame.max()) for piece in pieces) + 1, np.uint64)
    for piece, random in zip(pieces, random_numbers(len(pieces)), strict=True):
        mark[piece.frame] += random
    frame = np.flatnonzero(mark)
    _, first, pattern = np.unique(mark[frame], return_index=True, return_inverse=True)
    has = np.zeros((len(pieces), len(mark)), dtype=bool)
    for number, piece in enumerate(pieces):
        has[number, piece.frame] = True
    patterns = []
    for example in frame[first].tolist():
        parts = [piece for piece, there in zip(pieces, has[:, example], strict=True) if there]
        patterns.append(summed(np.concatenate([part.places for part in parts]), np.concatenate([part.load for part in parts])))
    return FramedLoad(frames, frame, pattern, patterns)


def random_numbers(shape: int | tuple[int, int]) -> NDArray[np.uint64]:
    """Random numbers: sums of different ones tell what they are the sums of, as 64 bits over some 10⁵ sums never meet."""
    return np.random.default_rng(0).integers(1, 2**63, size=shape, dtype=np.uint64)
