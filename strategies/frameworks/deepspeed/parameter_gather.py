"""How DeepSpeed's ZeRO-3 gathers a part's parameters: quantised or not, from all ranks or from the node's; some stay.

ZeRO++ (Wang et al. 2023, arXiv:2306.10209): qwZ gathers 8-bit integers, with passes over memory to make them of the rank's own
part and to turn the whole back; as in DeepSpeed's code forward and backward. hpZ keeps a second copy sharded over the ranks of a
node, from which backward passes gather; its groups are communicators of their own. Scales, a number per block of thousands of
parameters, are left out.
"""

from __future__ import annotations

import math

from sim.program import COMPUTE, Block, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.parameter_gather import ParameterGather
from strategies.data_parallel.shard_padding import padded
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.layers.operators import Shape
from strategies.layers.weight_matrices import vectors
from strategies.lowering.stage import Stage
from strategies.plan.resolved import Resolved

QUANTISED = 1  # bytes of a quantised parameter
SECONDARY = "secondary"  # the stream of the communicator of a node's ranks, from which hpZ gathers


def options_of(plan: Resolved) -> DeepSpeed:
    """`plan.deepspeed`, which there is."""
    assert plan.deepspeed is not None
    return plan.deepspeed


class DeepSpeedGather(ParameterGather):
    """Gathers of a stage's parts."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.options = options_of(stage.plan)
        self._persistent: dict[int, int] = {}
        self._passes: dict[tuple[str, str, float], Block] = {}

    @property
    def quantised(self) -> bool:
        """Whether parameters travel as integers."""
        return self.options.zero_quantized_weights and not self.kept

    def persistent(self, part: int) -> int:
        """Elements of the part that are never released."""
        if self.kept:
            return 0
        if part not in self._persistent:
            self._persistent[part] = padded(self.stage.plan, self._small(part), self.stage.plan.shards)
        return self._persistent[part]

    def _small(self, part: int) -> list[Shape]:
        """Parameters of the part that are small enough to stay."""
        least = self.options.stage3_param_persistence_threshold
        return [shape for shape in self.stage.shapes(part) if math.prod(shape) <= least]

    def vectors(self, part: int) -> int:
        """Biases and norms of the part."""
        return vectors(self.stage.parts[part], self.stage.model)

    def moving(self, part: int) -> int:
        """Elements that all ranks share and that come and go."""
        return super().moving(part) - self.persistent(part)

    def sent_width(self, part: int, experts: bool = False) -> float:
        """One byte where parameters travel as integers."""
        return QUANTISED if self.quantised else super().sent_width(part, experts)

    def gather_dense(self, part: int, after: tuple[Ref, ...], backward: bool) -> Ref:
        """Backward passes gather from the ranks of a node where these have a second copy (hpZ)."""
        plan, elements = self.stage.plan, self.moving(part)
        local = backward and self.options.zero_hpz_partition_size > 1
        along, stream = (("dp",), SECONDARY) if local else (plan.sharing, "dp")
        if self.quantised:
            shards = self.options.zero_hpz_partition_size if local else plan.shards
            after = (self._pass("quantise parameters", "backward" if backward else "forward", elements / shards, after),)
        memory = self.gathered_parameters(part) + self._integers(part)
        return self.all_gather(elements, along, after, memory, self.sent_width(part), stream=stream)

    def ready(self, part: int, gathered: Ref, backward: bool) -> Ref:
        """Integers are turned back first."""
        if not self.quantised:
            return gathered
        phase = "backward" if backward else "forward"
        return self._pass("dequantise parameters", phase, self.moving(part), (gathered,), self._integers(part))

    def again(self, after: Ref) -> None:
        """After the update: gather what is never released."""
        plan, parts = self.stage.plan, range(len(self.stage.parts))
        elements, pieces = sum(self.persistent(part) for part in parts), 0
        if not elements or plan.copies == 1:
            return
        if not self.options.coalesced:  # one list, and of each tensor a copy of every rank's part
            pieces = plan.shards * (1 + sum(len(self._small(part)) for part in parts))
        self.all_gather(elements, plan.sharing, (after,), (), plan.bytes_per_element, pieces=pieces)

    def resident(self) -> Memory:
        """What is held besides the rank's part: parameters that are never released, a second copy, the buffer of gradients."""
        stage, plan = self.stage, self.stage.plan
        small = sum(self.persistent(part) for part in range(len(stage.parts))) * plan.bytes_per_element
        if plan.copies == 1:  # nothing is reduced
            return (("parameter", float(small)),) if small else ()
        second = stage.parameters * plan.bytes_per_element / self.options.zero_hpz_partition_size
        copy = second if self.options.zero_hpz_partition_size > 1 else 0.0
        return ("parameter", float(small + copy)), ("buffer", float(self.options.reduce_bucket_size * plan.bytes_per_gradient))

    def _integers(self, part: int) -> Memory:
        """The gathered integers of a part."""
        return (("temporary", float(self.moving(part) * QUANTISED)),) if self.quantised else ()

    def _pass(self, label: str, phase: str, elements: float, after: tuple[Ref, ...], free: Memory = ()) -> Ref:
        """Read one type, write the other."""
        key = label, phase, elements
        if key not in self._passes:
            moved = elements * (QUANTISED + self.stage.plan.bytes_per_element)
            kernel = Kernel("memory", label, phase, 0.0, moved, self.stage.plan.precision)
            self._passes[key] = Block(phase, (Run(1, (kernel,)),))
        return self.stage.add(Op(COMPUTE, self._passes[key], after, (), free))
