"""DistributedDataParallel: every rank holds everything; gradients are all-reduced in buckets while the backward pass goes on.

Li et al. 2020, arXiv:2006.15704. Microbatches before the last one accumulate without communication (`no_sync`). Moves 2Ψ·(n−1)/n.
"""

from __future__ import annotations

import math
from functools import partial

from sim.program import Memory, Ref
from strategies.data_parallel import hooks
from strategies.data_parallel.buckets import Bucket
from strategies.data_parallel.hook import Hook, Moves
from strategies.lowering.stage import Stage
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


@hooks("ddp")
class DDP(Hook):
    """Every rank has all model states; gradients are all-reduced in buckets during the last backward pass."""

    of_ddp = framework_buckets = whole_gradients = asynchronous = blocks = True

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
