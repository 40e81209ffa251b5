"""Some GPUs of a cluster as a topology: ranks are placed on them in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topologies.links.topology import Ids, Topology, Values, gpu_kind, is_hosted, is_multicast, node_kind


class PlacedTopology:
    """`topology` seen by a job whose rank r runs on GPU gpus[r]; its links are all links of the cluster."""

    def __init__(self, topology: Topology, gpus: Sequence[int]) -> None:
        self.whole = topology
        self._gpus = np.array(gpus, dtype=np.int64)
        self._key = tuple(self._gpus.tolist())

    def __hash__(self) -> int:
        return hash((self.whole, self._key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacedTopology) and (self.whole, self._key) == (other.whole, other._key)

    def __getattr__(self, name: str) -> Any:
        """What does not depend on where ranks are."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the job."""
        return len(self._gpus)

    @property
    def whole_gpus(self) -> tuple[int, ...]:
        """The GPU of each rank in the whole cluster."""
        return self._key

    @property
    def links(self) -> int:
        """Number of directed links of the whole cluster."""
        return self.whole.links

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of link."""
        return self.whole.kinds

    def kind(self, link: Ids) -> Ids:
        """Index into `kinds` for each link id."""
        return self.whole.kind(link)

    def capacity(self, link: Ids) -> Values:
        """Nominal bytes per second in the link's direction."""
        return self.whole.capacity(link)

    def latency(self, link: Ids) -> Values:
        """Seconds that a message spends on the link besides its transfer time."""
        return self.whole.latency(link)

    def name(self, link: int) -> str:
        """A readable name."""
        return self.whole.name(link)

    def node_of(self, gpu: Ids) -> Ids:
        """The node of each rank in the whole cluster."""
        return self.whole.node_of(self._gpus[np.asarray(gpu, dtype=np.int64)])

    def gpu_kind(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Unequal`."""
        return gpu_kind(self.whole, self._gpus[np.asarray(gpu, dtype=np.int64)])

    def node_kind(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Unequal`."""
        return node_kind(self.whole, self._gpus[np.asarray(gpu, dtype=np.int64)])

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """See `topologies.links.topology.Topology`."""
        return self.whole.routes(self._end(source), self._end(destination))

    def place(self, gpu: Ids, name: str) -> Ids:
        """See `topologies.links.topology.Hosted`."""
        if name == "gpu" or not is_hosted(self.whole):
            return np.asarray(gpu, dtype=np.int64)
        return self.whole.place(self._gpus[np.asarray(gpu, dtype=np.int64)], name) - self.whole.gpus + self.gpus

    def switch_of(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Multicast`."""
        if not is_multicast(self.whole):
            return np.full(np.shape(gpu), -1, dtype=np.int64)
        switch = self.whole.switch_of(self._gpus[np.asarray(gpu, dtype=np.int64)])
        return np.where(switch < 0, -1, switch - self.whole.gpus + self.gpus)

    def _end(self, end: Ids) -> Ids:
        """An end of the whole cluster: its GPUs come first, then switches, memories and disks."""
        end = np.asarray(end, dtype=np.int64)
        rank = end < self.gpus
        return np.where(rank, self._gpus[np.where(rank, end, 0)], end - self.gpus + self.whole.gpus)
