"""ZeRO-3 (FSDP's full sharding): parameters are sharded too, and gathered part by part just before they are used.

Rajbhandari et al. 2020, arXiv:1910.02054, section 7.2: an all-gather for the forward pass, one for the backward pass, a
reduce-scatter of gradients: 3Ψ·(n−1)/n per microbatch. Without `reshard` (FSDP2's reshard_after_forward=False) parameters stay
until the next backward pass has used them, and it is 2Ψ; in a pipeline the forward passes before that one find them there. With
`gradient_sync: last` gradients are reduced once per step, and parameters stay after a backward pass that is not the last: of m
microbatches, in any order, m + 1 passes gather them (1 without `reshard`). Reductions run beside the last backward pass, or with
pp > 1 after it (torch 2.13, `PipelineStage.perform_reduce_grad`). With `shard` below dp (FSDP2's HSDP), gradient shards are
all-reduced over the replicas. With overlap the next part is gathered while the present one computes (prefetch depth 1). With
`deepspeed` DeepSpeed's limits say what is gathered and released when (`strategies.data_parallel.deepspeed_prefetch`), gradients
are reduced in its buckets, and ZeRO++ may compress both (`strategies.data_parallel.parameter_gather`,
`strategies.data_parallel.zero_plus_plus`); in 2021 all of this was tensor by tensor (`strategies.data_parallel.deepspeed_2021`).
With `offload` parameters come from the host, gradients go there.

Without overlap every collective holds up compute; with `kernels: torch` a backward pass still gathers one part ahead, and the
buffer of a reduction lives until the next part's gradients are complete, as in FSDP2 on CPUs (torch 2.13, `FSDPParamGroup`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.program import Memory, Ref
from strategies.data_parallel import hooks
from strategies.data_parallel.deepspeed_2021 import OneByOne
from strategies.data_parallel.deepspeed_prefetch import Step, steps
from strategies.data_parallel.hook import Hook, Moves
from strategies.data_parallel.parameter_gather import Gathering
from strategies.data_parallel.zero_plus_plus import Quantised
from strategies.lowering.blocks import BACKWARD, FORWARD
from strategies.lowering.stage import Stage, in_buckets
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved

Compute = Callable[[Stage, int, int, tuple[Ref, ...]], Ref]  # adds a pass of one part: stage, microbatch, part, after


@hooks("zero3")
class Zero3(Hook):
    """Sharded parameters, gradients and optimizer states."""

    shards = frozenset({"optimizer", "gradient", "parameter"})
    scatters = of_deepspeed = True

    def __init__(self) -> None:
        self._gatherings: dict[int, Gathering] = {}
        self._traces: dict[int, list[Step]] = {}
        self._gathered: dict[int, Ref] = {}  # DeepSpeed: parts on their way
        self._there: dict[int, Ref] = {}  # DeepSpeed: what has made parts ready that are there
        self._waiting: list[tuple[int, Ref]] = []  # DeepSpeed: parts whose gradients are in the bucket
        self._one_by_one: dict[int, OneByOne] = {}  # DeepSpeed of 2021
        self._quantised = Quantised()
        self._lingering: Memory = ()  # PyTorch: the buffer from which the part before was reduced
        self._whole: set[int] = set()  # stages whose parameters are there when a pass begins
        self._accumulated: set[int] = set()  # stages that have whole gradients, which are not reduced yet
        self._absent = 0.0  # bytes gathered for a pass that are not there at its beginning
        self._keeps = False  # whether a backward pass reduces and releases nothing

    def resident(self, stage: Stage) -> Memory:
        """What DeepSpeed holds besides the rank's part."""
        return self._of(stage).resident()

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gather, compute and release each part."""
        if stage.alone:
            return stage.forward(microbatch, after)
        return self._pass(stage, microbatch, after, range(len(stage.parts)), self._forward)

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """The same in reverse, and a reduce-scatter of each part's gradients. Weight gradients alone need no parameters."""
        if stage.alone:
            return stage.whole_backward(microbatch, after, weights_only)
        parts = range(len(stage.parts) - 1, -1, -1)
        late = stage.plan.syncs_gradients == "last"
        self._keeps = late and (not last or weights_only or stage.plan.pp > 1)
        if not weights_only:
            ref = self._pass(stage, microbatch, after, parts, self._backward)
        else:
            for part in parts:
                ref = stage.weight_gradient(
                    microbatch, (*after, *stage.crowded), part, part + 1, allocate=self._made(stage, part)
                )
                self._reduce(stage, part, ref)
                after = () if stage.plan.overlap else tuple(stage.reduced[-1:])
        if late:
            (self._accumulated.discard if last else self._accumulated.add)(stage.number)
        if last and self._keeps:
            self._reduce_all(stage, ref)
        stage.has_gradients |= last or not self._keeps
        self._flush(stage)
        self._quantised.finish()
        return ref

    def input_gradient(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gathers like a backward pass, reduces nothing."""
        if stage.alone:
            return stage.input_gradient(microbatch, after)
        self._keeps = stage.plan.syncs_gradients == "last"
        return self._pass(stage, microbatch, after, range(len(stage.parts) - 1, -1, -1), self._input)

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """Of every microbatch: parameters forward, and once more backward when they were released; gradients."""
        gathers, reductions = plan.microbatches * (1 + plan.reshard), plan.microbatches
        if plan.syncs_gradients == "last":
            gathers, reductions = plan.microbatches * plan.reshard + 1, 1
        elif plan.deepspeed is not None:  # may keep what it has gathered, and send less
            gathers, reductions = 0, 0 if plan.deepspeed.zero_quantized_gradients else reductions
        return Moves(gathers * plan.least_gathered, reductions * plan.bytes_per_gradient)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """Every part waits for its gather, and the next gather for the part; PyTorch and DeepSpeed gather ahead."""
        return not plan.kernel_set.prefetches_backward and plan.deepspeed is None

    def update(self, stage: Stage) -> None:
        """Update the own shard; parameters are gathered when next used."""
        shards = stage.plan.shards
        updated = stage.update(shards, tuple(stage.reduced[-len(stage.parts) :]), shards)
        self._of(stage).again(updated)

    def _of(self, stage: Stage) -> Gathering:
        if stage.number not in self._gatherings:
            self._gatherings[stage.number] = Gathering(stage)
        return self._gatherings[stage.number]

    def _pass(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], order: Sequence[int], compute: Compute) -> Ref:
        gathering, overlap, backward = self._of(stage), stage.plan.overlap, compute != self._forward
        ahead = overlap or (backward and stage.plan.kernel_set.prefetches_backward)
        there = gathering.kept or stage.number in self._whole or not gathering.options.coalesced
        stays = self._keeps if backward else not stage.plan.reshard
        (self._whole.add if stays else self._whole.discard)(stage.number)
        self._absent = 0.0
        if there:
            for part in order:
                ref = compute(stage, microbatch, part, after)
                after = () if overlap else tuple(stage.reduced[-1:])
            return ref
        if stage.plan.deepspeed:
            return self._traced(stage, microbatch, after, compute)
        computed: list[Ref] = []
        first = self._turn(stage, () if overlap else after)
        tied = gathering.gather(0, first, backward) if backward and _tied(stage) else None
        # the first part is gathered when the pass before has released its own, or without overlap when it has computed
        gathered = [gathering.gather(order[0], first, backward)]
        for position, part in enumerate(order):
            held_up = () if overlap else tuple(stage.reduced[-1:])
            if ahead and position + 1 < len(order):  # launched before the compute that it hides behind
                start = (*computed[-1:], *held_up)
                is_there = tied is not None and position + 2 == len(order)
                gathered.append(tied if tied and is_there else gathering.gather(order[position + 1], start, backward))
            if not overlap:
                held_up += tuple(gathered[position + 1 :])
            waits = (gathering.ready(part, gathered[position], backward), *held_up, *(after if not position else ()))
            self._absent = self._gathered_late(stage, order, ahead) if backward and not position else 0.0
            computed.append(compute(stage, microbatch, part, waits))
            gathering.taken(part, computed[-1], backward)
            if not ahead and position + 1 < len(order):
                start = (computed[-1], *stage.reduced[-1:])
                gathered.append(gathering.gather(order[position + 1], start, backward))
        return computed[-1]

    def _gathered_late(self, stage: Stage, order: Sequence[int], ahead: bool) -> float:
        """Bytes that PyTorch gathers when the backward of the loss, which is no FSDP2 module, is over."""
        if not stage.plan.of_pytorch:  # whose loss is outside of what FSDP gathers parameters for
            return 0.0
        parts = {order[0], *(order[1:2] if ahead else ()), *((0,) if _tied(stage) else ())}
        return sum(size for part in parts for _, size in self._of(stage).whole(part))

    def _traced(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], compute: Compute) -> Ref:
        """A pass whose gathers and releases follow DeepSpeed's trace. Without overlap gathers hold up compute."""
        gathering, overlap, backward = self._of(stage), stage.plan.overlap, compute != self._forward
        count = len(stage.parts)
        if stage.number not in self._traces:
            self._traces[stage.number] = steps([gathering.moving(part) for part in range(count)], self._of(stage).options)
        trace = self._traces[stage.number]
        for step in trace[count:] if backward else trace[:count]:
            turn = self._turn(stage, after if not overlap else ())
            for part in (step.part, *step.ahead) if step.needed else step.ahead:
                self._gathered[part] = gathering.gather(part, turn, backward)
            held_up = () if overlap else tuple(self._gathered[part] for part in step.ahead)
            if step.part in self._gathered:
                self._there[step.part] = gathering.ready(step.part, self._gathered.pop(step.part), backward)
            waits = (self._there[step.part], *held_up, *after)
            ref = compute(stage, microbatch, step.part, waits)
            after = () if overlap else tuple(stage.reduced[-1:])
        return ref

    def _modules(self, stage: Stage) -> OneByOne | None:
        """Of DeepSpeed as of 2021; None of later ones and of others."""
        if self._of(stage).options.coalesced:
            return None
        if stage.number not in self._one_by_one:
            self._one_by_one[stage.number] = OneByOne(stage, self._of(stage))
        return self._one_by_one[stage.number]

    def _turn(self, stage: Stage, after: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """What the first gather of a pass waits for: the last compute of the pass before."""
        before = stage.last_compute()
        return after if before is None else (*after, before)

    def _released(self, stage: Stage, part: int, backward: bool) -> Memory:
        """What the part's pass gives back."""
        if self._modules(stage):
            return ()
        if stage.plan.deepspeed and not self._of(stage).kept:
            trace, count = self._traces[stage.number], len(stage.parts)
            released = trace[2 * count - 1 - part if backward else part].release
        else:
            released = not self._keeps if backward else stage.plan.reshard
        if not released or (_tied(stage) and part == 0 and not backward):
            return ()
        last = _tied(stage) and part == len(stage.parts) - 1 and not backward
        return self._of(stage).whole(part) + (self._of(stage).whole(0) if last else ())

    def _forward(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        if kept := stage.checkpoint(part):
            stage.host.checkpoint("gpu", "cpu", kept)
        if modules := self._modules(stage):
            taken, given_back = stage.memory(FORWARD, part)
            return modules.play(FORWARD, microbatch, part, after, (taken, given_back + kept))
        return stage.forward(microbatch, after, part, part + 1, free=self._released(stage, part, False) + kept)

    def _input(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        return stage.input_gradient(microbatch, after, part, part + 1, free=self._released(stage, part, True))

    def _backward(self, stage: Stage, microbatch: int, part: int, after: tuple[Ref, ...]) -> Ref:
        gradient, free = self._made(stage, part), self._released(stage, part, True)
        if kept := stage.checkpoint(part):
            stage.host.checkpoint("cpu", "gpu", kept)
        if stage.plan.deepspeed:  # copied into the bucket's buffer
            free += gradient
        free, self._lingering = free + self._lingering, ()
        if _tied(stage):  # the embedding's gradient is there when the head's pass is over
            gradient = (gradient if part else ()) + (self._made(stage, 0) if part == len(stage.parts) - 2 else ())
        waits, absent = (*after, *stage.crowded), self._absent
        if modules := self._modules(stage):
            taken, given_back = stage.memory(BACKWARD, part, "temporary" if gradient else "")
            return modules.play(BACKWARD, microbatch, part, waits, (taken + gradient, given_back + free))
        ref = stage.backward(microbatch, waits, part, part + 1, allocate=gradient, free=free, absent=absent)
        self._reduce(stage, part, ref, lingers=True)
        return ref

    def _made(self, stage: Stage, part: int) -> Memory:
        """What a backward pass allocates for the part's gradient, unless it adds to one that is there."""
        return () if stage.number in self._accumulated else self._gradient(stage, part)

    def _gradient(self, stage: Stage, part: int) -> Memory:
        """The unsharded gradient of a part, until it is reduced."""
        if stage.plan.copies == 1 and not stage.host.updates:  # there is but one rank, and it accumulates its gradients
            return ()
        return (("temporary", sum(self._of(stage).elements(part)) * stage.plan.bytes_per_gradient),)

    def _reduce(self, stage: Stage, part: int, after: Ref, lingers: bool = False) -> None:
        """Reduce the part's gradients, or with DeepSpeed those before it when the bucket has no room for its own."""
        if self._keeps:
            return
        if stage.plan.deepspeed is None:
            gradient = self._gradient(stage, part)
            if lingers and part and stage.plan.kernel_set.prefetches_backward and not stage.plan.overlap:
                gradient, self._lingering = (), gradient
            self._of(stage).made(part, after)
            self._send(stage, self._of(stage).elements(part), after, gradient)
            return
        room = stage.plan.deepspeed.reduce_bucket_size
        held = sum(sum(self._of(stage).elements(one)) for one, _ in self._waiting)
        if held + sum(self._of(stage).elements(part)) > room:
            self._flush(stage)
        self._waiting.append((part, after))

    def _reduce_all(self, stage: Stage, after: Ref) -> None:
        """After the last backward pass: reduce the gradients of every part, and release its parameters."""
        self._whole.discard(stage.number)
        for part in range(len(stage.parts)):
            free = self._gradient(stage, part) + self._of(stage).whole(part)
            self._of(stage).made(part, after)
            self._send(stage, self._of(stage).elements(part), after, free)

    def _flush(self, stage: Stage) -> None:
        """Reduce what is in the bucket."""
        if modules := self._modules(stage):
            modules.flush()
        if self._waiting:
            elements = [self._of(stage).elements(part) for part, _ in self._waiting]
            dense, experts = sum(one for one, _ in elements), sum(more for _, more in elements)
            # without overlap_comm reductions are on the compute stream, behind all that was launched
            made = self._waiting[-1][1] if stage.plan.overlap else stage.last_compute()
            assert made is not None
            self._send(stage, (dense, experts), made, ())
            self._waiting.clear()

    def _send(self, stage: Stage, elements: tuple[int, int], after: Ref, free: Memory) -> None:
        plan = stage.plan
        dense, experts = (count * plan.bytes_per_gradient for count in elements)
        if plan.deepspeed and plan.deepspeed.zero_quantized_gradients and stage.plan.copies > 1:
            self._quantised.reduce(stage, elements[0], after)
            return
        count = in_buckets(dense, plan.deepspeed.reduce_bucket_size * plan.bytes_per_gradient) if plan.deepspeed else 1
        made = stage.made(elements[0] / stage.plan.shards + elements[1] / stage.expert_shards)
        stage.reduce("reduce_scatter", dense / count, count, (after,), free, experts, allocate=made)


def _tied(stage: Stage) -> bool:
    """Whether the head uses the embedding's matrix, which FSDP2 then keeps gathered from the one's pass to the other's.

    Both are in one FSDP2 module. Forward it is released after the head's pass; backward it is gathered before that, and its
    gradient is reduced after the embedding's.
    """
    plan = stage.plan
    return stage.model.tied and stage.model.head and plan.kernel_set.eager and plan.pp == 1 and plan.deepspeed is None
