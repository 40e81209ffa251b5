"""FSDP: PyTorch's, and Megatron-LM's; ZeRO-3 that gathers one part ahead.

Without `reshard` (FSDP2's reshard_after_forward=False) parameters stay until the next backward pass has used them, and 2Ψ move;
in a pipeline the forward passes before that one find them there. With `gradient_sync: last` gradients are reduced once per step,
and parameters stay after a backward pass that is not the last: of m microbatches, in any order, m + 1 passes gather them (1
without `reshard`); with `reshard_after_backward` 2·m (m) do. Reductions run beside the last backward pass, or with pp > 1 after
it (torch 2.13, `PipelineStage.perform_reduce_grad`). With `shard` below dp (FSDP2's HSDP), gradient shards are all-reduced over
the replicas: FSDP2's in every microbatch that reduces (torch 2.13, FSDPParamGroup.all_reduce_grads), Megatron-LM's in the last
one.
Parts are units of their own, unless `root_unit` makes one of embedding and head, which FSDP2 keeps from the forward pass on and
reduces at the end of the backward pass; with `keep_last_unit` the unit that a forward pass ends with stays, too.
With overlap the next part is gathered while the present one computes (prefetch depth 1). With `offload` parameters come from the
host, gradients go there.

Without overlap every collective holds up compute; with `kernels: torch` a backward pass still gathers one part ahead, and the
buffer of a reduction lives until the next part's gradients are complete, as in FSDP2 on CPUs (torch 2.13, `FSDPParamGroup`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.program import MEMORY_KINDS, Memory, Ref
from strategies.data_parallel.hook import Moves
from strategies.data_parallel.sharded_parameters import ShardedParameters, Turn, zero3_implementations
from strategies.lowering.blocks import BACKWARD, FORWARD
from strategies.lowering.stage import Stage
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


@zero3_implementations("fsdp")
class FSDP(ShardedParameters):
    """Parts are gathered in turn, each with the part that is used next on its way."""

    def __init__(self) -> None:
        super().__init__()
        self._lingering: Memory = ()  # the buffer from which the part before was reduced
        self._whole: set[int] = set()  # stages whose parameters are there when a pass begins
        self._accumulated: set[int] = set()  # stages that have whole gradients, which are not reduced yet

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """In every microbatch parameters are gathered forward, and backward when they were released, and gradients reduced."""
        kernels = plan.kernel_set
        again = plan.reshard and not kernels.root_unit and not kernels.keeps_last_unit  # all of them
        gathers, reductions = plan.microbatches * (1 + again), plan.microbatches
        if plan.syncs_gradients == "last":
            reductions = 1
        if plan.keeps_parameters:
            gathers = plan.microbatches * again + 1
        return Moves(gathers * plan.least_gathered, reductions * plan.bytes_per_gradient)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """Every part waits for its gather, and the next gather for the part; PyTorch gathers ahead."""
        return not plan.kernel_set.prefetches_backward

    def play(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """Gather each part one ahead of its use."""
        gather, overlap, backward = self.gather_of(stage), stage.plan.overlap, turn.backward
        there = gather.kept or stage.number in self._whole
        stays = turn.stays if backward else not stage.plan.reshard
        (self._whole.add if stays else self._whole.discard)(stage.number)
        if there:
            return self.in_order(stage, turn, after)
        ahead = overlap or (backward and stage.plan.kernel_set.prefetches_backward)
        order, computed = self.order(stage, turn), list[Ref]()
        kept = _kept(stage) if backward else frozenset()  # they are there
        # the first part is gathered when the pass before has released its own, or without overlap when it has computed
        first, at_first = self.begin(stage, () if overlap else after), self._at_first(stage, order, backward)
        gathered = {part: gather.gather(part, first, backward) for part in at_first}
        following = [*order[1:], *self._in_vain(stage, backward)]
        for position, part in enumerate(order):
            held_up = () if overlap else tuple(stage.reduced[-1:])
            coming = [each for each in following[position : position + 1] if each not in kept]
            if ahead and coming and coming[0] not in gathered:  # launched before the compute that it hides behind
                start = computed[-1:] if computed or gathered else first
                gathered[coming[0]] = gather.gather(coming[0], (*start, *held_up), backward)
            if position + 1 == len(order) <= len(following):
                mistaken = following[position]
                self._lingering += gather.gathered_parameters(mistaken) + gather.gather_buffer(mistaken)
            if not overlap:
                held_up += tuple(gathered[each] for each in coming if each in gathered)
            # buffers of what is gathered at first are given back by the first part: of tied embeddings it is copied for the head
            copied = at_first if not position else () if part in kept or part in at_first else (part,)
            unit = copied if _root(stage) else (part,) * (part not in kept)
            arrived = tuple(gather.ready(each, gathered[each], backward) for each in unit)
            waits = (*arrived, *held_up, *(after if not position else ()))
            absent = self._gathered_late(stage, order, ahead) if backward and not position else 0.0
            buffer = tuple(entry for each in copied[::-1] for entry in gather.gather_buffer(each))
            computed.append(self.part(stage, turn, part, waits, absent, buffer))
            for each in unit:
                gather.copy_out(each, computed[-1], backward)
            if not ahead and position + 1 < len(order) and coming and coming[0] not in gathered:
                start = (computed[-1], *stage.reduced[-1:])
                gathered[coming[0]] = gather.gather(coming[0], start, backward)
        return computed[-1]

    @staticmethod
    def _at_first(stage: Stage, order: Sequence[int], backward: bool) -> tuple[int, ...]:
        """The parts that are gathered before the first one's pass."""
        last = len(stage.parts) - 1
        if backward:
            return tuple(sorted({order[0], *((0,) if _tied(stage) else ())} - _kept(stage)))
        return (0, last) if _root(stage) else (0,)

    def _in_vain(self, stage: Stage, backward: bool) -> list[int]:
        """The part below the lowest that is trained: FSDP2 gathers it ahead like any other, its backward pass never comes, and it
        is released at the end (torch 2.13, `FSDPParamGroup.finalize_backward`: "a mistargeted unshard"). FSDP1 gathers
        ahead only what has an output that requires a gradient (`_get_handle_to_prefetch` in fsdp/_runtime_utils.py).
        """
        fsdp2 = stage.plan.pytorch_fsdp and not stage.plan.kernel_set.flat_parameters
        below = stage.lowest - 1
        comes = backward and fsdp2 and below >= 0 and below not in _kept(stage)
        return [below] if comes and self.gather_of(stage).moving(below) else []

    def _gathered_late(self, stage: Stage, order: Sequence[int], ahead: bool) -> float:
        """Bytes that PyTorch gathers when the backward of the loss, which is no FSDP2 module, is over."""
        if not stage.plan.of_pytorch:
            return 0.0
        parts = {order[0], *(order[1:2] if ahead else ()), *((0,) if _tied(stage) else ())} - _kept(stage)
        entries = (entry for part in parts for entry in self.gather_of(stage).gathered_parameters(part))
        return sum(size for kind, size in entries if kind in MEMORY_KINDS)

    def part(self, stage: Stage, turn: Turn, part: int, after: tuple[Ref, ...], absent: float = 0.0, buffer: Memory = ()) -> Ref:
        """absent: bytes gathered for the pass that are not there at its beginning; buffer: of the part's gather."""
        free = self._released(stage, turn, part) + buffer
        if turn.way == FORWARD:
            return stage.forward(turn.microbatch, after, part, part + 1, free=free)
        if turn.way != BACKWARD:
            return stage.input_gradient(turn.microbatch, after, part, part + 1, free=free)
        gradient = self.new_gradient(stage, part)
        free, self._lingering = free + self._lingering, ()
        if _tied(stage):  # the embedding's gradient is there when the head's pass is over
            gradient = (gradient if part else ()) + (self.new_gradient(stage, 0) if part == len(stage.parts) - 2 else ())
        waits = (*after, *stage.crowded)
        ref = stage.backward(turn.microbatch, waits, part, part + 1, allocate=gradient, free=free, absent=absent)
        self.reduce(stage, turn, part, ref)
        return ref

    def _released(self, stage: Stage, turn: Turn, part: int) -> Memory:
        """What the part's pass gives back."""
        released = not turn.stays if turn.backward else stage.plan.reshard
        if not released or (not turn.backward and (part in _kept(stage) or (_tied(stage) and part == 0))):
            return ()
        parts, last = {part}, len(stage.parts) - 1
        if turn.backward and _root(stage):
            parts = {part, 0, last} if part == stage.lowest else {part} - {last}
        elif _tied(stage) and part == last and not turn.backward:
            parts = {part, 0}
        return tuple(entry for each in sorted(parts, reverse=True) for entry in self.gather_of(stage).gathered_parameters(each))

    def new_gradient(self, stage: Stage, part: int) -> Memory:
        """Nothing where whole gradients of microbatches before are there."""
        return () if stage.number in self._accumulated else self.gradient(stage, part)

    def reduce(self, stage: Stage, turn: Turn, part: int, after: Ref) -> None:
        """As soon as the part's pass is over."""
        last = len(stage.parts) - 1
        if turn.keeps or (_root(stage) and part == last):  # with what the pass ends with
            return
        gradient = self.gradient(stage, part)
        lingers = turn.way == BACKWARD and stage.plan.kernel_set.prefetches_backward
        if lingers and part and not stage.plan.overlap:
            gradient, self._lingering = (), gradient
        self._reduce(stage, part, after, gradient)
        if _root(stage) and part == stage.lowest:
            self._reduce(stage, last, after, self.gradient(stage, last))

    def _reduce(self, stage: Stage, part: int, after: Ref, free: Memory) -> None:
        gather = self.gather_of(stage)
        if not any(gather.elements(part)):  # of a part that is frozen nothing is reduced
            return
        gather.copy_in(part, after)
        self.send(stage, gather.elements(part), after, free)

    def finish(self, stage: Stage, turn: Turn, ref: Ref, last: bool) -> None:
        """After the last backward pass that kept gradients: reduce every part's, and release its parameters."""
        if stage.plan.syncs_gradients == "last":
            (self._accumulated.discard if last else self._accumulated.add)(stage.number)
        if last and turn.keeps:
            self._whole.discard(stage.number)
            for part in range(stage.lowest, len(stage.parts)):
                gathered = self.gather_of(stage).gathered_parameters(part) if turn.stays else ()
                self._reduce(stage, part, ref, self.gradient(stage, part) + gathered)


def _root(stage: Stage) -> bool:
    """Whether embedding, last norm and head are one unit, as whatever is in no unit of its own is in the root's."""
    return stage.plan.kernel_set.root_unit and stage.model.head


def _kept(stage: Stage) -> frozenset[int]:
    """Parts that a forward pass keeps for its backward pass, where it releases others. FSDP2 keeps the root's (torch 2.13,
    `FSDPState._lazy_init`).
    """
    root, last, kernels = _root(stage), len(stage.parts) - 1, stage.plan.kernel_set
    of_root = frozenset({0, last}) if root else frozenset[int]()
    if not kernels.keeps_last_unit:
        return of_root
    return of_root | {last - root} | ({0} if _tied(stage) else set())


def _tied(stage: Stage) -> bool:
    """Whether the head uses the embedding's matrix, which FSDP2 then keeps gathered from the one's pass to the other's.

    Both are in one FSDP2 module. Forward it is released after the head's pass; backward it is gathered before that, and its
    gradient is reduced after the embedding's.
    """
    return stage.model.tied and stage.model.head and stage.plan.kernel_set.eager and stage.plan.pp == 1
