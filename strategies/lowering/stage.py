"""One pipeline stage being lowered: its parts in order, and the ops added so far; hooks write programs with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby

from sim.program import COMPUTE, Block, Collective, Item, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.buckets import Bucket, Cut, Gradient, Limits, filled, limits
from strategies.layers.weight_matrices import tensors
from strategies.lowering.blocks import BACKWARD, WEIGHT, shared
from strategies.lowering.optimizer_step import kernels_of, left_to_adam, matrix_products, on_the_cpus, update_workspace
from strategies.lowering.stage_parts import once
from strategies.lowering.stage_passes import StagePasses


def in_buckets(size: float, bucket: float) -> int:
    """How many equal collectives of at most `bucket` bytes carry `size` bytes."""
    return max(1, -int(-size // bucket))


class Stage(StagePasses):
    """A stage with what ranks that have the same parameters do together: gradients reduced in buckets, and the update."""

    last_microbatch = True  # whether the gradients that are reduced are those of a step's last one

    @cached_property
    def reduced(self) -> list[Ref]:
        """Gradient collectives so far, which the update waits for."""
        return []

    @cached_property
    def _reductions(self) -> dict[tuple[str, float, int, tuple[str, ...]], Collective]:
        """Of each label, bytes, repetition and axes one object."""
        return {}

    @cached_property
    def limits(self) -> Limits:
        """When a bucket of its gradients is full."""
        return limits(self.plan, self.rank, self.chunk)

    @once
    def buckets(self, weights_only: bool = False) -> list[Bucket]:
        """What is reduced together, in the order in which a backward pass (weights_only: its second half) makes it."""
        return filled(list(self._gradients(weights_only)), self.limits, Cut(0))

    def _gradients(self, weights_only: bool) -> Iterator[Gradient]:
        """Gradients of the parameters that other ranks have too."""
        copied, tied = self.plan.expert_copies > 1, bool(self.tied)
        for number in range(len(self.parts) - 1, -1, -1):
            for gradient in self.parts[number].gradients:
                if tied if gradient.tied else copied or not gradient.spread:
                    left = gradient.weights_left if weights_only else gradient.left
                    shared = gradient.tied or (self.shared_embedding and gradient is self.parts[0].gradients[-1])
                    yield Gradient(gradient.shape, Cut(number, left), gradient.spread, shared)

    def reduce(
        self,
        operation: str,
        size: float,
        count: int,
        after: tuple[Ref, ...],
        free: Memory = (),
        experts: float = 0.0,
        width: int | None = None,
        pieces: int = 0,
        allocate: Memory = (),
    ) -> Ref:
        """Reduce gradients over the dp and cp ranks: `count` collectives of `size` bytes, then `experts` bytes of gradients over
        the ranks that have the same experts. width: bytes of an element on its way; pieces: as in `Collective`; allocate: for the
        result. What is offloaded then leaves the GPU.
        """
        if self.plan.copies == 1:
            ref = self.host.gradients(size * count / self.plan.bytes_per_gradient, after, free) if self.host.updates else after[0]
            self.reduced.append(ref)
            return ref
        ref = self._reduction(operation, size, count, self.plan.summing, after, () if experts else free, width, pieces, allocate)
        if self.plan.replicas > 1 and self._sums_replicas:
            ref = self._replicate(size / self.plan.shards, count, ref)
        if experts:
            count = in_buckets(experts, self.limits.size * self.plan.bytes_per_gradient)
            ref = self._reduction(operation, experts / count, count, self.plan.expert_sharing, after, free)
        if self.host.updates:
            ref = self.host.gradients(size * count / self.plan.bytes_per_gradient / self.plan.shards, (ref,))
        self.reduced.append(ref)
        return ref

    def _reduction(
        self,
        operation: str,
        size: float,
        count: int,
        along: tuple[str, ...],
        after: tuple[Ref, ...],
        free: Memory,
        width: int | None = None,
        pieces: int = 0,
        allocate: Memory = (),
    ) -> Ref:
        key = operation, size, count, along
        if key not in self._reductions:  # one object for equal buckets: each distinct piece of work is priced once
            plan = self.plan
            element = width or plan.bytes_per_gradient
            self._reductions[key] = Collective(
                operation, size, "dp", "gradients", plan.algorithm, count, element, along=along, pieces=pieces
            )
        return self.add(Op("dp", self._reductions[key], after, allocate, free))

    @property
    def _sums_replicas(self) -> bool:
        """Whether what is reduced now is summed over replicas: not where shards add up on the GPU until the last microbatch."""
        return self.last_microbatch or self.host.updates or not self.plan.kernel_set.replicas_last

    def _replicate(self, size: float, count: int, after: Ref) -> Ref:
        """Sum a reduced shard over the replicas of the sharded copy (HSDP)."""
        key = "replica", size, count, ()
        if key not in self._reductions:
            plan = self.plan
            all_reduce = Collective(
                "all_reduce", size, "replica", "gradient shards", plan.algorithm, count, plan.bytes_per_gradient
            )
            self._reductions[key] = all_reduce
        return self.add(Op("replica", self._reductions[key], (after,)))

    @property
    def crowded(self) -> tuple[Ref, ...]:
        """What a pass waits for before it makes more gradients that do not stay: all but the last of the reductions before it.

        So at most two are under way: DeepSpeed fills two buffers in turns (overlap_comm), FSDP2's compute waits for the
        reduce-scatter of the unit before the last.
        """
        return tuple(self.reduced[-2:-1])

    def gradients_of(self, bucket: Bucket) -> tuple[str, float]:
        """What the whole gradients of a bucket take."""
        return "gradient", float(bucket.elements * self.plan.bytes_per_gradient)

    def reduce_bucket(self, operation: str, bucket: Bucket, completed: Ref, free: Memory = ()) -> None:
        """Reduce a bucket's gradients over the ranks that have the same parameters."""
        size = float((bucket.elements + bucket.padding) * self.plan.bytes_per_gradient)
        if bucket.spread:
            self.reduced.append(self._reduction(operation, size, 1, self.plan.expert_sharing, (completed,), free))
        else:
            self.reduce(operation, size, 1, (completed,), free)

    def backward_in_buckets(
        self,
        microbatch: int,
        after: tuple[Ref, ...],
        reduce: Callable[[Bucket, Ref], None],
        weights_only: bool = False,
        takes: Callable[[Sequence[Bucket]], tuple[Memory, Memory]] | None = None,
    ) -> Ref:
        """Backward pass (weights_only: its second half) that has each bucket of gradients reduced as soon as it is complete;
        without overlap, all at the end.

        takes: of the buckets that a piece of the pass completes, what it takes for them, and how much of that it gives back.
        """
        way, start, end = WEIGHT if weights_only else BACKWARD, Cut(len(self.parts)), Cut(0)
        buckets, ref = groupby(self.buckets(weights_only), lambda bucket: bucket.cut if self.plan.overlap else end), None
        for cut, complete in buckets:
            mine = list(complete)
            allocated, given_back = takes(mine) if takes else self._stay(mine)
            after += self.crowded if takes else ()
            passing = "gradient" if allocated and not given_back else ""
            # buffers come with their first gradient, after the loss
            buffers = sum(size for _, size in allocated) - sum(size for _, size in given_back) if takes else 0.0
            ref, after = self.between(way, microbatch, after, start, cut, allocated, given_back, passing, buffers), ()
            start = cut
            for bucket in mine:
                reduce(bucket, ref)
        self.has_gradients = True
        return self.between(way, microbatch, after, start, end) if ref is None or start != end else ref

    def _stay(self, buckets: Sequence[Bucket]) -> tuple[Memory, Memory]:
        """What a piece of a pass takes for the gradients in buckets that it completes, and gives back: where DDP's gradients are
        views of its buckets, what autograd has made, copied there one by one.
        """
        plan, elements = self.plan, sum(bucket.elements for bucket in buckets)
        if not plan.kernel_set.bucket_views or not plan.frees_gradients:
            return self.new_gradients(elements), ()
        if self.has_gradients:
            gone: Memory = (("gradient", float(elements * plan.bytes_per_gradient)),)
            self.freed -= gone[0][1]
            return (), gone
        largest = max(math.prod(shape) for bucket in buckets for shape in bucket.shapes)
        moved: Memory = (("gradient", float(largest * plan.bytes_per_gradient)),)
        return moved, moved

    def update(self, shards: float, after: tuple[Ref, ...], gradient_shards: int = 1) -> Ref:
        """The optimizer's pass over 1/shards of the parameters, and what a step does beside it; bound by memory traffic.

        gradient_shards: ranks over which gradients are sharded: it is as much of them that a rank sets to zero.
        """
        if self.host.updates:
            count, replicated = self.sharded(shards), self._replicated(gradient_shards)
            if replicated:
                after = (self.add(Op(COMPUTE, Block("optimizer", (Run(1, replicated),)), after)),)
            return self.host.update(count, on_the_cpus(self.plan) * count, after)
        block, allocated = self._update(shards, gradient_shards)
        freed = self.held_gradients(self.freed) if self.freed else ()
        ref = self.add(Op(COMPUTE, block, after, allocated, allocated + freed))
        self.has_gradients, self.freed = False, 0.0
        return self.host.store(self.sharded(shards), ref) if self.host.has_parameters else ref

    @once
    def _update(self, shards: float, gradient_shards: int) -> tuple[Block, Memory]:
        """The block of an update, and what it takes while it runs."""
        count, gradients = self.updated(shards), self.sharded(gradient_shards)
        plan, replicated = self.plan, self._replicated(gradient_shards)
        rest = left_to_adam(plan, self.parts) / shards
        second = Kernel("optimizer", "adam's second moment", "optimizer", 0.0, 2 * rest, "fp32")
        kernels: tuple[Item, ...] = (
            *replicated,
            *kernels_of(plan, self.plan.copies, self._groups(shards), gradients),
            *([second] if rest else []),
        )
        block = Block("optimizer", (Run(1, shared(kernels)), *matrix_products(plan, self.parts, round(shards))))
        distinct = [part for part, _ in self.kinds]  # the last one, which may have a copy of the embedding, too
        largest = max(tensors(distinct, self.model, self.tied, apart=False), default=0)
        return block, (("gradient", update_workspace(plan, count, largest)),)

    def _groups(self, shards: float) -> list[float]:
        """Elements that are updated at once: all, or where parts are timed one by one those of each part."""
        if not self.plan.kernel_set.times_parts:
            return [self.updated(shards)]
        given = [part.parameters for part in self.parts if part.name not in self.plan.outside_optimizer]
        return [elements / shards for elements in (*given, self.tied) if elements]

    def _replicated(self, shards: int) -> tuple[Collective, ...]:
        """With sequence parallelism each tp rank has the gradients of norms for its tokens only; they are summed over the tp
        ranks.

        Megatron-LM does this between the backward pass and the update (finalize_model_grads), DTensor when the optimizer first
        uses a gradient that is a partial sum.
        """
        plan = self.plan
        of_tokens = (part.replicated if plan.sequence_parallel else part.partial for part in self.parts)
        size = sum(of_tokens) * plan.bytes_per_gradient / shards
        if not size:
            return ()
        return (_summed_over_tp(size, plan.algorithm, plan.bytes_per_gradient),)


@lru_cache(maxsize=1024)
def _summed_over_tp(size: float, algorithm: str, width: int) -> Collective:
    """One object for all stages that sum as much."""
    return Collective("all_reduce", size, "tp", "replicated gradients", algorithm, 1, width)
