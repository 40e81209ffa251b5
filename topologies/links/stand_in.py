"""A topology that stands for another one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from topologies.links.topology import Ids, Topology, Values


class StandIn:
    """`base` as it is, but for what a subclass says otherwise; key: what tells stand-ins of one class for one base apart."""

    def __init__(self, base: Topology, key: Hashable) -> None:
        self.base, self.key = base, key

    def __hash__(self) -> int:
        return hash((self.base, self.key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and type(self) is type(other) and (self.base, self.key) == (other.base, other.key)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the base's."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.base.gpus

    @property
    def links(self) -> int:
        """Number of directed links."""
        return self.base.links

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of link."""
        return self.base.kinds

    def node_of(self, gpu: Ids) -> Ids:
        """The node of each GPU."""
        return self.base.node_of(gpu)

    def kind(self, link: Ids) -> Ids:
        """Index into `kinds` for each link id."""
        return self.base.kind(link)

    def name(self, link: int) -> str:
        """A readable name."""
        return self.base.name(link)

    def routes(self, source: Ids, destination: Ids) -> Ids:
        """See `topologies.links.topology.Topology`."""
        return self.base.routes(source, destination)

    def capacity(self, link: Ids) -> Values:
        """Bytes per second in the link's direction."""
        return self.base.capacity(link)

    def latency(self, link: Ids) -> Values:
        """Seconds that a message spends on the link besides its transfer time."""
        return self.base.latency(link)
