"""How ZeRO-3 brings a part's parameters together: from the host or not, quantised or not, from all ranks or from the node's.

ZeRO++ (Wang et al. 2023, arXiv:2306.10209): qwZ gathers 8-bit integers, with passes over memory to make them of the rank's own
part and to turn the whole back; as in DeepSpeed's code forward and backward. hpZ keeps a second copy sharded over the ranks of a
node, from which backward passes gather. Scales, a number per block of thousands of parameters, are left out.

Gathers and reductions of one process group are collectives of one NCCL communicator, which runs them one at a time in the order
in which they were launched, whatever the CUDA streams they come from: both are on the stream "dp". (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_common.py, FSDPMeshInfo; github.com/pytorch/pytorch pull requests 186335 and 177098;
DeepSpeed reduces and gathers in one group, too.) hpZ's groups are communicators of their own.

PyTorch's FSDP copies between collectives and tensors on the compute stream: FSDP2 what it gathered to the parameters, and
gradients to one buffer; FSDP1's flat parameters are where they are gathered (`plan.flat_parameters`).
"""

from __future__ import annotations

import math

from sim.program import COMPUTE, Block, Collective, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.shard_padding import padded
from strategies.layers.weight_matrices import matrices, vectors
from strategies.lowering.stage import Stage
from strategies.plan.options import DeepSpeed

QUANTISED = 1  # bytes of a quantised parameter
SECONDARY = "secondary"  # the stream of the communicator of a node's ranks, from which hpZ gathers


class ParameterGather:
    """Gathers of a stage's parts."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.options = stage, stage.plan.deepspeed or DeepSpeed.model_validate({})
        # each distinct piece of work is priced once
        self._works: dict[tuple[float, tuple[str, ...], float, int], Collective] = {}
        self._elements: dict[int, tuple[int, int]] = {}
        self._persistent: dict[int, int] = {}
        self._passes: dict[tuple[str, str, float], Block] = {}

    @property
    def kept(self) -> bool:
        """Whether the only rank has its parameters all the time."""
        return self.stage.plan.copies == 1 and not self.stage.host.has_parameters

    @property
    def quantised(self) -> bool:
        """Whether parameters travel as integers."""
        return self.options.zero_quantized_weights and not self.kept

    def elements(self, part: int) -> tuple[int, int]:
        """Elements of a part that all ranks along dp and cp share; of its experts, if other ranks have the same."""
        if part not in self._elements:
            self._elements[part] = self.stage.shared(part)
        return self._elements[part]

    def persistent(self, part: int) -> int:
        """Elements of the part that DeepSpeed never releases."""
        plan = self.stage.plan
        if plan.deepspeed is None or self.kept:
            return 0
        if part not in self._persistent:
            least = self.options.stage3_param_persistence_threshold
            small = [shape for shape in self.stage.shapes(part) if math.prod(shape) <= least]
            self._persistent[part] = padded(plan, small, self.stage.plan.shards)
        return self._persistent[part]

    def vectors(self, part: int) -> int:
        """Biases and norms of the part."""
        return vectors(self.stage.parts[part], self.stage.model)

    def tensors(self, part: int) -> list[int]:
        """Elements of each matrix of the part."""
        found = matrices(self.stage.parts[part], self.stage.model, self.stage.tied if part == len(self.stage.parts) - 1 else 0)
        return [rows * columns for (rows, columns), count in found.items() for _ in range(count)]

    def moving(self, part: int) -> int:
        """Elements that all ranks share and that come and go."""
        return self.elements(part)[0] - self.persistent(part)

    def whole(self, part: int) -> Memory:
        """The gathered parameters of a part."""
        if self.kept:
            return ()
        dense, experts = self.moving(part) * self.width(part), self.elements(part)[1] * self.width(part, True)
        return (("temporary", float(dense + experts)),)

    def width(self, part: int, experts: bool = False) -> float:
        """Bytes of a gathered parameter of the part, or of its experts."""
        return self.stage.gathered_width(part, part + 1, experts)

    def gather(self, part: int, after: tuple[Ref, ...], backward: bool) -> Ref:
        """Add all that brings the part's parameters here."""
        stage, experts, dense = self.stage, self.elements(part)[1], self.moving(part)
        if stage.host.has_parameters:
            alone = stage.plan.copies == 1
            after = (stage.host.fetch(dense / stage.plan.shards, after, self.whole(part) if alone else ()),)
            if alone:
                return after[0]
        local = backward and self.options.zero_hpz_partition_size > 1
        along = ("dp",) if local else stage.plan.sharing
        if self.quantised:
            shards = self.options.zero_hpz_partition_size if local else stage.plan.shards
            after = (self._pass("quantise parameters", "backward" if backward else "forward", dense / shards, after),)
        stream = SECONDARY if local else "dp"
        ref = self.all_gather(dense, along, after, self.whole(part) + self._narrow(part), self.width(part), stream=stream)
        return self.all_gather(experts, stage.plan.expert_sharing, (ref,), (), self.width(part, True)) if experts else ref

    def ready(self, part: int, gathered: Ref, backward: bool) -> Ref:
        """What the part's pass waits for, just before it."""
        phase = "backward" if backward else "forward"
        if not self.quantised:
            return gathered
        return self._pass("dequantise parameters", phase, self.moving(part), (gathered,), self._narrow(part))

    @property
    def copies(self) -> bool:
        """Whether PyTorch's FSDP stands between collectives and parameters: not Megatron-LM's, not DeepSpeed."""
        return self.stage.plan.pytorch_fsdp and self.stage.plan.copies > 1

    def copy_out(self, part: int, ref: Ref, backward: bool) -> None:
        """A pass begins with a copy of the part's gathered parameters."""
        if self.copies and not self.stage.plan.flat_parameters:
            moved = self.moving(part) * self.width(part) + self.elements(part)[1] * self.width(part, True)
            self.stage.copy("gathered parameters", "backward" if backward else "forward", (2.0 * moved,), ref, first=True)

    def copy_in(self, part: int, ref: Ref) -> None:
        """A pass ends with copies of the part's gradients.

        FSDP2 copies them into one buffer of the reduction's type (`foreach_reduce_scatter_copy_in`). In FSDP1 autograd joins
        them in a flat gradient, which is cast and divided (torch 2.13, torch/distributed/fsdp/_runtime_utils.py).
        """
        if not self.copies:
            return
        plan, elements = self.stage.plan, sum(self.elements(part))
        width, gradient = plan.bytes_per_element, plan.bytes_per_gradient
        joined = (2 * width, (width + gradient) * (width != gradient), 2 * gradient)
        passes = joined if plan.flat_parameters else (width + gradient,)
        self.stage.copy("gradients to reduce", "backward", tuple(float(each * elements) for each in passes if each), ref)

    def again(self, after: Ref) -> None:
        """After the update: gather what is never released."""
        parts = range(len(self.stage.parts))
        elements = sum(self.persistent(part) for part in parts)
        if elements and self.stage.plan.copies > 1:
            width, pieces = self.stage.plan.bytes_per_element, 0
            if not self.options.coalesced:  # one list, and of each tensor a copy of every rank's part
                least = self.options.stage3_param_persistence_threshold
                kept = sum(size <= least for part in parts for size in self.tensors(part))
                kept += sum(map(self.vectors, parts)) if self.stage.model.hidden <= least else 0
                pieces = self.stage.plan.shards * (1 + kept)
            self.all_gather(elements, self.stage.plan.sharing, (after,), (), width, quantised=False, pieces=pieces)

    def resident(self) -> Memory:
        """What is held besides the rank's part: parameters that are never released, a second copy, DeepSpeed's buffer."""
        stage, plan = self.stage, self.stage.plan
        if plan.deepspeed is None or stage.plan.copies == 1:
            return ()
        small = sum(self.persistent(part) for part in range(len(stage.parts))) * plan.bytes_per_element
        second = stage.parameters * plan.bytes_per_element / self.options.zero_hpz_partition_size
        copy = second if self.options.zero_hpz_partition_size > 1 else 0.0
        return ("parameter", float(small + copy)), ("buffer", float(self.options.reduce_bucket_size * plan.bytes_per_gradient))

    def _narrow(self, part: int) -> Memory:
        return (("temporary", float(self.moving(part) * QUANTISED)),) if self.quantised else ()

    def all_gather(
        self,
        elements: int,
        along: tuple[str, ...],
        after: tuple[Ref, ...],
        allocate: Memory,
        width: float,
        quantised: bool = True,
        stream: str = "dp",
        pieces: int = 0,
        held: bool = False,
    ) -> Ref:
        """Add an all-gather of `elements` of `width` bytes. pieces, held: see Collective and Op."""
        plan, narrow = self.stage.plan, quantised and self.quantised
        width = QUANTISED if narrow else width
        key = elements, along, width, pieces
        if key not in self._works:
            size = float(elements * width)
            self._works[key] = Collective(
                "all_gather", size, "dp", "parameters", plan.algorithm, 1, width, along=along, pieces=pieces
            )
        return self.stage.add(Op(stream, self._works[key], after, allocate=allocate, held=held))

    def _pass(self, label: str, phase: str, elements: float, after: tuple[Ref, ...], free: Memory = ()) -> Ref:
        """Read one type, write the other."""
        key = label, phase, elements
        if key not in self._passes:
            moved = elements * (QUANTISED + self.stage.plan.bytes_per_element)
            kernel = Kernel("memory", label, phase, 0.0, moved, self.stage.plan.precision)
            self._passes[key] = Block(phase, (Run(1, (kernel,)),))
        return self.stage.add(Op(COMPUTE, self._passes[key], after, (), free))
