"""What the fullest ranks of each stage hold, and the fullest node outside of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.analysis.memory import peak
from sim.timeline import Timeline
from topologies.links.topology import is_hosted


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of one stage's ranks, in bytes; `kinds` is what is held at that moment."""

    stage: int
    rank: int
    kinds: dict[str, float]
    overhead: float  # context, communicators and the allocator's reserve
    peak: float  # everything that must fit
    time: float  # when, seconds into the step
    op: str  # during which op
    overheads: dict[str, float] = field(default_factory=dict)  # the parts of `overhead`
    cached: float = 0.0  # kept by the caching allocator besides, which gives it back before memory runs out
    capacity: float | None = None  # of its GPU, where GPUs differ

    @property
    def allocated(self) -> float:
        """Bytes of tensors: torch.cuda.max_memory_allocated."""
        return self.peak - self.overhead

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves: torch.cuda.max_memory_reserved."""
        return self.allocated + self.overheads.get("reserve", 0.0) + self.cached


@dataclass(frozen=True)
class NodeMemory:
    """Memory and disk of the fullest node outside of its GPUs: bytes held, and capacity."""

    node: int
    memory: float
    memory_capacity: float
    disk: float
    disk_capacity: float

    @property
    def fits(self) -> bool:
        """Whether both are within their capacity."""
        return self.memory <= self.memory_capacity and self.disk <= self.disk_capacity


def stage_memory(timeline: Timeline, lane: int) -> StageMemory:
    """Peak memory of a lane's rank."""
    held, prices = peak(timeline, lane), timeline.prices(lane)
    overhead, expandable = prices.profile.overhead, timeline.program.expandable
    every = {
        "context": overhead.context,
        "communicators": timeline.program.grid.communicators * overhead.communicator,
        "reserve": 0.0 if expandable else overhead.reserve * held.bytes,
    }
    extra = sum(every.values())
    time = held.time
    if timeline.period and time >= timeline.period.end:
        time += timeline.periods * timeline.period.seconds
    actor = timeline.lanes[lane]
    stage = timeline.stage(lane)
    most, capacity = held.bytes + extra, prices.gpu.memory
    cached = 0.0 if expandable else min(held.reserved - held.bytes, max(0.0, capacity - most))
    own = capacity if len(timeline.op_costs.prices.members) > 1 else None
    return StageMemory(stage, actor.rank, held.kinds, extra, most, time, held.op, every, cached, own)


def node_memory(timeline: Timeline) -> NodeMemory | None:
    """The fullest node; None where nothing is offloaded."""
    topology, grid = timeline.op_costs.topology, timeline.program.grid
    if not any(cohort.hosted for cohort in timeline.program.cohorts) or not is_hosted(topology) or topology.cpu is None:
        return None
    held: dict[str, NDArray[np.float64]] = {}
    for number, lane in enumerate(timeline.lanes):
        cohort = timeline.cohort(number)
        ranks = grid.groups((), cohort.at).ravel() if lane.ranks > 1 else np.array([lane.rank])
        nodes = topology.node_of(ranks)
        for place, size in cohort.hosted:
            mine = held.setdefault(place, np.zeros(int(topology.node_of(np.arange(topology.gpus)).max()) + 1))
            np.add.at(mine, nodes, size)
    none = np.zeros_like(next(iter(held.values())))
    cpu, nvme, has = held.get("cpu", none), held.get("nvme", none), topology.cpu
    worst = int(np.maximum(cpu / has.memory, nvme / (has.disk or np.inf)).argmax())
    return NodeMemory(worst, float(cpu[worst]), has.memory, float(nvme[worst]), has.disk)
