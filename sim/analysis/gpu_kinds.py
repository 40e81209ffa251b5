"""The ranks on each kind of GPU, where a cluster has several: how long they are idle, how full they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.analysis.breakdown import idle_seconds
from sim.analysis.stage_memory import StageMemory
from sim.timeline import Timeline


@dataclass(frozen=True)
class GpuKind:
    """The ranks on one kind of GPU. Seconds, means over these ranks: idle, of their compute streams; bytes: the highest peak, of
    `rank` on `node`.
    """

    gpu: str
    profile: str
    ranks: int
    idle: float
    capacity: float
    peak: float
    rank: int
    node: int


def gpu_kinds(timeline: Timeline, per_lane: list[dict[str, float]], memory: tuple[StageMemory, ...]) -> Iterator[GpuKind]:
    """The ranks on each kind of GPU, as the topology numbers them."""
    steps, topology = timeline.program.steps, timeline.op_costs.topology
    for prices in timeline.op_costs.prices.members:
        lanes = [number for number in range(len(timeline.lanes)) if timeline.prices(number) is prices]
        ranks = sum(timeline.lanes[lane].ranks for lane in lanes)
        if not ranks:
            continue
        idle = sum(timeline.lanes[lane].ranks * idle_seconds(per_lane[lane]) for lane in lanes) / ranks / steps
        fullest = max((memory[lane] for lane in lanes), key=lambda stage: stage.peak)
        node = int(topology.node_of(np.array([fullest.rank]))[0])
        yield GpuKind(prices.gpu.name, prices.profile.name, ranks, idle, prices.gpu.memory, fullest.peak, fullest.rank, node)


def notes_on(kinds: tuple[GpuKind, ...]) -> Iterator[str]:
    """A note that says which GPUs wait for which."""
    if len(kinds) > 1:
        least, most = (pick(kinds, key=lambda kind: kind.idle) for pick in (min, max))
        idle = f"{most.gpu} is idle for {most.idle:.3g} s of a step, {least.gpu} for {least.idle:.3g} s"
        yield f"GPUs of several kinds: {idle}"
    tight = [kind for kind in kinds if kind.peak > kind.capacity]
    if tight and len(tight) < len(kinds):
        where = ", ".join(f"{kind.gpu} (rank {kind.rank} on node {kind.node})" for kind in tight)
        yield f"out of memory only on {where}"
