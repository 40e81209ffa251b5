"""DeepSpeed's ZeRO-3: its limits say what is gathered and released when, gradients are reduced in its buckets.

`strategies.frameworks.deepspeed.prefetch` has the limits, `strategies.frameworks.deepspeed.parameter_gather` and
`strategies.frameworks.deepspeed.zero_plus_plus` what ZeRO++ compresses; in 2021 all of this was tensor by tensor
(`strategies.frameworks.deepspeed_2021.zero3`). With `offload` parameters come from the host, gradients go there.
"""

from __future__ import annotations

from sim.program import Memory, Ref
from strategies.data_parallel.hook import Moves
from strategies.data_parallel.sharded_parameters import ShardedParameters, Turn, zero3_implementations
from strategies.frameworks.deepspeed.parameter_gather import DeepSpeedGather, options_of
from strategies.frameworks.deepspeed.prefetch import Step, steps
from strategies.frameworks.deepspeed.tiles import TiledPasses
from strategies.frameworks.deepspeed.zero_plus_plus import QuantisedReduction
from strategies.frameworks.deepspeed_2021.zero3 import TensorwisePasses
from strategies.lowering.blocks import BACKWARD, FORWARD
from strategies.lowering.stage import Stage, in_buckets
from strategies.plan.resolved import Resolved


@zero3_implementations("deepspeed")
class DeepSpeedZero3(ShardedParameters):
    """Gathers and releases follow the trace of a forward and a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._deepspeed: dict[int, DeepSpeedGather] = {}
        self._traces: dict[int, list[Step]] = {}
        self._gathered: dict[int, Ref] = {}  # parts on their way
        self._ready: dict[int, Ref] = {}  # what has made parts ready that are there
        self._bucket: list[tuple[tuple[int, int], Ref]] = []  # elements of gradients, of experts too, and what has made them
        self._tiled: dict[int, TiledPasses] = {}
        self._tensorwise: dict[int, TensorwisePasses] = {}  # of 2021
        self._quantised = QuantisedReduction()

    def gather_of(self, stage: Stage) -> DeepSpeedGather:
        """How the parameters of a stage are gathered."""
        if stage.number not in self._deepspeed:
            self._deepspeed[stage.number] = DeepSpeedGather(stage)
        return self._deepspeed[stage.number]

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """Gradients of every microbatch, unless they are quantised; what was gathered may be kept."""
        reductions = 0 if options_of(plan).zero_quantized_gradients else plan.microbatches
        return Moves(0.0, reductions * plan.bytes_per_gradient)

    def resident(self, stage: Stage) -> Memory:
        """What is held besides the rank's part."""
        return self.gather_of(stage).resident()

    def tensorwise(self, stage: Stage) -> TensorwisePasses | None:
        """Passes of DeepSpeed of 2021; None of later versions."""
        if options_of(stage.plan).coalesced:
            return None
        if stage.number not in self._tensorwise:
            self._tensorwise[stage.number] = TensorwisePasses(stage, self.gather_of(stage))
        return self._tensorwise[stage.number]

    def play(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """Gather and release as the trace says. Without overlap gathers hold up compute."""
        gather, overlap, count = self.gather_of(stage), stage.plan.overlap, len(stage.parts)
        if gather.kept or self.tensorwise(stage):
            return self.in_order(stage, turn, after)
        if gather.options.tiles > 1:
            return self._in_tiles(stage, turn, after)
        if stage.number not in self._traces:
            self._traces[stage.number] = steps([gather.moving(part) for part in range(count)], gather.options, stage.lowest)
        trace = self._traces[stage.number]
        for step in trace[count:] if turn.backward else trace[:count]:
            begin = self.begin(stage, after if not overlap else ())
            for part in (step.part, *step.ahead) if step.needed else step.ahead:
                self._gathered[part] = gather.gather(part, begin, turn.backward)
            held_up = () if overlap else tuple(self._gathered[part] for part in step.ahead)
            if step.part in self._gathered:
                self._ready[step.part] = gather.ready(step.part, self._gathered.pop(step.part), turn.backward)
            ref = self.part(stage, turn, step.part, (self._ready[step.part], *held_up, *after))
            after = () if overlap else tuple(stage.reduced[-1:])
        return ref

    def _in_tiles(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """A pass that gathers matrices tile by tile."""
        if stage.number not in self._tiled:
            self._tiled[stage.number] = TiledPasses(stage, self.gather_of(stage))
        for part in self.order(stage, turn):
            for ref, elements in self._tiled[stage.number].play(turn, part, after):
                if elements:
                    self._collect(stage, (elements, 0), ref)
                after = () if stage.plan.overlap else tuple(stage.reduced[-1:])
        return ref

    def part(self, stage: Stage, turn: Turn, part: int, after: tuple[Ref, ...]) -> Ref:
        """Inputs of layers may be kept on the CPUs: copied there after the forward pass, and back before the backward pass."""
        checkpoint, free, tensorwise = stage.checkpoint(part), self._released(stage, turn, part), self.tensorwise(stage)
        if turn.way == FORWARD:
            if checkpoint:
                stage.host.checkpoint("gpu", "cpu", checkpoint)
            if tensorwise:
                allocated, freed = stage.memory(FORWARD, part)
                return tensorwise.play(FORWARD, turn.microbatch, part, after, (allocated, freed + checkpoint))
            return stage.forward(turn.microbatch, after, part, part + 1, free=free + checkpoint)
        if turn.way != BACKWARD:
            return stage.input_gradient(turn.microbatch, after, part, part + 1, free=free)
        if checkpoint:
            stage.host.checkpoint("cpu", "gpu", checkpoint)
        gradient = self.new_gradient(stage, part)
        free += gradient  # copied into the bucket's buffer
        waits = (*after, *stage.crowded)
        if tensorwise:
            allocated, freed = stage.memory(BACKWARD, part, "temporary" if gradient else "")
            return tensorwise.play(BACKWARD, turn.microbatch, part, waits, (allocated + gradient, freed + free))
        ref = stage.backward(turn.microbatch, waits, part, part + 1, allocate=gradient, free=free)
        self.reduce(stage, turn, part, ref)
        return ref

    def _released(self, stage: Stage, turn: Turn, part: int) -> Memory:
        """What the part's pass gives back."""
        if self.gather_of(stage).kept or self.tensorwise(stage):
            return ()
        trace, count = self._traces[stage.number], len(stage.parts)
        step = trace[2 * count - 1 - part if turn.backward else part]
        return self.gather_of(stage).gathered_parameters(part) if step.release else ()

    def reduce(self, stage: Stage, turn: Turn, part: int, after: Ref) -> None:
        """The part's gradients go into the bucket."""
        self._collect(stage, self.gather_of(stage).elements(part), after)

    def _collect(self, stage: Stage, elements: tuple[int, int], after: Ref) -> None:
        """When the bucket has no room for so many gradients, what is in it is reduced."""
        held = sum(sum(waiting) for waiting, _ in self._bucket)
        if held + sum(elements) > options_of(stage.plan).reduce_bucket_size:
            self._flush(stage)
        self._bucket.append((elements, after))

    def finish(self, stage: Stage, turn: Turn, ref: Ref, last: bool) -> None:
        """Reduce what is left in the buckets."""
        self._flush(stage)
        self._quantised.finish()

    def _flush(self, stage: Stage) -> None:
        """Reduce what is in the bucket."""
        if tensorwise := self.tensorwise(stage):
            tensorwise.flush()
        if not self._bucket:
            return
        dense, experts = (sum(elements[which] for elements, _ in self._bucket) for which in (0, 1))
        if not dense + experts:  # of frozen parts
            self._bucket.clear()
            return
        # without overlap_comm reductions are on the compute stream, behind all that was launched
        completed = self._bucket[-1][1] if stage.plan.overlap else stage.last_compute()
        assert completed is not None
        self._bucket.clear()
        options = options_of(stage.plan)
        if options.zero_quantized_gradients and stage.plan.copies > 1:
            self._quantised.reduce(stage, dense, completed)
            return
        self.send(stage, (dense, experts), completed, (), in_buckets(dense, options.reduce_bucket_size))
