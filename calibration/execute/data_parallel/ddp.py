"""DistributedDataParallel, with gradients as they are or in 16 bits.

Where DDP's reducer cannot work, gradients are all-reduced in buckets of the same size after the last backward pass: without
overlap, for a tied matrix that is cut over tp ranks, which DDP would take apart, and in all schedules that PyTorch's pipeline
runtime runs: finding out shapes there counts parameters twice, and DDP ends with an internal error (torch 2.13); also its hooks
hear nothing of weight gradients that are made in passes of their own, and must not hear twice of a matrix that two stages share.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from calibration.execute.buckets import reduce_in_buckets
from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.pipeline import SINGLE
from strategies.job import Job
from strategies.resolved import Resolved

MIB = 2.0**20


def reducer_works(job: Job) -> bool:
    """Whether DDP's hooks hear of every gradient, once."""
    in_runtime = job.plan.pp > 1 and job.plan.schedule not in SINGLE
    return job.plan.overlap and not in_runtime and not (job.model.tied and job.plan.tp > 1)


@executed("ddp")
class DDP(Hook):
    """All-reduce of gradients."""

    def wrap(self, chunk: Chunk) -> nn.Module:
        """In DDP, of the tp ranks' device mesh where there is one."""
        setup = self.setup
        self.by_hand = not reducer_works(setup.job)
        if setup.resolved.dp == 1 or self.by_hand:
            return chunk.net
        where: dict[str, Any] = {"device_mesh": setup.mesh["dp"]} if setup.plan.tp > 1 else {"process_group": setup.group("dp")}
        # the model's buffers are constants, and gradients live in the buckets, as in the simulation
        return DistributedDataParallel(
            chunk.net,
            bucket_cap_mb=None if setup.plan.bucket is None else setup.plan.bucket / MIB,
            init_sync=False,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            **where,
        )

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last microbatch reduces."""
        module = self.modules[0]
        return nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()

    def reduce(self) -> None:
        """By hand."""
        if self.by_hand and self.setup.resolved.dp > 1:
            gradients = [parameter.grad for parameter in reversed(self.parameters()) if parameter.grad is not None]
            reduce_in_buckets(gradients, self.setup.bucket, self.setup.group("dp"))


@executed("ddp_fp16")
class CompressedDDP(DDP):
    """Gradients travel in 16 bits: PyTorch's fp16_compress_hook."""

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """The hook is DDP's."""
        if not reducer_works(job):
            return (
                "data_parallel=ddp_fp16 is a hook of DDP's reducer, which cannot work here (overlap, schedule or tied embedding)"
            )
        return None

    def wrap(self, chunk: Chunk) -> nn.Module:
        """With the hook."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        module = super().wrap(chunk)
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(self.setup.group("dp"), fp16_compress_hook)
            assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
        return module
