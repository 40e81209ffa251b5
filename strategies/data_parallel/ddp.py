"""DistributedDataParallel: every rank holds everything; gradients are all-reduced in buckets while the backward pass goes on.

Li et al. 2020, arXiv:2006.15704. Microbatches before the last one accumulate without communication (`no_sync`). Moves 2Ψ·(n−1)/n.

Buffers of a traced module (batch normalisation's running statistics) come from rank 0 before the first forward pass of a step,
as a broadcast for each type and each 250 MiB: DDP does so in a forward pass after a backward pass that synchronised (torch 2.13,
nn/parallel/distributed.py, will_sync_module_buffers, _sync_buffers; csrc/distributed/c10d/comm.cpp, broadcast_coalesced). They
are joined before it and copied back after it; that these copies are one for each buffer, launched by C++, is left out.
"""

from __future__ import annotations

import math
from functools import partial

from sim.program import Collective, Memory, Op, Ref
from strategies.data_parallel import hooks
from strategies.data_parallel.buckets import Bucket
from strategies.data_parallel.hook import Hook, Moves
from strategies.lowering.stage import Stage, in_buckets
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved

BROADCAST = 250 * 2.0**20  # bytes of buffers that are broadcast together (broadcast_bucket_size)


@hooks("ddp")
class DDP(Hook):
    """Every rank has all model states; gradients are all-reduced in buckets during the last backward pass."""

    of_ddp = framework_buckets = whole_gradients = asynchronous = blocks = True

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """The first one of a step waits for rank 0's buffers."""
        waits = not microbatch and stage.plan.copies > 1 and stage.plan.kernel_set.broadcast_buffers
        sizes = stage.module_buffers if waits else ()
        if not sizes:
            return super().forward(stage, microbatch, after)
        sent, copied = after, list[float]()
        for width in sorted({width for width, _ in sizes}, reverse=True):
            size = float(sum(width * elements for each, elements in sizes if each == width))
            copied += 2 * size, 2 * size
            count = in_buckets(size, BROADCAST)
            plan = stage.plan
            work = Collective("broadcast", size / count, "dp", "buffers", plan.algorithm, count, width, along=plan.sharing)
            sent = (stage.add(Op("dp", work, sent)),)
        ref = super().forward(stage, microbatch, (*after, *sent))
        stage.copy("buffers of modules", "forward", tuple(copied), ref, first=True)
        return ref

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Buckets are reduced in the last microbatch only."""
        if stage.plan.copies == 1 or not last:
            return stage.whole_backward(microbatch, after, weights_only)
        return stage.backward_in_buckets(microbatch, after, partial(self.reduce, stage), weights_only)

    def reduce(self, stage: Stage, bucket: Bucket, completed: Ref) -> None:
        """All-reduce a bucket."""
        self.fill(stage, bucket, completed)
        stage.reduce_bucket("all_reduce", bucket, completed)

    def fill(self, stage: Stage, bucket: Bucket, completed: Ref) -> None:
        """PyTorch's reducer copies and divides each gradient when it is made, or divides what is in the bucket
        (torch/csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense).
        """
        plan = stage.plan
        if plan.own_gradients:
            moved = tuple(2.0 * plan.bytes_per_gradient * math.prod(shape) for shape in bucket.shapes)
            stage.copy("gradients to buckets", "backward", moved, completed)

    def resident(self, stage: Stage) -> Memory:
        """PyTorch's buckets, which stay; where gradients that stay are views of them, they are those."""
        plan = stage.plan
        if stage.plan.copies == 1 or not plan.own_gradients or not (plan.copies_gradients or plan.frees_gradients):
            return ()
        return (("buffer", float(sum(bucket.elements for bucket in stage.buckets()) * plan.bytes_per_gradient)),)

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """An all-reduce in a step; of an asynchronous schedule at least."""
        return Moves(plan.bytes_per_gradient, plan.bytes_per_gradient, late=True)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """Reductions follow the pass, and the next pass waits."""
        return True

    def update(self, stage: Stage) -> None:
        """Every rank updates all of its parameters."""
        stage.update(1, tuple(stage.reduced))
