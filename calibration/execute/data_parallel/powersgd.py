"""DDP with PyTorch's powerSGD_hook. Its first two iterations are plain all-reduces, as the hook demands with error feedback or a
warm start; what is counted and timed comes after them.

Compression is linear in the mean of the ranks' gradients and errors, so one process that has all data and the same hook, in a
group of its own, has the same result.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import executed
from calibration.execute.data_parallel.ddp import DDP, reducer_works
from calibration.execute.setup import Setup
from calibration.launch.groups import new_group
from strategies.data_parallel.buckets import limits
from strategies.job import Job
from strategies.plan.options import PowerSGD
from strategies.plan.resolved import Resolved

PLAIN = 2  # iterations before the first that compresses


@executed("ddp_powersgd")
class PowerSGDDDP(DDP):
    """Gradients travel as products of two thin matrices."""

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """The hook is DDP's, and one process must have the same matrices in the same buckets."""
        field = "data_parallel=ddp_powersgd"
        if not reducer_works(job):
            return f"{field} is a hook of DDP's reducer, which cannot work here (overlap, schedule or tied embedding)"
        first = limits(resolved).first * job.plan.bytes_per_gradient
        if job.cluster.node.gpu.sms == 0 and job.model.parameters * job.plan.bytes_per_gradient > first:
            why = "gloo's threads start later reductions, of several buckets in another order on each rank"
            return f"{field} with gradients of more than a first bucket of {first / 2**20:g} MiB: {why}"
        for axis, degree in (("tp", job.plan.tp), ("pp", job.plan.pp), ("cp", job.plan.cp)):
            if degree > 1:
                return f"{field} with {axis}={degree}: the process it is compared with compresses whole matrices in other buckets"
        return None

    def wrap(self, chunk: Chunk) -> nn.Module:
        """With the hook."""
        return _compressed(self.setup, super().wrap(chunk), self.setup.copies)

    @classmethod
    def reference(cls, setup: Setup, net: nn.Module) -> nn.Module:
        """The hook in a group of this rank alone."""
        if setup.resolved.copies == 1:
            return net
        alone = new_group([setup.place.rank], alone=True)
        return _compressed(setup, cls.in_ddp(setup, net, {"process_group": alone}), alone)


def _compressed(setup: Setup, module: nn.Module, over: Any) -> nn.Module:
    if isinstance(module, DistributedDataParallel):
        options = setup.plan.powersgd or PowerSGD.model_validate({})
        state = PowerSGDState(over, start_powerSGD_iter=PLAIN, **options.model_dump())
        module.register_comm_hook(state, cast(Any, powerSGD_hook))
    return module
