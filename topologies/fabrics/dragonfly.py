"""Dragonfly: groups of routers, all routers of a group linked to each other, every two groups linked by global links.

Kim, Dally, Scott and Abts 2008 (doi:10.1109/ISCA.2008.19): p terminals, a − 1 local and h global links per router allow a·h + 1
groups and a·p·(a·h + 1) terminals; balanced when a = 2p = 2h. Example: p = h = 2, a = 4 are 9 groups of 8 and 72 terminals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from topologies.documents.units import BytesPerSecond
from topologies.fabric import Backbone, End, Fabric, LinkRange, fabrics, pack
from topologies.links.topology import Ids
from topologies.node import Node


@fabrics("dragonfly")
class Dragonfly(Fabric):
    """All NICs of `router_nodes` nodes hang on one router.

    Global port k of a group, counted over its routers, leads to the k-th next group: the relative arrangement of Hastings et al.
    2015 (doi:10.1109/CLUSTER.2015.57). With fewer groups than there could be, it starts again and pairs have parallel links.
    """

    router_nodes: int = Field(ge=1, le=2**20)  # nodes of a router
    routers: int = Field(ge=2, le=4096)  # of a group
    global_links: int = Field(ge=1, le=4096)  # of a router
    link: BytesPerSecond = Field(gt=0)  # between two routers of a group
    global_link: BytesPerSecond = Field(gt=0)  # one global link
    adaptive: bool = False  # traffic takes other routers where the shortest way is busy, as Slingshot's switches have it

    def backbone(self, node: Node, nodes: int) -> Backbone:
        """Links of a fabric of enough groups for so many nodes."""
        a, h = self.routers, self.global_links
        groups = -(-nodes // (self.router_nodes * a))
        if groups > a * h + 1:
            reach = f"fabric.global_links={h} on routers={a} reach {a * h} other groups"
            raise ValueError(f"{reach}, but nodes={nodes} at router_nodes={self.router_nodes} make {groups} groups")
        if nodes <= self.router_nodes:
            return Backbone((), lambda start, end: np.full((len(start.node), 0), -1, dtype=np.int64))
        return self._spread(groups) if self.adaptive else self._minimal(groups)

    def _spread(self, groups: int) -> Backbone:
        """Adaptive routing (De Sensi et al. 2020, arXiv:2008.08886, section II-D): packets take other routers and groups on their
        way where the shortest is busy. So all local links out of a router are one, and all into it, as are all global links out
        of a group and into it. Where all routers send to one other each, ways are twice as long, and half of that can be had;
        that is left out.
        """
        a, h = self.routers, self.global_links
        routers, hop = groups * a, self.hop_latency

        def routes(start: End, end: End) -> Ids:
            first, last = start.node // self.router_nodes, end.node // self.router_nodes
            here, there = first // a, last // a
            leave, arrive = (np.where(first == last, -1, way) for way in (first, routers + last))
            across = [np.where(here == there, -1, 2 * routers + way) for way in (here, groups + there)]
            return pack(np.stack((leave, *across, arrive), axis=1))

        def router(way: str) -> Callable[[int], str]:
            return lambda number: f"group {number // a} router {number % a} {way}"

        def group(way: str) -> Callable[[int], str]:
            return lambda number: f"group {number} global {way}"

        beyond, local, wide = groups if groups > 1 else 0, (a - 1) * self.link, a * h * self.global_link
        ranges = (
            LinkRange("spine", routers, local, hop / 2, router("out")),
            LinkRange("spine", routers, local, hop / 2, router("in")),
            LinkRange("spine", beyond, wide, hop, group("out")),
            LinkRange("spine", beyond, wide, hop, group("in")),
        )
        return Backbone(ranges, routes)

    def _minimal(self, groups: int) -> Backbone:
        """Minimal routing: to the router with a link to the other group, across, and to the router of the receiver.

        Parallel links between two groups are taken in turns, by the numbers of the two nodes and rails.
        """
        a, h = self.routers, self.global_links
        local = groups * a * (a - 1)

        def routes(start: End, end: End) -> Ids:
            first, last = start.node // self.router_nodes, end.node // self.router_nodes
            here, there = first // a, last // a
            apart = here != there
            if not apart.any():
                return pack(_inside(first, last, a)[:, None])
            number = start.node + end.node + start.rail + end.rail
            turn = number % (a * h // (groups - 1)) * (groups - 1)
            out, into = (there - here) % groups - 1 + turn, (here - there) % groups - 1 + turn  # the two ends of one cable
            leave, arrive = here * a + out // h, there * a + into // h
            across = np.where(apart, local + leave * h + out % h, -1)
            before = _inside(first, np.where(apart, leave, last), a)
            return pack(np.stack((before, across, np.where(apart, _inside(arrive, last, a), -1)), axis=1))

        def between_routers(link: int) -> str:
            router, other = divmod(link, a - 1)
            return f"group {router // a} router {router % a} to {other + (other >= router % a)}"

        def between_groups(link: int) -> str:
            router, port = divmod(link, h)
            to = (router // a + (router % a * h + port) % (groups - 1) + 1) % groups
            return f"group {router // a} router {router % a} global {port} to group {to}"

        ranges = (
            LinkRange("spine", local, self.link, self.hop_latency, between_routers),
            LinkRange("spine", groups * a * h if groups > 1 else 0, self.global_link, self.hop_latency, between_groups),
        )
        return Backbone(ranges, routes)


def _inside(source: Ids, destination: Ids, routers: int) -> Ids:
    """The link between two routers of a group, −1 when they are one and the same."""
    to = destination % routers
    return np.where(source == destination, -1, source * (routers - 1) + to - (to > source % routers))
