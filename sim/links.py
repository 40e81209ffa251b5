"""What every link carries in a step, and which is the hottest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.pricing import Priced
from sim.program import Block, Collective
from sim.timeline import Timeline
from sim.wiring import Traffic


@dataclass(frozen=True)
class LinkLoad:
    """Links that carry the same: `count` of them, of which `name` is one.

    capacity: nominal bytes per second; bytes: carried by each in the step; utilisation: of its capacity over the step.
    """

    name: str
    kind: str
    count: int
    capacity: float
    bytes: float
    utilisation: float


def link_loads(timeline: Timeline) -> list[LinkLoad]:
    """Every link that carries anything, the hottest first."""
    wiring, topology, step = timeline.pricing.wiring, timeline.pricing.topology, timeline.step
    carried = [0.0] * len(wiring.capacity)
    for traffic, size in _transfers(timeline):
        for demand in wiring.demands[traffic]:
            for link, flows in demand.flows:
                carried[link] += size * demand.share * flows
    loads = [
        LinkLoad(topology.name(wiring.example[link]), wiring.kind[link], wiring.multiple[link], capacity, size,
                 size / (capacity * step) if step else 0.0)
        for link, (capacity, size) in enumerate(zip(wiring.capacity, carried, strict=True)) if size
    ]  # fmt: skip
    return sorted(loads, key=lambda load: (-load.utilisation, load.name))


def hottest(timeline: Timeline) -> tuple[LinkLoad, ...]:
    """The hottest link of each kind, the hottest kind first."""
    first: dict[str, LinkLoad] = {}
    for load in link_loads(timeline):
        first.setdefault(load.kind, load)
    return tuple(first.values())


def _transfers(timeline: Timeline) -> Iterator[tuple[Traffic, float]]:
    """(traffic, bytes of its buffers in the step); what several lanes do together is shared out between them."""
    for number, lane in enumerate(timeline.lanes):
        cohort = timeline.program.cohorts[lane.cohort]
        share = lane.ranks / timeline.program.grid.groups((), cohort.at).size
        for op_number, op, times in timeline.distinct(number):
            work = op.work
            if isinstance(work, Block):
                for count, item in work.items():
                    if isinstance(item, Collective):
                        priced = timeline.pricing.collective(item, lane.cohort)
                        yield priced.traffic, times * count * item.repeat * item.bytes * share
                continue
            done = timeline.work[op_number]
            assert isinstance(done, Priced)
            repeat = work.repeat if isinstance(work, Collective) else 1
            yield done.traffic, times * repeat * work.bytes / _partners(timeline, done, work, cohort.at)


def _partners(timeline: Timeline, done: Priced, work: object, at: dict[str, int]) -> int:
    """How many lanes report the same transfer."""
    if not isinstance(work, Collective):
        return 1
    if work.cohorts:
        return 2
    return 1 if done.traffic.group < 0 and work.axis not in at else timeline.program.grid.size(work.axes)
