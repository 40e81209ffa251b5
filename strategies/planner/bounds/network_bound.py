"""How long nodes need to exchange what sharded parameters and gradients must move, whatever the algorithm.

In an all-gather of S bytes over n ranks, the k of them in one node must get (1 − k/n)·S from outside; in a reduce-scatter they
must send as much. An all-reduce sends 2·(1 − k/n)·S from a node (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). All of
it passes the NICs of the ranks that take part.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sim.grid import Grid
from sim.pricing.prices import Profile
from strategies.job import Job
from strategies.lowering.optimizer_step import on_the_cpus
from strategies.plan.resolved import Resolved


class Crossings:
    """Seconds per byte of one all-gather or reduce-scatter of dense parameters and of experts on the first rank's node; 0 where
    nothing leaves it.
    """

    def __init__(self, job: Job, profile: Profile) -> None:
        self.job, self.profile = job, profile
        self._known: dict[tuple[Grid, tuple[str, ...]], tuple[float, float]] = {}

    def of(self, plan: Resolved) -> tuple[float, float, float, float]:
        """(dense, experts) of all groups of the node one after the other, (dense, experts) of the quickest group alone."""
        grid = plan.grid
        dense, experts = self._find(grid, plan.sharing), (0.0, 0.0)
        if plan.ep_of_copies > 1:
            experts = self._find(grid, plan.expert_sharing)
        return dense[0], experts[0], dense[1], experts[1]

    def _find(self, grid: Grid, axes: tuple[str, ...]) -> tuple[float, float]:
        seconds = self._known.get((grid, axes))
        if seconds is None:
            seconds = self._known[grid, axes] = _crossing(self.job, self.profile, grid, axes)
        return seconds


def _crossing(job: Job, profile: Profile, grid: Grid, axes: tuple[str, ...]) -> tuple[float, float]:
    node = job.cluster.node
    if not node.nics or job.cluster.fabric.direct:
        return 0.0, 0.0
    groups = grid.groups(axes, {"pp": 0})
    mine = groups // node.gpus == 0
    inside = mine.sum(axis=1)
    here = inside > 0
    shares = 1 - inside[here] / groups.shape[1]
    rate = node.nic * max(1.0, node.nics / node.gpus) * profile.links["nic"].efficiency
    used = groups * node.nics // node.gpus if node.nics < node.gpus else groups
    nics = np.array([len(np.unique(row[own])) for row, own in zip(used[here], mine[here], strict=True)])
    return float(shares.sum()) / (rate * len(np.unique(used[mine]))), float((shares / nics).min()) / rate


def sending(job: Job, profile: Profile) -> float:
    """Seconds per byte that a rank sends to another node, at least; 0 where that is not known."""
    node = job.cluster.node
    if not node.nics or job.cluster.fabric.direct:
        return 0.0
    return 1 / (node.nic * max(1.0, node.nics / node.gpus) * profile.links["nic"].efficiency)


def hosted_update(job: Job, plan: Resolved) -> float:
    """Seconds per parameter that a rank updates on the CPUs of its node, whose memory the first ranks of the pipelines there
    share; 0 where GPUs update.
    """
    if plan.offload is None or plan.offload.optimizer is None:
        return 0.0
    cpu = job.cluster.topology().cpu
    if cpu is None:
        return 0.0
    return on_the_cpus(plan) * _beside_the_first(plan.grid, job.cluster.node.gpus) / (cpu.memory_bandwidth * cpu.efficiency)


@lru_cache(maxsize=4096)
def _beside_the_first(grid: Grid, gpus: int) -> int:
    """Ranks of the first pipeline rank on the node of its first rank."""
    first = grid.groups((), {"pp": 0}).ravel()
    return int((first // gpus == first[0] // gpus).sum())
