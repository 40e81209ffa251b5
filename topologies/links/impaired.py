"""A cluster on which some links are not as they should be: slower, with more latency, varying, or lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topologies.fabric import pack
from topologies.links.stand_in import StandIn
from topologies.links.topology import Ids, Topology, Values


class LinkChange(NamedTuple):
    """What of a link differs. capacity: a factor; latency: seconds more; varying: the number of the effect that changes its
    capacity while a step runs, from 1 on.
    """

    link: int
    capacity: float = 1.0
    latency: float = 0.0
    varying: int = 0


class ImpairedTopology(StandIn):
    """`topology` with changed links, a `Topology` itself.

    detours: GPUs without a NIC of their own -> GPU of their node through which they send and receive between nodes, over NVLink,
    as NCCL's PXN does (NVIDIA developer blog, "Doubling all2all Performance with NCCL 2.12").
    """

    def __init__(self, topology: Topology, changes: Sequence[LinkChange], detours: Mapping[int, int]) -> None:
        super().__init__(topology, (tuple(sorted(changes)), tuple(sorted(detours.items()))))
        self._links = np.array(sorted({change.link for change in changes}), dtype=np.int64)
        self._factor, self._more = np.ones(len(self._links)), np.zeros(len(self._links))
        self._varying = np.zeros(len(self._links), dtype=np.int64)
        for change in changes:
            position = int(np.searchsorted(self._links, change.link))
            self._factor[position] *= change.capacity
            self._more[position] += change.latency
            self._varying[position] = self._varying[position] * 1009 + change.varying
        self._via = np.arange(topology.gpus)
        for gpu, other in detours.items():
            self._via[gpu] = other

    @property
    def nominal(self) -> Topology:
        """The topology as it should be."""
        return self.base

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """Links from source[e] to destination[e]: see `Topology.routes`."""
        source, destination = np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64)
        plain = self.nominal.routes(source, destination)
        gpus = self.gpus
        between = (source < gpus) & (destination < gpus)
        a, b = np.where(between, source, 0), np.where(between, destination, 0)
        between &= self.node_of(a) != self.node_of(b)
        around = np.flatnonzero(between & ((self._via[a] != a) | (self._via[b] != b)))
        if not len(around):
            return plain
        a, b = a[around], b[around]
        parts = [self.nominal.routes(*ends) for ends in ((a, self._via[a]), (self._via[a], self._via[b]), (self._via[b], b))]
        other = pack(np.concatenate(parts, axis=1))
        result = np.full((len(source), max(plain.shape[1], other.shape[1])), -1, dtype=np.int64)
        result[:, : plain.shape[1]] = plain
        result[around] = -1
        result[around, : other.shape[1]] = other
        return result

    def capacity(self, link: Ids) -> Values:
        """Bytes per second in the link's direction, when a step begins."""
        position, changed = self._position(link)
        return self.nominal.capacity(link) * np.where(changed, np.append(self._factor, 1.0)[position], 1.0)

    def latency(self, link: Ids) -> Values:
        """Seconds that a message spends on the link besides its transfer time."""
        position, changed = self._position(link)
        return self.nominal.latency(link) + np.where(changed, np.append(self._more, 0.0)[position], 0.0)

    def varying(self, link: Ids) -> Ids:
        """Links that change alike while a step runs have equal numbers; 0: it does not change."""
        position, changed = self._position(link)
        return np.where(changed, np.append(self._varying, 0)[position], 0)

    def _position(self, link: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """The place of each link among the changed ones, and whether it is there."""
        link = np.asarray(link, dtype=np.int64)
        position = np.searchsorted(self._links, link)
        return position, np.append(self._links, -2)[position] == link


def varying(topology: Topology, link: Ids) -> Ids:
    """See `ImpairedTopology.varying`; 0 for every link of other topologies."""
    return topology.varying(link) if isinstance(topology, ImpairedTopology) else np.zeros(np.shape(link), dtype=np.int64)


def nominal(topology: Topology) -> Topology:
    """The topology as it should be."""
    return topology.nominal if isinstance(topology, ImpairedTopology) else topology
