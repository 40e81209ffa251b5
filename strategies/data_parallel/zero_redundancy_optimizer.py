"""PyTorch's ZeroRedundancyOptimizer under DDP: gradients are all-reduced, and each rank updates the parameters that it owns.

github.com/pytorch/pytorch torch/distributed/optim/zero_redundancy_optimizer.py, with parameters_as_bucket_view and without
overlap_with_ddp: whole parameters, the largest first, go to the rank that owns least so far; after the update one rank after the
other broadcasts what it owns. A step moves 2Ψ + Ψ, times (n − 1)/n, where ZeRO-1 moves 2Ψ. A large matrix, such as an embedding,
has one owner: the rank that owns most holds and updates more than 1/n of the optimizer states, and all others wait for it.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heapreplace

from sim.program import Collective, Op
from strategies.data_parallel import hooks
from strategies.data_parallel.ddp import DDP
from strategies.layers.weight_matrices import tensors
from strategies.lowering.stage import Stage
from strategies.plan.plan import Plan
from topologies.reading import UserError


@hooks("zero_redundancy_optimizer")
class ZeroRedundancyOptimizer(DDP):
    """DDP whose optimizer states are sharded by parameter: its owner updates it and broadcasts it."""

    shards = frozenset({"optimizer"})
    framework_buckets = whole_gradients = asynchronous = blocks = False

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """It assigns parameters to owners among ranks that all have them."""
        what = f"{where}: data_parallel=zero_redundancy_optimizer"
        if plan.shard is not None:
            raise UserError(f"{what} shares parameters out over all dp ranks, which shard={plan.shard} contradicts; take zero1")
        if plan.ep_of_copies > 1:
            raise UserError(f"{what} has one owner of each parameter, and ep={plan.ep} spreads experts; take zero1")

    def shares(self, stage: Stage, state: str) -> float:
        """The rank that owns most parameters decides."""
        if state not in self.shards or stage.plan.copies == 1:
            return 1
        apart = stage.plan.of_pytorch
        sizes = tuple(tensors(stage.parts, stage.model, stage.tied, apart))
        return stage.parameters / most_owned(sizes, stage.plan.copies)

    def update(self, stage: Stage) -> None:
        """Update what the rank owns, then every rank broadcasts its parameters in turn."""
        plan, ranks = stage.plan, stage.plan.copies
        updated = stage.update(self.shares(stage, "optimizer"), tuple(stage.reduced))
        if ranks == 1:
            return
        width = plan.bytes_per_element
        mean = stage.parameters * width / ranks
        work = Collective("broadcast", mean, "dp", "parameters", plan.algorithm, ranks, width, along=stage.plan.sharing)
        stage.add(Op("dp", work, (updated,)))


@lru_cache(maxsize=1024)
def most_owned(sizes: tuple[int, ...], ranks: int) -> int:
    """Elements of the rank that owns most when each parameter, the largest first, goes to the rank that owns least."""
    owned = [0] * ranks
    heapify(owned)
    for size in sorted(sizes, reverse=True):
        heapreplace(owned, owned[0] + size)
    return max(owned)
