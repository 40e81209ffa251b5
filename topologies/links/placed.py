"""Some GPUs of a cluster as a topology: ranks are placed on them in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topologies.links.stand_in import StandIn
from topologies.links.topology import Ids, Topology, aggregation, gpu_kind, is_hosted, is_multicast, node_kind


class PlacedTopology(StandIn):
    """`topology` seen by a job whose rank r runs on GPU gpus[r]; its links are all links of the cluster."""

    def __init__(self, topology: Topology, gpus: Sequence[int]) -> None:
        self._gpus = np.array(gpus, dtype=np.int64)
        super().__init__(topology, tuple(self._gpus.tolist()))

    @property
    def whole(self) -> Topology:
        """The whole cluster."""
        return self.base

    @property
    def gpus(self) -> int:
        """Number of GPUs of the job."""
        return len(self._gpus)

    @property
    def whole_gpus(self) -> tuple[int, ...]:
        """The GPU of each rank in the whole cluster."""
        return tuple(self._gpus.tolist())

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

    def aggregators(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Aggregating`."""
        known = aggregation(self.whole)
        assert known is not None
        return known.aggregators(self._gpus[np.asarray(gpu, dtype=np.int64)]) - self.whole.gpus + self.gpus

    def nic_of(self, gpu: Ids) -> Ids:
        """See `topologies.links.topology.Aggregating`."""
        known = aggregation(self.whole)
        assert known is not None
        return known.nic_of(self._gpus[np.asarray(gpu, dtype=np.int64)])

    def _end(self, end: Ids) -> Ids:
        """An end of the whole cluster: its GPUs come first, then switches, memories and disks."""
        end = np.asarray(end, dtype=np.int64)
        rank = end < self.gpus
        return np.where(rank, self._gpus[np.where(rank, end, 0)], end - self.gpus + self.whole.gpus)
