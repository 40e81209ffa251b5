"""PyTorch's ZeroRedundancyOptimizer: DDP reduces gradients, each rank updates and broadcasts the parameters that it owns.

One optimizer per chunk. Parameters lie in one flat tensor per owner (parameters_as_bucket_view), which is broadcast after the
update; nothing overlaps (with overlap_with_ddp gloo may hang, says PyTorch).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer as Stock

from calibration.execute.data_parallel import executed
from calibration.execute.data_parallel.ddp import DDP
from calibration.execute.limits import shares_embedding
from calibration.execute.optimizers import make_optimizer, optimizer_of, with_masters
from strategies.job import Job
from strategies.plan.resolved import Resolved


@executed("zero_redundancy_optimizer")
class ZeroRedundancyOptimizer(DDP):
    """Optimizer states have owners."""

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """What has no single owner."""
        field = "data_parallel=zero_redundancy_optimizer"
        if job.plan.tp > 1:
            return f"{field} with tp={job.plan.tp}: it broadcasts plain tensors, and tp ranks have DTensors"
        if job.plan.precision == "fp16":
            return f"{field} with precision=fp16: its masters are inside of it, where no loss scale can be taken out"
        if shares_embedding(job, resolved):
            return f"{field} with schedule={job.plan.schedule}: two stages of a rank share a matrix, which has two owners"
        return None

    def make_optimizer(self) -> Any:
        """One for each chunk."""
        setup = self.setup
        if setup.resolved.copies == 1:
            return [make_optimizer(setup.plan, self.parameters())]
        kind, arguments = (optimizer_of if setup.exact else with_masters)(setup.plan)
        return [
            Stock((held for held in chunk.held.values() if held.requires_grad), kind, setup.copies, True, **arguments)
            for chunk in self.chunks
        ]

    def update(self) -> None:
        """Of what this rank owns, then of everything."""
        if self.clip():
            for optimizer in self.optimizer:
                optimizer.step()
