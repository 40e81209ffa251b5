"""How long nodes need to exchange what sharded parameters and gradients must move, whatever the algorithm.

In an all-gather of S bytes over n ranks, the k of them in one node must get (1 − k/n)·S from outside; in a reduce-scatter they
must send as much. An all-reduce sends 2·(1 − k/n)·S from a node (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). All of
it passes the NICs of the ranks that take part.
"""

from __future__ import annotations

import numpy as np

from sim.grid import Grid
from sim.prices import Profile
from strategies.job import Job
from strategies.resolved import Resolved
from strategies.updates import on_the_cpus


def crossings(job: Job, profile: Profile, plans: list[Resolved]) -> list[tuple[float, float]]:
    """Of each plan: seconds per byte of one all-gather or reduce-scatter of dense parameters and of experts, on the first rank's
    node; 0 where nothing leaves it.
    """
    known: dict[tuple[Grid, tuple[str, ...]], float] = {}

    def find(grid: Grid, axes: tuple[str, ...]) -> float:
        if (grid, axes) not in known:
            known[grid, axes] = _crossing(job, profile, grid, axes)
        return known[grid, axes]

    return [(find(one.grid, one.sharing), find(one.grid, one.expert_sharing) if one.plan.ep > 1 else 0.0) for one in plans]


def _crossing(job: Job, profile: Profile, grid: Grid, axes: tuple[str, ...]) -> float:
    node = job.cluster.node
    if not node.nics or job.cluster.fabric.direct:
        return 0.0
    groups = grid.groups(axes, {"pp": 0})
    mine = groups // node.gpus == 0
    inside = mine.sum(axis=1)
    share = float((1 - inside[inside > 0] / groups.shape[1]).sum())
    nics = np.unique(groups[mine] * node.nics // node.gpus) if node.nics < node.gpus else groups[mine]
    rate = node.nic * max(1.0, node.nics / node.gpus) * profile.links["nic"].efficiency
    return share / (rate * len(nics))


def hosted_update(job: Job, plan: Resolved) -> float:
    """Seconds per parameter that a rank updates on the CPUs of its node, whose memory the first ranks of the pipelines there
    share; 0 where GPUs update.
    """
    cpu = job.cluster.topology().cpu
    if plan.plan.offload is None or plan.plan.offload.optimizer is None or cpu is None:
        return 0.0
    first = plan.grid.groups((), {"pp": 0}).ravel()
    ranks = int((first // job.cluster.node.gpus == first[0] // job.cluster.node.gpus).sum())
    return on_the_cpus(plan.plan) * ranks / (cpu.memory_bandwidth * cpu.efficiency)
