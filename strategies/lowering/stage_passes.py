"""Passes of a pipeline stage, or of some of its parts, as ops of its rank: blocks, and what they allocate and free."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from sim.op_columns import OPS
from sim.program import CACHED, COMPUTE, PIPELINE_PASS, REDUCED, WRAPPER_COPY, Block, Cohort, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.buckets import Cut
from strategies.layers.layer_cost import LayerCost
from strategies.layers.weight_matrices import tensors
from strategies.lowering.activation_offload import ActivationOffload
from strategies.lowering.blocks import BACKWARD, FORWARD, INPUT, WEIGHT, Making, called, collectives_last, runs, workspace
from strategies.lowering.host import Host
from strategies.lowering.stage_ops import StageOps
from strategies.lowering.stage_parts import StageParts, once
from strategies.models.model import Model
from strategies.plan.resolved import Resolved
from strategies.schedules import actions, schedules
from strategies.schedules.order import Action


def _summed(memory: Memory) -> Memory:
    """One entry of each kind: of gradients less is taken at first than there will be."""
    total: dict[str, float] = {}
    for kind, size in memory:
        total[kind] = total.get(kind, 0.0) + size
    return tuple(total.items())


class StagePasses(StageParts):
    """A stage whose passes are being added to `cohort`."""

    def __init__(
        self,
        number: int,
        rank: int,
        chunk: int,
        cohort: Cohort,
        parts: Sequence[LayerCost],
        plan: Resolved,
        model: Model,
        alike: dict[Hashable, Any] | None = None,
    ) -> None:
        super().__init__(number, rank, chunk, parts, plan, model, alike)
        self.cohort = cohort
        # passes that take turns are not cut
        waits = model.experts is not None and not any(action.beside for action in self._order)
        self._ops = StageOps(cohort, rank, chunk, OPS / plan.pp, in_pieces=waits)
        self.add = self._ops.add  # not a method: what refers to it does not keep the stage
        self.host = Host(plan, rank, self.add)
        count = plan.offload_activations
        self.activations = ActivationOffload(parts, count, self.host) if count else None
        self._timed = plan.kernel_set.times_parts
        of_pytorch = plan.kernel_set.of_pytorch and plan.deepspeed is None and schedules[plan.schedule].versions is None
        self.piped = plan.pp > 1 and of_pytorch  # whether torch.distributed.pipelining calls its passes
        self.has_gradients, self.freed = False, 0.0  # of a microbatch before; bytes of gradients that the update frees

    @property
    def _order(self) -> tuple[Action, ...]:
        """The passes of its rank."""
        return actions(self.plan.schedule, self.rank, self.plan.pp, self.plan.microbatches, self.plan.chunks)

    @cached_property
    def alone(self) -> bool:
        """Whether its rank shares its parameters with no other rank and nothing with the host."""
        return self.plan.copies == 1 and self.plan.offload is None and not self.host.checkpoints

    @property
    def fsdp_streams(self) -> bool:
        """Whether PyTorch's FSDP gathers and reduces on streams of its own: not Megatron-LM's, not DeepSpeed."""
        return self.plan.pytorch_fsdp and self.plan.copies > 1

    def checkpoint(self, part: int) -> Memory:
        """What a part has in the CPUs' memory between its passes."""
        layer = self.parts[part]
        return (("activation", layer.saved),) if self.host.checkpoints and layer.name == "layer" else ()

    def copy(self, label: str, phase: str, moved: tuple[float, ...], ref: Ref, first: bool = False) -> None:
        """Add passes over so many bytes of memory to a compute op, at its end or before it. A profile with measured wrapping has
        them in its collectives already.
        """
        op = self._ops.first(ref) if first else self.cohort.ops[ref.op]
        assert isinstance(op.work, Block)
        op.work = self._copying(op.work, label, phase, moved, first)

    @once
    def _copying(self, block: Block, label: str, phase: str, moved: tuple[float, ...], first: bool) -> Block:
        """One object for all microbatches."""
        dtype = self.plan.precision
        run = Run(1, tuple(Kernel("memory", label, phase, 0.0, each, dtype, variant=WRAPPER_COPY) for each in moved))
        return replace(block, runs=(run, *block.runs) if first else (*block.runs, run))

    def last(self, stream: str) -> Ref | None:
        """The op that is last so far on a stream of the stage's rank."""
        ops = self.cohort.ops
        last = next((number for number in range(len(ops) - 1, -1, -1) if ops[number].stream == stream), None)
        return None if last is None else Ref(self.rank, last)

    def last_compute(self) -> Ref | None:
        """The last op on the compute stream of the stage's rank."""
        return self.last(COMPUTE)

    def forward(
        self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None, free: Memory = ()
    ) -> Ref:
        """Forward pass of parts first … last − 1: their activations stay, their workspace does not."""
        if self._by_parts:
            return self._forward_by_parts(microbatch, after, range(first, self._begin(last).part), free)
        if first or last is not None:
            block, allocate, given_back = self._block(FORWARD, self._begin(last), Cut(first), "", 0.0)
        else:
            block, allocate, given_back = self._whole_forward
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
        if self._by_parts:
            passing = allocate[0][0] if allocate else ""
            return self._backward_by_parts(microbatch, after, self._begin(last), Cut(first), allocate, free, passing, absent)
        if first or last is not None or allocate or absent:
            passing = allocate[0][0] if allocate else ""
            block, allocated, given_back = self._block(BACKWARD, self._begin(last), Cut(first), passing, absent)
            allocated = _summed(allocated + allocate)
        else:
            block, allocated, given_back = self._whole_backward
        return self.add(Op(COMPUTE, block, after, allocated, given_back + free, microbatch))

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
        absent: float = 0.0,
    ) -> Ref:
        """What of a backward pass or of its second half is between two moments. allocate: beside its workspace; passing: the kind
        of memory of all gradients that it makes, which are made one by one; absent: bytes of `allocate` that are not there during
        the backward of the loss.
        """
        if self._by_parts:
            return self._backward_by_parts(microbatch, after, start, end, allocate, free, passing, absent)
        block, allocated, given_back = self._block(way, start, end, passing, absent)
        return self.add(Op(COMPUTE, block, after, _summed(allocated + allocate), given_back + free, microbatch))

    @property
    def _by_parts(self) -> bool:
        """Whether each part's pass is an op."""
        return self.activations is not None or self._timed

    def _forward_by_parts(self, microbatch: int, after: tuple[Ref, ...], parts: range, free: Memory) -> Ref:
        """A forward pass an op at a time, beside which activations leave the GPU, or before which the host waits."""
        offload = self.activations
        for part in parts:
            gone, less = offload.before_forward(part) if offload else ((), ())
            block, allocate, given_back = self._block(FORWARD, Cut(part + 1), Cut(part), "", 0.0)
            given_back += free if part == parts[-1] else ()
            work = COMPUTE, block, (*after, *gone), _summed(allocate + less), given_back, microbatch
            ref = self.add(Op(*work, held=self._timed))
            if offload:
                offload.after_forward(part, ref)
            after = ()
        return ref

    def _backward_by_parts(
        self,
        microbatch: int,
        after: tuple[Ref, ...],
        start: Cut,
        end: Cut,
        allocate: Memory,
        free: Memory,
        passing: str,
        absent: float = 0.0,
    ) -> Ref:
        """A backward pass, or what of it is between two moments, an op at a time: activations are there again before it, or the
        host has waited. Gradients are taken as parts make them, what else is allocated at first.
        """
        grads = tuple(entry for entry in allocate if passing and entry[0] == passing)
        first = tuple(entry for entry in allocate if entry not in grads)
        every = sum(self._making(start, end).completed) if passing else 0.0
        while True:
            cut = max(end, Cut(start.part if start.left else start.part - 1))
            offload = None if start.left else self.activations
            back = offload.before_backward(cut.part, self.last_compute()) if offload else ()
            block, allocated, given_back = self._block(BACKWARD, start, cut, passing, absent)
            share = sum(self._making(start, cut).completed) / every if every else float(cut == end)
            mine = first + tuple((kind, size * share) for kind, size in grads)
            given_back += free if cut == end else ()
            work = COMPUTE, block, (*after, *back), _summed(allocated + mine), given_back, microbatch
            ref = self.add(Op(*work, held=self._timed))
            if cut == end:
                return ref
            start, after, first, absent = cut, (), (), 0.0

    def whole_backward(self, microbatch: int, after: tuple[Ref, ...], weights_only: bool) -> Ref:
        """Backward pass of all parts, or its second half, which reduces nothing."""
        gradients = () if self.has_gradients else self.new_gradients(self.parameters)
        self.has_gradients = True
        return (self.weight_gradient if weights_only else self.backward)(microbatch, after, allocate=gradients)

    def new_gradients(self, elements: float) -> Memory:
        """What a backward pass takes for so many gradients that stay until the update frees them; nothing when they stay for ever
        or when it adds to a microbatch before.
        """
        if self.has_gradients or not self.plan.frees_gradients:
            return ()
        size = float(elements * self.plan.bytes_of_states["gradient"])
        self.freed += size
        return self.held_gradients(size)

    def held_gradients(self, size: float) -> Memory:
        """So many bytes of gradients that an update frees."""
        return (("gradient", size), *([(REDUCED, size)] if self.fsdp_streams else []))

    def input_gradient(
        self, microbatch: int, after: tuple[Ref, ...] = (), first: int = 0, last: int | None = None, free: Memory = ()
    ) -> Ref:
        """First half of a backward pass: what the weight gradients need stays until the second half."""
        block, allocated, given_back = self._block(INPUT, self._begin(last), Cut(first), "", 0.0)
        return self.add(Op(COMPUTE, block, after, allocated, given_back + free, microbatch))

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
        block, allocated, given_back = self._block(WEIGHT, self._begin(last), Cut(first), "", 0.0)
        return self.add(Op(COMPUTE, block, after, allocated + allocate, given_back + free, microbatch))

    @cached_property
    def _whole_forward(self) -> tuple[Block, Memory, Memory]:
        return self._block(FORWARD, self._begin(None), Cut(0), "", 0.0)

    @cached_property
    def _whole_backward(self) -> tuple[Block, Memory, Memory]:
        return self._block(BACKWARD, self._begin(None), Cut(0), "", 0.0)

    def _begin(self, last: int | None) -> Cut:
        """The moment before the backward pass of parts up to `last`, by default all."""
        return Cut(len(self.parts) if last is None else last)

    def memory(self, direction: str, part: int, passing: str = "") -> tuple[Memory, Memory]:
        """What a part's pass takes and gives back. passing: besides its parameters' gradients of this kind, which it makes."""
        return self._block(direction, Cut(part + 1), Cut(part), passing, 0.0)[1:]

    @once
    def _block(self, direction: str, start: Cut, end: Cut, passing: str, absent: float) -> tuple[Block, Memory, Memory]:
        """The block of what is between two moments of a pass (forward, from `end` to `start`), what it allocates and what it
        frees; one object for all microbatches, and stages that are alike. Of a part that is cut each piece needs the workspace of
        all of it.
        """
        last = start.part + (start.left > 0)
        parts, over = self.parts[end.part : last], self.parts[end.part + (end.left > 0) : last]
        kept = self.output if over and last == len(self.parts) else 0.0
        kept -= self.received if not (end.part or end.left) else 0.0
        making, begun = self._making(start, end) if passing else None, start.left > 0
        most = workspace(parts, direction, absent, 0.0, making, begun)
        kept_back = workspace(parts, direction, absent, self._stranded, making, begun) - most
        if direction == BACKWARD and end == Cut(0) and self._widened:  # when the activations are gone
            needed = max(most, self._widened - sum(part.saved for part in over) - kept)
            kept_back += self._widened + most - needed  # a block that none of the pass is as large as
            most = needed
        less = min(0.0, most)  # what is held in the place of what was saved; or gradients, while that is there
        instead = 0.0 if passing else less
        saved: Memory = (("activation", sum(part.saved for part in over) + kept + instead),)
        held: Memory = (("activation", sum(part.held for part in over) + instead),)
        work: Memory = (("temporary", most - less), (CACHED, kept_back), *([(passing, less)] if passing else []))
        allocated = {FORWARD: saved + work, BACKWARD: work, INPUT: held + work, WEIGHT: ()}[direction]
        freed = {FORWARD: work, BACKWARD: saved + work, INPUT: saved + work, WEIGHT: held}[direction]
        every = runs(parts, direction, start.left, end.left)
        if self.piped and (end == Cut(0) if direction == FORWARD else start == self._begin(None)):
            every = called(every, PIPELINE_PASS)
        if self._timed:
            every = collectives_last(every)
        return Block(direction, every), allocated, freed

    def _making(self, start: Cut, end: Cut) -> Making:
        """The gradients that a piece of a backward pass makes."""
        last, width = start.part + (start.left > 0), self.plan.bytes_per_gradient
        completed, later = [0.0] * (last - end.part), 0.0
        for part in range(end.part, last):
            for gradient in self.parts[part].gradients:
                if not gradient.spread and (self.tied or not gradient.tied) and Cut(part, gradient.left) < start:
                    size = float(width * math.prod(gradient.shape))
                    if Cut(part, gradient.left) >= end:
                        completed[part - end.part] += size
                    else:
                        later += size
        return Making(width, tuple(completed), later)

    @property
    def _widened(self) -> float:
        """Bytes of the largest gradient in fp32, to which DeepSpeed's BF16_Optimizer turns each when a backward pass is over,
        before it adds it to what microbatches before have made (deepspeed/runtime/bf16_optimizer.py, update_hp_grads).
        """
        if not self.plan.casts_gradients:
            return 0.0
        sizes = tensors([part for part, _ in self.kinds], self.model, self.tied, apart=False)
        return float(self.plan.bytes_per_gradient * max(sizes, default=0))

    @property
    def _stranded(self) -> float:
        """Bytes that the caching allocator holds when the loss runs, in blocks that are smaller than its tensors: the workspace
        that layers had forward, and the loss's own.
        """
        return max((0.0, *(part.temporary for part in self.parts[:-1]))) + self.parts[-1].stranded
