"""ZeRO-1 by plain collectives: reduce-scatter of gradient buckets, update of the own shard, all-gather of parameters.

PyTorch's ZeroRedundancyOptimizer is another algorithm (`zero_redundancy_optimizer`), which moves half as much
again. Gradients and parameters live in flat buckets of whole parameters, each rank owning an equal part of every bucket; a bucket
is reduced as soon as the last microbatch has made its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibration.execute.buckets import held, in_buckets, like
from calibration.execute.chunks import Chunk
from calibration.execute.clipping import Held
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.setup import Setup
from strategies.job import Job
from strategies.plan.resolved import Resolved


class Flat:
    """Parameters as views of a flat tensor, padded to a multiple of the ranks, and the part of it that this rank owns."""

    def __init__(self, tensors: list[Tensor], ranks: int, rank: int) -> None:
        self.tensors, self.ranks = tensors, ranks
        self.work: Any = None
        own = [held(tensor) for tensor in tensors]
        self.size = -(-sum(part.numel() for part in own) // ranks) * ranks
        self.values = torch.zeros(self.size, dtype=own[0].dtype, device=own[0].device)
        self.places: dict[Tensor, slice] = {}
        offset = 0
        for tensor, part in zip(tensors, own, strict=True):
            place = self.places[tensor] = slice(offset, offset + part.numel())
            self.values[place] = part.detach().flatten()
            part.data = self.values[place].view_as(part)
            offset += part.numel()
        self.mine = slice(rank * self.size // ranks, (rank + 1) * self.size // ranks)
        self.shard = nn.Parameter(self.values[self.mine])

    def gather(self, group: Any) -> Any:
        """Start to gather everybody's parameters."""
        return dist.all_gather_into_tensor(self.values, self.shard.detach(), group=group, async_op=True)


class Bucket(Flat):
    """The same with gradients as views of a second flat tensor."""

    def __init__(self, tensors: list[Tensor], ranks: int, rank: int) -> None:
        super().__init__(tensors, ranks, rank)
        self.waiting = 0
        self.gradients = torch.zeros_like(self.values)
        for tensor, place in self.places.items():
            tensor.grad = like(tensor, self.gradients[place])
        self.piece = self.gradients[self.mine]

    def reduce(self, group: Any) -> None:
        """Start to sum gradients into the own part."""
        self.work = dist.reduce_scatter_tensor(self.piece, self.gradients, group=group, async_op=True)

    def finish(self) -> None:
        """Wait, and make it the mean."""
        self.work.wait()
        self.work = None
        self.shard.grad = self.piece.div_(self.ranks)


@executed("zero1")
class Zero1(Hook):
    """Optimizer states are sharded."""

    divided = True

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """What the buckets cannot hold."""
        plan, name = job.plan, job.plan.data_parallel
        if plan.tp > 1 and plan.sequence_parallel:
            why = "gradients of norms, which tp ranks have partial sums of, lie unequally in the parts of dp ranks"
            return f"data_parallel={name} with tp={plan.tp} and sequence_parallel=true: {why}"
        if plan.shard:
            return f"data_parallel={name} with shard={plan.shard}: sharded copies have no replicas"
        if job.model.tied and plan.pp > 1:
            return (
                f"data_parallel={name} with pp={plan.pp} and {job.model.name}'s tied embedding: its two copies have other owners"
            )
        return None

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        self.buckets: list[Any] = []
        super().__init__(setup, chunks)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """Move parameters into buckets, in the order in which the backward pass makes gradients."""
        setup, parameters = self.setup, chunk.trained[::-1]
        if setup.resolved.copies == 1:
            return chunk.net
        group = setup.copies
        for tensors in in_buckets(parameters, setup.bucket):
            bucket = Bucket(tensors, setup.resolved.copies, dist.get_rank(group))
            self.buckets.append(bucket)
            for tensor in tensors:
                hear: Any = tensor.register_post_accumulate_grad_hook
                hear(lambda _, bucket=bucket: self._gradient_ready(bucket))
        return chunk.net

    def _gradient_ready(self, bucket: Bucket) -> None:
        bucket.waiting -= 1
        if not bucket.waiting and self.setup.plan.overlap:
            bucket.reduce(self.setup.copies)

    def make_optimizer(self) -> Any:
        """Over the own parts."""
        from calibration.execute.optimizers import make_optimizer

        return make_optimizer(self.setup.plan, [bucket.shard for bucket in self.buckets] or self.parameters())

    def zero(self) -> None:
        """Gradients stay where they are."""
        if not self.buckets:
            super().zero()
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.waiting = len(bucket.tensors) * self.setup.resolved.microbatches

    def reduce(self) -> None:
        """Those that no hook has heard of, then wait for all."""
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.reduce(self.setup.copies)
        for bucket in self.buckets:
            bucket.finish()

    def update(self) -> None:
        """The own parts, then everybody's."""
        super().update()
        for work in [bucket.gather(self.setup.copies) for bucket in self.buckets]:
            work.wait()

    def gradients(self) -> Iterator[Held]:
        """Of the own part of each bucket what belongs to each parameter."""
        if not self.buckets:
            yield from super().gradients()
            return
        masters = self.masters()
        for bucket in self.buckets:
            flat, mine = masters.get(bucket.shard, bucket.shard).grad, bucket.mine
            for tensor, place in bucket.places.items():
                first, last = max(place.start, mine.start), min(place.stop, mine.stop)
                if first < last:
                    yield Held(flat[first - mine.start : last - mine.start], self.copies(tensor, tensor) / bucket.ranks)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Ranks have reduced gradients of their parts only."""
        return None if self.buckets else parameter.grad
