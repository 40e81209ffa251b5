"""One pipeline stage being lowered: its parts in order, and the ops added so far; hooks write programs with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from sim.program import CACHED, COMPUTE, WRAPPER_COPY, Block, Cohort, Collective, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.buckets import Bucket, Cut, Gradient, Limits, filled, limits
from strategies.data_parallel.shard_padding import padded
from strategies.layers.layer_cost import LayerCost
from strategies.layers.operators import Shape
from strategies.layers.weight_matrices import tensors
from strategies.lowering.blocks import BACKWARD, FORWARD, INPUT, WEIGHT, Making, runs, workspace
from strategies.lowering.host import Host
from strategies.lowering.optimizer_step import kernels_of, on_the_cpus, taken_by
from strategies.models.model import Model
from strategies.plan.options import FP8_WIDTH
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

OPS = 500_000  # of all stages in one step: some ten seconds and a gigabyte


def in_buckets(size: float, bucket: float) -> int:
    """How many equal collectives of at most `bucket` bytes carry `size` bytes."""
    return max(1, -int(-size // bucket))


def _summed(memory: Memory) -> Memory:
    """One entry of each kind: of gradients less is taken at first than there will be."""
    total: dict[str, float] = {}
    for kind, size in memory:
        total[kind] = total.get(kind, 0.0) + size
    return tuple(total.items())


class Stage:
    """Virtual stage `number` of the pipeline: `parts` (embedding, layers, head), the chunk `chunk` of pipeline rank `rank`."""

    def __init__(
        self, number: int, rank: int, chunk: int, cohort: Cohort, parts: Sequence[LayerCost], plan: Resolved, model: Model
    ) -> None:
        self.number, self.rank, self.chunk, self.cohort = number, rank, chunk, cohort
        self.parts, self.plan, self.model = tuple(parts), plan, model
        self.tied = 0  # parameters of a second copy of the tied embedding
        self.received = self.output = 0.0  # bytes per microbatch, with kernels=torch: see `buffers`
        self.reduced: list[Ref] = []  # gradient collectives that the update waits for
        self.has_gradients, self.freed = False, 0.0  # of a microbatch before; bytes of gradients that the update frees
        self.host = Host(plan, rank, self.add)
        self._reductions: dict[tuple[str, float, int, tuple[str, ...]], Collective] = {}
        self._blocks: dict[tuple[str, Cut, Cut, str, float], tuple[Block, Memory, Memory]] = {}
        self._buckets: dict[bool, list[Bucket]] = {}
        self._copied: dict[tuple[int, str, tuple[float, ...]], tuple[Block, Block]] = {}  # without and with passes of copies

    @property
    def alone(self) -> bool:
        """Whether its rank shares its parameters with no other rank and nothing with the host."""
        return self.plan.copies == 1 and self.plan.offload is None and not self.host.checkpoints

    def checkpoint(self, part: int) -> Memory:
        """What a part has in the CPUs' memory between its passes."""
        one = self.parts[part]
        return (("activation", one.saved),) if self.host.checkpoints and one.name == "layer" else ()

    @property
    def parameters(self) -> int:
        """Elements on one rank of the stage, before any data parallel sharding."""
        return sum(part.parameters for part in self.parts) + self.tied

    def buffers(self, size: float, before: bool, after: bool) -> Memory:
        """What torch.distributed.pipelining holds for transfers of `size` bytes from the stage before and to the stage after.

        Buffers for what it will receive of every microbatch stay for the whole step (an activation is used where it was
        received), and a stage's result stays until its backward pass, also the logits (torch 2.13, PipelineStage).
        """
        plan, head = self.plan, self.parts[-1]
        self.received = size if before else 0.0
        self.output = size if after else head.logits
        return (("buffer", plan.microbatches * size * (before + after)),)

    def sharded(self, shards: float) -> float:
        """Elements that a rank has when the ranks with the same parameters share them out over `shards` of them: of experts,
        which differ from ep rank to ep rank, fewer ranks have the same.
        """
        if shards == self.plan.shards:
            every = [self._padded(part) for part in range(len(self.parts))]
            return sum(dense for dense, _ in every) / shards + sum(experts for _, experts in every) / self.expert_shards
        experts = sum(part.experts for part in self.parts)
        return (self.parameters - experts) / shards + experts / max(1, shards // self.plan.ep_of_dp)

    @property
    def expert_shards(self) -> int:
        """How many ranks share out the same experts."""
        return max(1, self.plan.shards // self.plan.ep_of_dp)

    def shapes(self, part: int, spread: bool = False) -> list[Shape]:
        """Of a part's parameters on this rank; spread: of its experts that are spread over ep ranks."""
        return [one.shape for one in self.parts[part].gradients if one.spread == spread and (self.tied or not one.tied)]

    def shared(self, part: int) -> tuple[int, int]:
        """Elements of a part, and of its experts, that several ranks have, with what fills them up when these shard them."""
        dense, experts = self._padded(part)
        return dense, experts if self.plan.expert_copies > 1 else 0

    def _padded(self, part: int) -> tuple[int, int]:
        dense, experts = self.shapes(part), self.shapes(part, spread=True)
        return padded(self.plan, dense, self.plan.shards), padded(self.plan, experts, self.expert_shards)

    def gathered_width(self, first: int, last: int, experts: bool = False) -> float:
        """Mean bytes of a parameter of parts first … last − 1 (of their spread experts) on its way when it is gathered."""
        wide, parts = self.plan.bytes_per_element, self.parts[first:last]
        if not self.plan.gathers_fp8:
            return wide
        narrow = sum(part.narrow_experts if experts else part.narrow for part in parts)
        every = sum(part.experts if experts else part.parameters - part.experts for part in parts)
        return wide - (wide - FP8_WIDTH) * narrow / max(1, every + (0 if experts or last < len(self.parts) else self.tied))

    @property
    def cached(self) -> Memory:
        """fp8 copies of weights, by rows and by columns, that Transformer Engine keeps beside whole 16-bit parameters."""
        plan = self.plan
        if plan.fp8 is None or plan.fp8.gather or plan.kernel_set.torchao or plan.shards_parameters:
            return ()
        return (("parameter", 2.0 * FP8_WIDTH * sum(part.narrow + part.narrow_experts for part in self.parts)),)

    def spread(self, first: int, last: int) -> int:
        """Elements of the experts of parts first … last − 1 when other ranks have the same ones; 0 when each has its own."""
        return sum(part.experts for part in self.parts[first:last]) if self.plan.expert_copies > 1 else 0

    def add(self, op: Op) -> Ref:
        """Append an op; its address. Raises UserError when a step has more than can be played in seconds and a gigabyte."""
        if len(self.cohort.ops) * self.plan.pp >= OPS:
            raise UserError(f"plan: a step of more than {OPS:,} ops of all stages is not played: fewer microbatches, or layers")
        op.chunk = self.chunk
        return Ref(self.rank, self.cohort.add(op))

    def copy(self, label: str, phase: str, moved: tuple[float, ...], ref: Ref, first: bool = False) -> None:
        """Add passes over so many bytes of memory to a compute op, at its end or before it. A profile with measured wrapping has
        them in its collectives already.
        """
        op = self.cohort.ops[ref.op]
        assert isinstance(op.work, Block)
        key = id(op.work), label, moved
        if key not in self._copied:  # one object for all microbatches
            dtype = self.plan.precision
            run = Run(1, tuple(Kernel("memory", label, phase, 0.0, each, dtype, variant=WRAPPER_COPY) for each in moved))
            self._copied[key] = op.work, replace(op.work, runs=(run, *op.work.runs) if first else (*op.work.runs, run))
        op.work = self._copied[key][1]

    def last(self, stream: str) -> Ref | None:
        """The op that is last so far on a stream of the stage's rank."""
        ops = self.cohort.ops
        last = next((number for number in range(len(ops) - 1, -1, -1) if ops[number].stream == stream), None)
        return None if last is None else Ref(self.rank, last)

    def last_compute(self) -> Ref | None:
        """The same of its compute stream."""
        return self.last(COMPUTE)

    def forward(
        self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None, free: Memory = ()
    ) -> Ref:
        """Forward pass of parts first … last − 1: their activations stay, their workspace does not."""
        block, allocate, given_back = self._block(FORWARD, Cut(len(self.parts) if last is None else last), Cut(first))
        return self.add(Op(COMPUTE, block, after, allocate, given_back + free if free else given_back, microbatch))

    def backward(
        self,
        microbatch: int,
        after: tuple[Ref, ...] = (),
        first: int = 0,
        last: int | None = None,
        allocate: Memory = (),
        free: Memory = (),
        absent: float = 0.0,
    ) -> Ref:
        """Backward pass of parts last − 1 … first, which gives their activations back.

        allocate: the parameters' gradients, where they are not resident; they are made one by one. absent: bytes that were taken
        before, but are not there during the backward of the loss.
        """
        start = Cut(len(self.parts) if last is None else last)
        block, taken, given_back = self._block(BACKWARD, start, Cut(first), allocate[0][0] if allocate else "", absent)
        return self.add(Op(COMPUTE, block, after, _summed(taken + allocate), given_back + free, microbatch))

    def between(
        self,
        way: str,
        microbatch: int,
        after: tuple[Ref, ...],
        start: Cut,
        end: Cut,
        allocate: Memory = (),
        free: Memory = (),
        passing: str = "",
    ) -> Ref:
        """What of a backward pass or of its second half is between two moments. allocate: beside its workspace; passing: the kind
        of memory of all gradients that it makes, which are made one by one.
        """
        block, taken, given_back = self._block(way, start, end, passing)
        return self.add(Op(COMPUTE, block, after, _summed(taken + allocate), given_back + free, microbatch))

    def whole_backward(self, microbatch: int, after: tuple[Ref, ...], weights_only: bool) -> Ref:
        """Backward pass of all parts, or its second half, which reduces nothing."""
        made = self.made(self.parameters)
        self.has_gradients = True
        return (self.weight_gradient if weights_only else self.backward)(microbatch, after, allocate=made)

    def made(self, elements: float) -> Memory:
        """What a backward pass takes for so many gradients that stay until the update frees them; nothing when they stay for ever
        or when it adds to those of a microbatch before.
        """
        if not self.plan.frees_gradients or self.has_gradients:
            return ()
        size = float(elements * self.plan.bytes_of_states["gradient"])
        self.freed += size
        return (("gradient", size),)

    def input_gradient(
        self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None, free: Memory = ()
    ) -> Ref:
        """First half of a backward pass: what the weight gradients need stays until the second half."""
        block, taken, given_back = self._block(INPUT, Cut(len(self.parts) if last is None else last), Cut(first))
        return self.add(Op(COMPUTE, block, after, taken, given_back + free, microbatch))

    def weight_gradient(
        self,
        microbatch: int,
        after: tuple[Ref, ...] = (),
        first: int = 0,
        last: int | None = None,
        allocate: Memory = (),
        free: Memory = (),
    ) -> Ref:
        """Second half of a backward pass."""
        block, taken, given_back = self._block(WEIGHT, Cut(len(self.parts) if last is None else last), Cut(first))
        return self.add(Op(COMPUTE, block, after, taken + allocate, given_back + free, microbatch))

    def memory(self, direction: str, part: int, passing: str = "") -> tuple[Memory, Memory]:
        """What a part's pass takes and gives back. passing: besides its parameters' gradients of this kind, which it makes."""
        return self._block(direction, Cut(part + 1), Cut(part), passing)[1:]

    def _block(
        self, direction: str, start: Cut, end: Cut, passing: str = "", absent: float = 0.0
    ) -> tuple[Block, Memory, Memory]:
        """The block of what is between two moments of a pass (forward, from `end` to `start`), what it allocates and what it
        frees; one object for all microbatches. Of a part that is cut each piece needs the workspace of all of it.
        """
        key = (direction, start, end, passing, absent)
        if key not in self._blocks:
            last = start.part + (start.left > 0)
            parts, over = self.parts[end.part : last], self.parts[end.part + (end.left > 0) : last]
            kept = self.output if over and last == len(self.parts) else 0.0
            kept -= self.received if not (end.part or end.left) else 0.0
            making, begun = self._making(start, end) if passing else None, start.left > 0
            most = workspace(parts, direction, absent, 0.0, making, begun)
            kept_back = workspace(parts, direction, absent, self._stranded, making, begun) - most
            less = min(0.0, most)  # what is held in the place of what was saved; or gradients, while that is there
            instead = 0.0 if passing else less
            saved: Memory = (("activation", sum(part.saved for part in over) + kept + instead),)
            held: Memory = (("activation", sum(part.held for part in over) + instead),)
            work: Memory = (("temporary", most - less), (CACHED, kept_back), *([(passing, less)] if passing else []))
            taken = {FORWARD: saved + work, BACKWARD: work, INPUT: held + work, WEIGHT: ()}[direction]
            freed = {FORWARD: work, BACKWARD: saved + work, INPUT: saved + work, WEIGHT: held}[direction]
            self._blocks[key] = Block(direction, runs(parts, direction, start.left, end.left)), taken, freed
        return self._blocks[key]

    def _making(self, start: Cut, end: Cut) -> Making:
        """The gradients that a piece of a backward pass makes."""
        last, width = start.part + (start.left > 0), self.plan.bytes_per_gradient
        made, later = [0.0] * (last - end.part), 0.0
        for part in range(end.part, last):
            for one in self.parts[part].gradients:
                if not one.spread and (self.tied or not one.tied) and Cut(part, one.left) < start:
                    size = float(width * math.prod(one.shape))
                    if Cut(part, one.left) >= end:
                        made[part - end.part] += size
                    else:
                        later += size
        return Making(width, tuple(made), later)

    @property
    def _stranded(self) -> float:
        """Bytes that the caching allocator holds when the loss runs, in blocks that are smaller than its tensors: the workspace
        that layers had forward, and the loss's own.
        """
        return max((0.0, *(part.temporary for part in self.parts[:-1]))) + self.parts[-1].stranded

    @cached_property
    def limits(self) -> Limits:
        """When a bucket of its gradients is full."""
        return limits(self.plan, self.rank, self.chunk)

    def buckets(self, weights_only: bool = False) -> list[Bucket]:
        """What is reduced together, in the order in which a backward pass (weights_only: its second half) makes it."""
        if weights_only not in self._buckets:
            self._buckets[weights_only] = filled(list(self._gradients(weights_only)), self.limits, Cut(0))
        return self._buckets[weights_only]

    def _gradients(self, weights_only: bool) -> Iterator[Gradient]:
        """Of every parameter that other ranks have too."""
        for number in range(len(self.parts) - 1, -1, -1):
            for one in self.parts[number].gradients:
                if self.tied if one.tied else self.plan.expert_copies > 1 or not one.spread:
                    yield Gradient(one.shape, Cut(number, one.weights_left if weights_only else one.left), one.spread)

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
        if self.plan.replicas > 1:
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

    def _replicate(self, size: float, count: int, after: Ref) -> Ref:
        """Sum a reduced shard over the replicas of the sharded copy (HSDP)."""
        key = "replica", size, count, ()
        if key not in self._reductions:
            plan = self.plan
            one = Collective("all_reduce", size, "replica", "gradient shards", plan.algorithm, count, plan.bytes_per_gradient)
            self._reductions[key] = one
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

    def reduce_bucket(self, operation: str, bucket: Bucket, made: Ref, free: Memory = ()) -> None:
        """Reduce a bucket's gradients over the ranks that have the same parameters."""
        size = float(bucket.elements * self.plan.bytes_per_gradient)
        if bucket.spread:
            self.reduced.append(self._reduction(operation, size, 1, self.plan.expert_sharing, (made,), free))
        else:
            self.reduce(operation, size, 1, (made,), free)

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
        buckets, ref = groupby(self.buckets(weights_only), lambda one: one.cut if self.plan.overlap else end), None
        for cut, complete in buckets:
            mine = list(complete)
            taken, given_back = takes(mine) if takes else self._stay(mine)
            after += self.crowded if takes else ()
            passing = "gradient" if taken and not given_back else ""
            ref, after = self.between(way, microbatch, after, start, cut, taken, given_back, passing), ()
            start = cut
            for bucket in mine:
                reduce(bucket, ref)
        self.has_gradients = True
        return self.between(way, microbatch, after, start, end) if ref is None or start != end else ref

    def _stay(self, buckets: Sequence[Bucket]) -> tuple[Memory, Memory]:
        """What a piece of a pass takes for the gradients in buckets that it completes, and gives back: where DDP's gradients are
        views of its buckets, those that autograd has made, and that are copied there one by one.
        """
        plan, elements = self.plan, sum(one.elements for one in buckets)
        if not plan.gradient_as_bucket_view or not plan.frees_gradients:
            return self.made(elements), ()
        if self.has_gradients:
            gone: Memory = (("gradient", float(elements * plan.bytes_per_gradient)),)
            self.freed -= gone[0][1]
            return (), gone
        largest = max(math.prod(shape) for one in buckets for shape in one.shapes)
        moved: Memory = (("gradient", float(largest * plan.bytes_per_gradient)),)
        return moved, moved

    def update(self, shards: float, after: tuple[Ref, ...], made: int = 1) -> Ref:
        """The optimizer's pass over 1/shards of the parameters, and what a step does beside it; bound by memory traffic.

        made: ranks over which gradients are sharded: it is as much of them that a rank sets to zero.
        """
        count, gradients = self.sharded(shards), self.sharded(made)
        plan, replicated = self.plan, self._replicated(made)
        if self.host.updates:
            if replicated:
                after = (self.add(Op(COMPUTE, Block("optimizer", (Run(1, replicated),)), after)),)
            return self.host.update(count, on_the_cpus(plan) * count, after)
        block = Block("optimizer", (Run(1, (*replicated, *kernels_of(plan, self.plan.copies, count, gradients))),))
        largest = max(tensors(self.parts, self.model, self.tied, apart=False), default=0)
        taken: Memory = (("gradient", taken_by(plan, count, largest)),)
        freed: Memory = (("gradient", self.freed),) if self.freed else ()
        ref = self.add(Op(COMPUTE, block, after, taken, taken + freed))
        self.has_gradients, self.freed = False, 0.0
        return self.host.store(count, ref) if self.host.has_parameters else ref

    def _replicated(self, shards: int) -> tuple[Collective, ...]:
        """With sequence parallelism each tp rank has the gradients of norms for its tokens only; they are summed over the tp
        ranks.

        Megatron-LM does this between the backward pass and the update (finalize_model_grads).
        """
        plan = self.plan
        size = sum(part.replicated for part in self.parts) * plan.bytes_per_gradient / shards
        if not plan.sequence_parallel or not size:
            return ()
        return (Collective("all_reduce", size, "tp", "replicated gradients", plan.algorithm, 1, plan.bytes_per_gradient),)
