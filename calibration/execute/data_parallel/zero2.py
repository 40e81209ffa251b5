"""ZeRO-2 by plain collectives: as ZeRO-1, but every microbatch reduces (or the last), and whole gradients do not stay.

PyTorch's nearest part, FSDP2 with parameters that stay gathered, holds them beside their shards and reduces layer by layer. Here
a bucket's gradients are copied, as they are made, into a flat tensor that lives until it is reduced; at most two are under way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibration.execute.buckets import in_buckets, local
from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import executed
from calibration.execute.data_parallel.zero1 import Flat, Zero1
from calibration.execute.limits import splits
from calibration.execute.setup import Setup
from strategies.job import Job
from strategies.plan.resolved import Resolved


class Passing(Flat):
    """The same with the rank's part of the gradients, and for a while all of them."""

    def __init__(self, tensors: list[Tensor], ranks: int, rank: int, microbatches: int) -> None:
        super().__init__(tensors, ranks, rank)
        self.piece = torch.zeros_like(self.shard)
        self.gradients: Tensor | None = None
        self.microbatches, self.waiting = microbatches, 0  # that are added up before they are reduced; gradients still to come

    @torch.no_grad()
    def take(self, tensor: Tensor) -> None:
        """Move a gradient that was just made into the flat tensor."""
        if self.gradients is None:
            self.gradients, self.waiting = self.values.new_zeros(self.size), len(self.tensors) * self.microbatches
        assert tensor.grad is not None
        self.gradients[self.places[tensor]] += local(tensor.grad).flatten()
        tensor.grad = None
        self.waiting -= 1

    def start(self, group: Any) -> UnderWay:
        """Start to sum gradients over the ranks, each its part; the result lies in the flat tensor."""
        gradients, self.gradients = self.gradients, None
        assert gradients is not None
        return UnderWay(self, gradients, dist.reduce_scatter_tensor(gradients[self.mine], gradients, group=group, async_op=True))


class UnderWay(NamedTuple):
    """A reduction that was started; its flat tensor goes with it."""

    bucket: Passing
    gradients: Tensor
    work: Any

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add the mean to the rank's part."""
        self.work.wait()
        self.bucket.piece.add_(self.gradients[self.bucket.mine], alpha=1 / self.bucket.ranks)


@executed("zero2")
class Zero2(Zero1):
    """Optimizer states and gradients are sharded."""

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """Hooks must hear of every gradient."""
        if splits(job, resolved):
            return f"schedule={job.plan.schedule} makes weight gradients in passes of their own, and no hook hears of them"
        return super().check(job, resolved)

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        self._under_way: list[UnderWay] = []
        super().__init__(setup, chunks)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """Hear of every gradient."""
        setup, parameters = self.setup, chunk.trained[::-1]
        if setup.resolved.copies == 1:
            return chunk.net
        rank = dist.get_rank(setup.copies)
        added = setup.resolved.microbatches if setup.plan.syncs_gradients == "last" else 1
        mine = [Passing(tensors, setup.resolved.copies, rank, added) for tensors in in_buckets(parameters, setup.bucket)]
        for bucket in mine:
            for tensor in bucket.tensors:
                hear: Any = tensor.register_post_accumulate_grad_hook
                hear(lambda parameter, bucket=bucket: self._bucket_gradient(mine, bucket, parameter))
        self.buckets += mine
        return chunk.net

    def _bucket_gradient(self, mine: list[Passing], bucket: Passing, tensor: Tensor) -> None:
        """A gradient was made; without overlap a chunk's are reduced when there are all."""
        if bucket.gradients is None:  # its first of this microbatch
            self._wait(all_but=1)
        bucket.take(tensor)
        if self.setup.plan.overlap:
            self._start([bucket] if not bucket.waiting else [])
        elif all(bucket.gradients is not None and not bucket.waiting for bucket in mine):
            self._start(mine)
            self._wait()

    def _start(self, complete: list[Passing]) -> None:
        self._under_way += [bucket.start(self.setup.copies) for bucket in complete]

    def _wait(self, all_but: int = 0) -> None:
        while len(self._under_way) > all_but:
            self._under_way.pop(0).finish()

    def zero(self) -> None:
        """The parts."""
        if not self.buckets:
            super().zero()
        for bucket in self.buckets:
            bucket.piece.zero_()

    def reduce(self) -> None:
        """Wait for the last ones."""
        self._wait()
        for bucket in self.buckets:
            bucket.shard.grad = bucket.piece
