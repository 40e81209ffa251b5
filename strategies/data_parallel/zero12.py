"""ZeRO-1 and ZeRO-2: optimizer states (and gradients) are sharded over the dp ranks. Rajbhandari et al. 2020, arXiv:1910.02054.

Gradients are reduce-scattered, each rank updates its shard, the new parameters are all-gathered: Ψ + Ψ, the volume of an
all-reduce. DeepSpeed all-reduces gradients instead: 2 Ψ + Ψ. The gather of parameters ends the step, hidden behind nothing, or
with Megatron-LM's `overlap_param_gather` is beside the first forward pass of the next.
ZeRO-1 keeps whole gradients and reduces them once per step; ZeRO-2 keeps only its shard, so every microbatch reduces (as
DeepSpeed and Megatron-LM's FSDP do), or with `gradient_sync: last` keeps whole gradients until the last one. With `shard` below
dp, the gradient shards of the replicas are then all-reduced, of Megatron-LM's FSDP in the last microbatch only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise

from sim.program import Collective, Memory, Op, Ref
from strategies.data_parallel import hooks
from strategies.data_parallel.buckets import Bucket
from strategies.data_parallel.hook import Hook, Moves
from strategies.lowering.stage import Stage, in_buckets
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


@hooks("zero1")
class Zero1(Hook):
    """Sharded optimizer states."""

    shards = frozenset({"optimizer"})
    scatters = flat = framework_buckets = even_buckets = whole_gradients = zero_stage = blocks = True

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[Ref, ...]] = {}  # of rank and chunk, the last compute before its first pass

    @classmethod
    def gathers_wait(cls, plan: Resolved) -> bool:
        """All but those of the interleaved schedule, which ranks launch together."""
        return _gathers_beside(plan) and not _aligned(plan)

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """With overlap_param_gather the first pass of a step waits for each bucket of parameters before a layer that uses it, and
        the next bucket is launched there (megatron/core/distributed/param_and_grad_buffer.py, finish_param_sync). In the
        interleaved schedule the buckets of two chunks are launched first, and of each other when the first pass of the chunk
        before begins (megatron/core/pipeline_parallel/schedules.py, param_sync_func; align_param_gather).
        """
        rank, chunk = stage.rank, stage.chunk
        if not _gathers_beside(stage.plan) or (rank, chunk) in self._before:
            return super().forward(stage, microbatch, after)
        before = stage.last_compute()
        self._before[rank, chunk] = () if before is None else (before,)
        launched = (self._before[rank, chunk - 1] if chunk > 1 else ()) if _aligned(stage.plan) else None
        buckets = defaultdict[int, list[Bucket]](list)
        for bucket in reversed(stage.buckets()):
            buckets[bucket.cut.part].append(bucket)
        ready = _gather(stage, buckets[0], after if launched is None else launched)
        for first, last in pairwise((*sorted(buckets), len(stage.parts))):
            following = _gather(stage, buckets.get(last, ()), after if launched is None else launched)
            after = (stage.forward(microbatch, (*after, *ready), first, last),)
            ready = following
        return after[0]

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Buckets are reduce-scattered in the last microbatch only."""
        if stage.alone or not last:
            return stage.whole_backward(microbatch, after, weights_only)
        return stage.backward_in_buckets(
            microbatch, after, partial(stage.reduce_bucket, self._operation(stage.plan)), weights_only
        )

    @classmethod
    def _operation(cls, plan: Resolved) -> str:
        """How a bucket is reduced. DeepSpeed all-reduces it by default (deepspeed/runtime/zero/stage_1_and_2.py,
        allreduce_and_scatter), and where 16-bit gradients are added to fp32 ones always (runtime/bf16_optimizer.py;
        runtime/pipe/engine.py, _bf16_reduce_grads).
        """
        runtime = plan.runtime
        wide = runtime.casts_gradients and plan.bytes_per_gradient > plan.bytes_per_element and "gradient" not in cls.shards
        return "all_reduce" if runtime.all_reduces_gradients or wide else "reduce_scatter"

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """Gradients once, parameters after the update."""
        return cls._moved(plan, plan.bytes_per_gradient, late=True)

    @classmethod
    def _moved(cls, plan: Resolved, reduced: float, late: bool) -> Moves:
        """What moves if so many bytes per parameter are reduced."""
        gathered = reduced if cls._operation(plan) == "all_reduce" else 0
        return Moves(gathered=gathered, reduced=reduced, last=0 if _gathers_beside(plan) else plan.least_gathered, late=late)

    def resident(self, stage: Stage) -> Memory:
        """What fills the gaps of Megatron-LM's buffers.

        DeepSpeed's buffers, into which gradients are copied as they are made: two with overlap. Its BF16_Optimizer has none, but
        gradients of 16 bits, which stay beside fp32 ones until the next backward pass, and reduces the latter where they are
        (deepspeed/runtime/bf16_optimizer.py, backward, get_grads_for_reduction).
        """
        plan = stage.plan
        room = plan.runtime.reduce_bucket_size
        if plan.copies == 1:
            return ()
        if room is None:
            gaps = float(sum(bucket.padding for bucket in stage.buckets()))
            return (("parameter", gaps * plan.bytes_per_element), ("gradient", gaps * plan.bytes_per_gradient)) if gaps else ()
        if plan.casts_gradients:
            return (("gradient", float(plan.bytes_per_element * stage.parameters)),)
        return (("buffer", float(room * plan.bytes_per_gradient * (1 + plan.overlap))),)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """Reductions follow the pass, and the next pass waits."""
        return True

    def update(self, stage: Stage) -> None:
        """Update the own shard, then gather everybody's, unless the next step does."""
        shards, plan = stage.plan.shards, stage.plan
        updated = stage.update(shards, tuple(stage.reduced), shards if "gradient" in self.shards else 1)
        if shards == 1 or _gathers_beside(plan):
            return
        every, experts = len(stage.parts), sum(part.experts for part in stage.parts)
        dense = stage.parameters - experts, stage.plan.sharing, False
        for elements, along, spread in (dense, (stage.spread(0, every), stage.plan.expert_sharing, True)):
            if elements:
                elements += sum(bucket.padding for bucket in stage.buckets() if bucket.spread == spread)
                width = stage.gathered_width(0, every, spread)
                size = plan.runtime.allgather_bucket_size or stage.limits.size
                count = in_buckets(elements, size)
                size = elements * width / count
                gather = Collective("all_gather", size, "dp", "parameters", plan.algorithm, count, width, along=along)
                stage.add(Op("dp", gather, (updated,)))


def _gathers_beside(plan: Resolved) -> bool:
    """Whether parameters are gathered beside the first forward pass."""
    return plan.kernel_set.overlap_param_gather and plan.shards > 1


def _aligned(plan: Resolved) -> bool:
    """Whether pipeline ranks launch gathers together (Megatron-LM's default of align_param_gather)."""
    return plan.schedule == "interleaved"


def _gather(stage: Stage, buckets: Iterable[Bucket], after: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """All-gather buckets of parameters, one after another; the last of them, if there are any."""
    gathered: tuple[Ref, ...] = ()
    for bucket in buckets:
        elements = bucket.elements + bucket.padding
        size = float(stage.plan.bytes_per_element * (elements - bucket.fp8) + stage.plan.least_gathered * bucket.fp8)
        along = stage.plan.expert_sharing if bucket.spread else stage.plan.sharing
        work = _gathering(size, stage.plan.algorithm, size / elements, along)
        gathered = (stage.add(Op("dp", work, gathered or after)),)
    return gathered


@lru_cache(maxsize=1024)
def _gathering(size: float, algorithm: str, width: float, along: tuple[str, ...]) -> Collective:
    """One object for buckets of one size: it is priced once."""
    return Collective("all_gather", size, "dp", "parameters", algorithm, 1, width, along=along)


@hooks("zero2")
class Zero2(Zero1):
    """Sharded optimizer states and gradients."""

    shards = frozenset({"optimizer", "gradient"})
    whole_gradients = even_buckets = False

    def __init__(self) -> None:
        super().__init__()
        self._accumulated: set[int] = set()  # stages that have whole gradients, which are not reduced yet

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """Gradients of every microbatch, or of the last."""
        late = plan.syncs_gradients == "last"
        times = 1 if late else plan.microbatches
        return cls._moved(plan, times * plan.bytes_per_gradient, late)

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Buckets are reduce-scattered in every microbatch, or in the last, and their memory given back."""
        if stage.alone:
            return stage.whole_backward(microbatch, after, weights_only)
        stage.last_microbatch = last
        copied, there = stage.plan.runtime.own_buffers, stage.number in self._accumulated
        if stage.plan.syncs_gradients == "last":
            (self._accumulated.discard if last else self._accumulated.add)(stage.number)
            if not last:
                run = stage.weight_gradient if weights_only else stage.backward
                every: Memory = () if there else tuple(map(stage.gradients_of, stage.buckets(weights_only)))
                return run(microbatch, after, allocate=every)

        def takes(buckets: Sequence[Bucket]) -> tuple[Memory, Memory]:
            largest = max(math.prod(shape) for bucket in buckets for shape in bucket.shapes)
            # each is copied to the bucket's buffer as it is made
            moved: Memory = (("gradient", float(stage.plan.bytes_per_gradient * largest)),)
            return (() if copied or there else tuple(map(stage.gradients_of, buckets))) + moved, moved

        def reduce(bucket: Bucket, completed: Ref) -> None:
            stage.reduce_bucket(self._operation(stage.plan), bucket, completed, () if copied else (stage.gradients_of(bucket),))

        return stage.backward_in_buckets(microbatch, after, reduce, weights_only, takes)
