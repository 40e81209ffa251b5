"""DistributedDataParallel, with gradients as they are or in 16 bits.

Where DDP's reducer cannot work, gradients are all-reduced in buckets of the same kind after the last backward pass: without
overlap, for a tied matrix that is cut over tp ranks, which DDP would take apart, and in all schedules that PyTorch's pipeline
runtime runs: finding out shapes there counts parameters twice, and DDP ends with an internal error (torch 2.13); also its hooks
hear nothing of weight gradients that are made in passes of their own, and must not hear twice of a matrix that two stages share.
The same error ends GPipe and 1F1B of no more microbatches than stages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibration.execute.buckets import in_buckets, local
from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.setup import SINGLE, Setup
from calibration.execute.traced.buffers import broadcast
from strategies.job import Job
from strategies.plan.resolved import Resolved

MIB = 2.0**20


def reducer_works(job: Job) -> bool:
    """Whether DDP's hooks hear of every gradient, once."""
    plan = job.plan
    in_runtime = plan.pp > 1 and (plan.schedule not in SINGLE or job.resolve().microbatches <= plan.pp)
    return plan.overlap and not in_runtime and not (job.model.tied and plan.tp > 1)


class Bucket:
    """What DDP's reducer has: a flat tensor that stays; gradients are views of it, or are copied to it."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.flat = torch.empty(sum(local(parameter.detach()).numel() for parameter in parameters), dtype=parameters[0].dtype)
        self.flat = self.flat.to(parameters[0].device)

    @torch.no_grad()
    def reduce(self, group: Any, view: bool) -> None:
        """Fill it, all-reduce it, and give every gradient its part."""
        pieces = torch.split(self.flat, [local(parameter.detach()).numel() for parameter in self.parameters])
        held = [
            (parameter, local(parameter.grad), piece)
            for parameter, piece in zip(self.parameters, pieces, strict=True)
            if parameter.grad is not None
        ]
        for _, gradient, piece in held:
            piece.copy_(gradient.flatten())
        dist.all_reduce(self.flat, group=group)
        self.flat /= dist.get_world_size(group)
        for parameter, gradient, piece in held:
            if view:
                parameter.grad = piece.view_as(gradient)
            else:
                gradient.copy_(piece.view_as(gradient))


@executed("ddp")
class DDP(Hook):
    """All-reduce of gradients; those of experts that ep ranks hold by themselves are reduced after the backward pass."""

    experts = True

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """What its gradients cannot be."""
        if job.plan.kernel_set.bucket_views and job.plan.tp > 1 and not reducer_works(job):
            why = "gradients of tp ranks are DTensors, no views of what is reduced by hand"
            return f"gradient_as_bucket_view=true with overlap=false or a tied embedding: {why}"
        return None

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        self.filled: dict[Tensor, Bucket] = {}
        super().__init__(setup, chunks)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """In DDP, of the tp ranks' device mesh where there is one."""
        setup = self.setup
        self.by_hand = not reducer_works(setup.job)
        if setup.resolved.copies == 1 or self.by_hand:
            if setup.resolved.copies > 1:
                apart = set(chunk.spread.values())
                parameters = [each for each in reversed(chunk.trained) if each not in self.filled and each not in apart]
                for bucket in map(Bucket, in_buckets(parameters, setup.bucket)):
                    self.filled |= dict.fromkeys(bucket.parameters, bucket)
            return chunk.net
        where: dict[str, Any] = {"device_mesh": setup.copies_mesh} if setup.plan.tp > 1 else {"process_group": setup.copies}
        if chunk.spread:
            ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(chunk.net, list(chunk.spread))
        return self.in_ddp(setup, chunk.net, where)

    @classmethod
    def in_ddp(cls, setup: Setup, net: nn.Module, where: dict[str, Any]) -> DistributedDataParallel:
        """The module in DDP as the plan says; the buffers of our own models are constants."""
        return DistributedDataParallel(
            net,
            bucket_cap_mb=None if setup.plan.bucket is None else setup.plan.bucket / MIB,
            init_sync=False,
            forward_sync_buffers=setup.broadcasts_buffers,
            gradient_as_bucket_view=bool(setup.plan.kernel_set.bucket_views),
            **where,
        )

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last microbatch reduces."""
        module = self.modules[0]
        return nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()

    def zero(self) -> None:
        """Before the first pass of a step, for which the first rank's buffers are sent where DDP does not do so."""
        super().zero()
        if self.by_hand and self.setup.resolved.copies > 1 and self.setup.broadcasts_buffers:
            broadcast([state for chunk in self.chunks for state in chunk.net.states()], self.setup.copies)

    def reduce(self) -> None:
        """By hand."""
        for bucket in dict.fromkeys(self.filled.values()):
            bucket.reduce(self.setup.copies, bool(self.setup.plan.kernel_set.bucket_views))
        for chunk in self.chunks:
            self.reduce_experts(chunk)


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
            module.register_comm_hook(self.setup.copies, fp16_compress_hook)
            assert all(parameter.element_size() >= 4 for parameter in module.parameters())
        return module
