"""One pipeline stage being lowered: its parts in order, and the ops added so far; hooks write programs with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from sim.program import COMPUTE, Block, Collective, Item, Memory, Op, Ref, Run
from strategies.data_parallel.buckets import Bucket, Cut, Gradient, Limits, filled, limits
from strategies.layers.weight_matrices import tensors
from strategies.lowering.blocks import BACKWARD, WEIGHT, shared
from strategies.lowering.optimizer_step import (
    NORM,
    PARAMETER_COPY,
    UNSCALING,
    kernels_of,
    left_to_adam,
    matrix_products,
    on_the_cpus,
    update_pass,
    update_workspace,
)
from strategies.lowering.stage_parts import once
from strategies.lowering.stage_passes import StagePasses
from strategies.optimizers import FLOAT
from strategies.schedules import schedules


class _Agreement(NamedTuple):
    """What ranks agree on in an update, None: a rank has it by itself; read: the host waits for it before it goes on."""

    work: Collective | None
    read: bool = False


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
        plan = self.plan
        copied, tied = plan.expert_copies > 1, bool(self.tied)
        apart = plan.gathers_fp8 and plan.hook.even_buckets and plan.runtime.fp8_buffers
        for number in range(len(self.parts) - 1, -1, -1):
            for gradient in self.parts[number].gradients:
                if tied if gradient.tied else copied or not gradient.spread:
                    left = gradient.weights_left if weights_only else gradient.left
                    shared = gradient.tied or (self.shared_embedding and gradient is self.parts[0].gradients[-1])
                    yield Gradient(gradient.shape, Cut(number, left), gradient.spread, shared, apart and gradient.fp8)

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
        works, taken = self._update(shards, gradient_shards)
        freed = self.held_gradients(self.freed) if self.freed else ()
        for number, (work, held) in enumerate(works):
            stream = COMPUTE if isinstance(work, Block) else work.label
            allocated, given_back = () if number else taken, taken + freed if number == len(works) - 1 else ()
            after = (self.add(Op(stream, work, after, allocated, given_back, held=held)),)
        self.has_gradients, self.freed, ref = False, 0.0, after[0]
        return self.host.store(self.sharded(shards), ref) if self.host.has_parameters else ref

    @once
    def _update(self, shards: float, gradient_shards: int) -> tuple[list[tuple[Block | Collective, bool]], Memory]:
        """The blocks of an update, and what ranks agree on between them, each with whether the host waits before it launches it;
        and what an update takes while it runs.
        """
        plan, held = self.plan, False
        works, launches = list[tuple[Block | Collective, bool]](), list[tuple[int, Item]]()
        for launch in self._launches(shards, gradient_shards):
            if not isinstance(launch, _Agreement):
                launches.append(launch)
                continue
            works.append((Block("optimizer", _runs(launches)), held))
            if launch.work is not None:
                works.append((launch.work, False))
            launches, held = [], launch.read
        last = Block("optimizer", (*_runs(launches), *matrix_products(plan, self.parts, round(shards))))
        distinct = [part for part, _ in self.kinds]  # the last one, which may have a copy of the embedding, too
        largest = max(tensors(distinct, self.model, self.tied, apart=False), default=0)
        return [*works, (last, held)], (("gradient", update_workspace(plan, self.updated(shards), largest)),)

    def _groups(self, shards: float) -> list[float]:
        """Elements that are updated at once: all, or where parts are timed one by one those of each part."""
        if not self.plan.kernel_set.times_parts:
            return [self.updated(shards)]
        given = [part.parameters for part in self.parts if part.name not in self.plan.outside_optimizer]
        return [elements / shards for elements in (*given, self.tied) if elements]

    def _launches(self, shards: float, gradient_shards: int) -> Iterator[tuple[int, Item] | _Agreement]:
        """The kernels of an update, each with how often it is launched, and what ranks agree on between them.

        The host of Megatron-LM reads the norm of all gradients, and whether an infinity is among those of fp16
        (_unscale_main_grads_and_check_for_nan in megatron/core/optimizer/optimizer.py). Of pipelines, whose steps are long, that
        is left out: all stages meet for it when the first one, which ends last, has its gradients; and so it is of PipeDream's.
        Its all-reduce is one of all ranks; here those that share the optimizer's states have one of their own, an op like their
        others: ranks that meet inside blocks are replayed as one, and blocks would be taken to meet it on their links.
        """
        plan, tensors = self.plan, self._updated_tensors(shards)
        reads = (
            {NORM, UNSCALING} if plan.runtime.reads_norm and plan.pp == 1 and schedules[plan.schedule].versions is None else ()
        )
        sharing = plan.sharing if shards > 1 else ()
        inside = tuple(axis for axis, degree in plan.grid.sizes if degree > 1 and axis in {"tp", "ep"} - set(sharing))
        yield from ((1, work) for work in self._replicated(gradient_shards))
        for times, kernel in kernels_of(plan, plan.copies, self._groups(shards), self.sharded(gradient_shards), tensors):
            yield times, kernel
            if kernel.label in reads:
                if inside:
                    yield 1, _agreed(FLOAT, kernel.label, plan.algorithm, inside)
                yield _Agreement(_agreed(FLOAT, kernel.label, plan.algorithm, sharing) if sharing else None, read=True)
            elif kernel.label == PARAMETER_COPY and plan.gathers_fp8 and plan.runtime.fp8_buffers and shards > 1:
                yield from self._casts(shards, tensors)
        rest = left_to_adam(plan, self.parts) / shards
        if rest:
            yield 1, update_pass("adam's second moment", 2 * rest)

    def _casts(self, shards: float, tensors: int) -> Iterator[tuple[int, Item] | _Agreement]:
        """16-bit copies of a rank's parts of `tensors` parameters are made fp8 where they are gathered so: their maxima are
        taken, unless scales are of past steps, ranks agree on those of whole matrices, and each is cast
        (transformer_engine/pytorch/tensor/utils.py, cast_master_weights_to_fp8). In mxfp8 all of that is left to who gathers.
        """
        plan, elements = self.plan, self.fp8_parameters / self._elements * self.updated(shards)
        fp8 = [gradient.fp8 for part, count in self.kinds for gradient in part.gradients * count]
        matrices = sum(fp8)
        if not matrices or plan.fp8 is None or plan.fp8.scaling == "mxfp8":
            return
        times = math.ceil(tensors * matrices / len(fp8))
        if plan.fp8.scaling != "delayed":
            yield times, update_pass("weight maxima", plan.bytes_per_element * elements / times)
        yield _Agreement(_agreed(FLOAT * matrices, "fp8 maxima", plan.algorithm, plan.sharing))
        yield times, update_pass("weight cast", (plan.bytes_per_element + plan.least_gathered) * elements / times)

    def _updated_tensors(self, shards: float) -> int:
        """Of how many parameters a rank updates at least a part, where that matters: ranks cut buckets, or whole parts of the
        model (Megatron-LM's FSDP), in equal pieces, wherever parameters end.
        """
        if not self.plan.runtime.copies_each_tensor:
            return 1
        together = [(count, sum(not gradient.tied for gradient in part.gradients)) for part, count in self.kinds]
        if shards > 1 and self.plan.hook.even_buckets:
            together = [(1, len(bucket.shapes)) for bucket in self.buckets()]
        return max(1, math.ceil(sum(count * (1 + (tensors - 1) / shards) for count, tensors in together if tensors)))

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


def _runs(launches: Iterable[tuple[int, Item]]) -> tuple[Run, ...]:
    """Kernels, and how often each is launched, as runs."""
    every = groupby(launches, itemgetter(0))
    return tuple(Run(times, shared(tuple(item for _, item in items))) for times, items in every)


@lru_cache(maxsize=1024)
def _agreed(size: float, label: str, algorithm: str, along: tuple[str, ...]) -> Collective:
    """One object for all stages: an all-reduce of few numbers."""
    return Collective("all_reduce", float(size), along[-1], label, algorithm, 1, FLOAT, along=along)


@lru_cache(maxsize=1024)
def _summed_over_tp(size: float, algorithm: str, width: int) -> Collective:
    """One object for all stages that sum as much."""
    return Collective("all_reduce", size, "tp", "replicated gradients", algorithm, 1, width)
