"""One pipeline stage being lowered: its parts in order, and the ops added so far; hooks write programs with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sim.program import COMPUTE, Block, Cohort, Collective, Kernel, Memory, Op, Ref, Run
from strategies.layers import Part
from strategies.plan import Resolved

FORWARD, BACKWARD = "forward", "backward"


class Stage:
    """Stage `number` of the pipeline: `parts` (embedding, layers, head) on every rank of one cohort."""

    def __init__(self, number: int, cohort: int, parts: Sequence[Part], plan: Resolved) -> None:
        self.number, self.cohort_number, self.parts, self.plan = number, cohort, tuple(parts), plan
        self.cohort = Cohort({"pp": number})
        self.tied = 0  # parameters of a second copy of the tied embedding
        self.reduced: list[Ref] = []  # gradient collectives that the update waits for
        self._reductions: dict[tuple[str, float, int], Collective] = {}
        self._blocks: dict[tuple[str, int, int], tuple[Block, Memory, Memory]] = {}

    @property
    def parameters(self) -> int:
        """Elements on one rank of the stage, before any data parallel sharding."""
        return sum(part.parameters for part in self.parts) + self.tied

    def add(self, op: Op) -> Ref:
        """Append an op; its address."""
        return Ref(self.cohort_number, self.cohort.add(op))

    def forward(
        self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None, free: Memory = ()
    ) -> Ref:
        """Forward pass of parts first … last − 1: their activations stay, their workspace does not."""
        block, allocate, given_back = self._block(FORWARD, first, len(self.parts) if last is None else last)
        return self.add(Op(COMPUTE, block, after, allocate, given_back + free if free else given_back, microbatch))

    def backward(self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None,
                 allocate: Memory = (), free: Memory = ()) -> Ref:  # fmt: skip
        """Backward pass of parts last − 1 … first, which gives their activations back."""
        block, taken, given_back = self._block(BACKWARD, first, len(self.parts) if last is None else last)
        return self.add(Op(COMPUTE, block, after, taken + allocate, given_back + free, microbatch))

    def _block(self, direction: str, first: int, last: int) -> tuple[Block, Memory, Memory]:
        """The block, what it allocates and what it frees; one object for all microbatches."""
        key = (direction, first, last)
        if key not in self._blocks:
            forward, parts = direction == FORWARD, self.parts[first:last]
            order = parts if forward else parts[::-1]
            runs = tuple(Run(len(list(same)), part.forward if forward else part.backward) for part, same in groupby(order))
            saved = (("activation", sum(part.saved for part in parts)),)
            work = (("temporary", max(part.temporary + (0.0 if forward else part.restored) for part in parts)),)
            self._blocks[key] = Block(direction, runs), (saved + work if forward else work), (work if forward else saved + work)
        return self._blocks[key]

    def buckets(self, size: float) -> list[tuple[int, int, float, int]]:
        """Gradients in the order in which the backward pass makes them: (first part, last part + 1, bytes of a bucket, buckets).

        A bucket is full at the end of a part; a part bigger than a bucket is several of equal size (PyTorch DDP's buckets
        hold whole parameters: Li et al. 2020, arXiv:2006.15704, section 4.2).
        """
        result, end, held = [], len(self.parts), 0.0
        for first in range(len(self.parts) - 1, -1, -1):
            held += self.parts[first].parameters * self.plan.plan.bytes_per_gradient
            if first == len(self.parts) - 1:
                held += self.tied * self.plan.plan.bytes_per_gradient
            if held >= size or first == 0:
                count = max(1, -int(-held // size))
                result.append((first, end, held / count, count))
                end, held = first, 0.0
        return result

    def reduce(
        self, operation: str, size: float, count: int, after: tuple[Ref, ...], allocate: Memory = (), free: Memory = ()
    ) -> Ref:
        """Reduce gradients over the dp ranks: `count` collectives of `size` bytes."""
        key = operation, size, count
        if key not in self._reductions:  # one object for equal buckets: each distinct piece of work is priced once
            plan = self.plan.plan
            self._reductions[key] = Collective(operation, size, "dp", "gradients", plan.algorithm, count, plan.bytes_per_gradient)
        ref = self.add(Op("dp", self._reductions[key], after, allocate, free))
        self.reduced.append(ref)
        return ref

    def backward_in_buckets(self, microbatch: int, after: tuple[Ref, ...], operation: str, passing: bool = False) -> Ref:
        """Backward pass that reduces each bucket of gradients as soon as it is complete; without overlap, all at the end.

        passing: whole gradients exist only from the backward pass to their reduction (otherwise they are resident).
        """
        plan = self.plan.plan
        buckets = self.buckets(plan.bucket)
        held: list[Memory] = [(("gradient", size * count),) if passing else () for _, _, size, count in buckets]
        if not plan.overlap:
            ref = self.backward(microbatch, after, allocate=sum(held, ()))
            for (_, _, size, count), memory in zip(buckets, held, strict=True):
                self.reduce(operation, size, count, (ref,), free=memory)
            return ref
        for (first, last, size, count), memory in zip(buckets, held, strict=True):
            ref = self.backward(microbatch, after, first, last, allocate=memory)
            self.reduce(operation, size, count, (ref,), free=memory)
            after = ()
        return ref

    def update(self, shards: int, after: tuple[Ref, ...]) -> Ref:
        """The optimizer's pass over 1/shards of the parameters; bound by memory traffic.

        Per parameter: the gradient is read, each optimizer state (and the fp32 master) is read and written, the weight is
        written.
        """
        plan = self.plan.plan
        width = plan.bytes_per_element
        traffic = plan.bytes_per_gradient + 2 * plan.bytes_per_optimizer_state + (width if width == 2 else 2 * width)
        count = self.parameters / shards
        kernel = Kernel("optimizer", plan.optimizer, "optimizer", 0.0, traffic * count, "fp32")
        block = Block("optimizer", (Run(1, (*self._replicated(), kernel)),))
        return self.add(Op(COMPUTE, block, after))

    def _replicated(self) -> tuple[Collective, ...]:
        """With sequence parallelism each tp rank has the gradients of norms for its tokens only; they are summed over the tp
        ranks.

        Megatron-LM does this between the backward pass and the update (finalize_model_grads).
        """
        plan = self.plan.plan
        size = sum(part.replicated for part in self.parts) * plan.bytes_per_gradient
        if not plan.sequence_parallel or not size:
            return ()
        return (Collective("all_reduce", size, "tp", "replicated gradients", plan.algorithm, 1, plan.bytes_per_gradient),)
