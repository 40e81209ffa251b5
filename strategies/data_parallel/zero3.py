"""ZeRO-3 (FSDP's full sharding): parameters are sharded too, and gathered part by part just before they are used.

Rajbhandari et al. 2020, arXiv:1910.02054, section 7.2: an all-gather for the forward pass, one for the backward pass, a
reduce-scatter of gradients: 3Ψ·(n−1)/n per microbatch. Without `reshard` (FSDP2's reshard_after_forward=False) parameters stay
for the backward pass, and it is 2Ψ. With `shard` below dp (FSDP2's HSDP), gradient shards are all-reduced over the replicas. With
overlap the next part is gathered while the present one computes (prefetch depth 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.program import Collective, Memory, Op, Ref
from strategies.data_parallel import Hook, Moves, hooks
from strategies.plan import Resolved
from strategies.stage import Stage

Compute = Callable[[Stage, int, int, tuple[Ref, ...]], Ref]  # adds a pass of one part: stage, microbatch, part, after


@hooks("zero3")
class Zero3(Hook):
    """Sharded parameters, gradients and optimizer states."""

    shards = frozenset({"optimizer", "gradient", "parameter"})

    def __init__(self) -> None:
        self._gathers: dict[tuple[int, tuple[str, ...]], Collective] = {}

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gather, compute and release each part."""
        if stage.plan.copies == 1:
            return stage.forward(microbatch, after)
        return self._pass(stage, microbatch, after, range(len(stage.parts)), self._forward)

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """The same in reverse, and a reduce-scatter of each part's gradients. Weight gradients alone need no parameters."""
        if stage.plan.copies == 1:
            return stage.whole_backward(microbatch, after, weights_only)
        if not weights_only:
            return self._pass(stage, microbatch, after, range(len(stage.parts) - 1, -1, -1), self._backward)
        for part in range(len(stage.parts) - 1, -1, -1):
            ref = stage.weight_gradient(microbatch, after, part, part + 1, allocate=self._gradient(stage, part))
            reduced = self._reduce(stage, part, ref)
            after = () if stage.plan.plan.overlap else (reduced,)
        return ref

    def input_gradient(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gathers like a backward pass, reduces nothing."""
        if stage.plan.copies == 1:
            return stage.input_gradient(microbatch, after)
        return self._pass(stage, microbatch, after, range(len(stage.parts) - 1, -1, -1), self._input)

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """Of every microbatch: parameters forward, and once more backward when they were released; gradients."""
        gathers = plan.microbatches * (1 + plan.plan.reshard)
        return Moves(gathers * plan.plan.bytes_per_element, plan.microbatches * plan.plan.bytes_per_gradient)

    def _pass(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], order: Sequence[int], compute: Compute) -> Ref:
        overlap = stage.plan.plan.overlap
        if not stage.plan.plan.reshard and compute != self._forward:  # parameters are still there
            for part in order:
                ref = compute(stage, microbatch, part, after)
                after = () if overlap else tuple(stage.reduced[-1:])
            return ref
        computed: list[Ref] = []
        # the first part is gathered when the pass before has released its own, or without overlap when it has computed
        gathered = [self._gather(stage, order[0], self._turn(stage, () if overlap else after))]
        for position, part in enumerate(order):
            if overlap and position + 1 < len(order):  # launched before the compute that it hides behind
                gathered.append(self._gather(stage, order[position + 1], tuple(computed[-1:])))
            waits = (gathered[position], *(after if not position else ()))
            computed.append(compute(stage, microbatch, part, waits))
            if not overlap and position + 1 < len(order):
                gathered.append(self._gather(stage, order[position + 1], (computed[-1], *stage.reduced[-1:])))
        return computed[-1]

    def _turn(self, stage: Stage, after: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """What the first gather of a pass waits for: the last compute of the pass before."""
        before = stage.last_compute()
        return after if before is None else (*after, before)

    def _forward(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        free = self._whole(stage, part) if stage.plan.plan.reshard else ()
        return stage.forward(microbatch, after, part, part + 1, free=free)

    def _input(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        return stage.input_gradient(microbatch, after, part, part + 1, free=self._whole(stage, part))

    def _backward(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        gradient = self._gradient(stage, part)
        ref = stage.backward(microbatch, after, part, part + 1, allocate=gradient, free=self._whole(stage, part))
        self._reduce(stage, part, ref)
        return ref

    def _reduce(self, stage: Stage, part: int, after: Ref) -> Ref:
        dense, experts = (elements * stage.plan.plan.bytes_per_gradient for elements in self._elements(stage, part))
        return stage.reduce("reduce_scatter", dense, 1, (after,), self._gradient(stage, part), experts)

    def _gradient(self, stage: Stage, part: int) -> Memory:
        """The unsharded gradient of a part, until it is reduced."""
        return (("temporary", sum(self._elements(stage, part)) * stage.plan.plan.bytes_per_gradient),)

    def _gather(self, stage: Stage, part: int, after: tuple[Ref, ...]) -> Ref:
        dense, experts = self._elements(stage, part)
        ref = self._gathering(stage, dense, stage.plan.sharing, after, self._whole(stage, part))
        return self._gathering(stage, experts, stage.plan.expert_sharing, after, ()) if experts else ref

    def _gathering(self, stage: Stage, elements: int, along: tuple[str, ...], after: tuple[Ref, ...], allocate: Memory) -> Ref:
        plan, key = stage.plan.plan, (elements, along)
        if key not in self._gathers:  # one object for equal parts: each distinct piece of work is priced once
            width = plan.bytes_per_element
            size = float(elements * width)
            self._gathers[key] = Collective("all_gather", size, "dp", "parameters", plan.algorithm, 1, width, along=along)
        return stage.add(Op("dp gather", self._gathers[key], after, allocate=allocate))

    def _whole(self, stage: Stage, part: int) -> Memory:
        """The gathered parameters of a part."""
        return (("temporary", sum(self._elements(stage, part)) * stage.plan.plan.bytes_per_element),)

    def _elements(self, stage: Stage, part: int) -> tuple[int, int]:
        """Elements of a part that all ranks along dp and cp share; of its experts, if other ranks have the same."""
        one, last = stage.parts[part], part == len(stage.parts) - 1
        return one.parameters - one.experts + (stage.tied if last else 0), stage.spread(part, part + 1)

    def update(self, stage: Stage) -> None:
        """Update the own shard; parameters are gathered when next used."""
        stage.update(stage.plan.shards, tuple(stage.reduced[-len(stage.parts) :]))
