"""How a stage gathers the sharded parameters of a part: from the ranks that share them, or from the host.

Gathers and reductions of one process group are collectives of one NCCL communicator, which runs them one at a time in the order
in which they were launched, whatever the CUDA streams they come from: both are on the stream "dp". (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_common.py, FSDPMeshInfo; github.com/pytorch/pytorch pull requests 186335 and 177098;
DeepSpeed reduces and gathers in one group, too.)

PyTorch's FSDP copies between collectives and tensors on the compute stream: FSDP2 what it gathered to the parameters, and
gradients to one buffer; FSDP1's flat parameters are where they are gathered (the option `flat_parameters`). What is gathered,
and the results of reductions, which are the gradients, are allocated on streams of their own (torch 2.13, `foreach_all_gather`
under `all_gather_copy_in_stream` and `foreach_reduce` under `reduce_scatter_stream` in _fully_shard/_fsdp_collectives.py;
`_unshard` and `_post_backward_hook` in fsdp/_runtime_utils.py), so that the caching allocator uses their blocks for nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sim.program import CACHED, GATHERED, Collective, Memory, Op, Ref
from strategies.lowering.stage import Stage
from strategies.lowering.stage_parts import once


class ParameterGather:
    """Gathers of a stage's parts; what is alike are its passes."""

    differences = ()

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        # each distinct piece of work is priced once
        self._works: dict[tuple[float, tuple[str, ...], float, int], Collective] = {}
        self.alike: dict[Hashable, Any] = {}

    @property
    def kept(self) -> bool:
        """Whether the only rank has its parameters all the time."""
        return self.stage.plan.copies == 1 and not self.stage.host.has_parameters

    @once
    def elements(self, part: int) -> tuple[int, int]:
        """Elements with gradients of a part that all ranks along dp and cp share; of its experts, if other ranks have the
        same.
        """
        return self.stage.shared(part)

    @once
    def moving(self, part: int) -> int:
        """Elements that all ranks share and that come and go."""
        return self.elements(part)[0] + self.stage.frozen(part)[0]

    @once
    def width(self, part: int, experts: bool = False) -> float:
        """Mean bytes of a gathered parameter of the part, or of its experts."""
        trained = self.stage.gathered_width(part, part + 1, experts)
        frozen, size = self.stage.frozen(part)
        if experts or not frozen:
            return trained
        elements = self.elements(part)[0]
        return (elements * trained + size) / (elements + frozen)

    def sent_width(self, part: int, experts: bool = False) -> float:
        """Bytes of a parameter of the part, or of its experts, while it is gathered."""
        return self.width(part, experts)

    @once
    def gathered_parameters(self, part: int) -> Memory:
        """The gathered parameters of a part."""
        if self.kept:
            return ()
        size = self._gathered(part)
        return (("temporary", size), *([(GATHERED, size)] if self.stage.fsdp_streams and self._flat else []))

    @once
    def gather_buffer(self, part: int) -> Memory:
        """FSDP2's buffer of a part's gather, from which it copies parameters before their pass, until the next part's gather."""
        size = self._gathered(part)
        return ((GATHERED, size), (CACHED, size)) if self.stage.fsdp_streams and not self._flat else ()

    def _gathered(self, part: int) -> float:
        """Bytes of the gathered parameters of a part."""
        return float(self.moving(part) * self.width(part) + self.elements(part)[1] * self.width(part, True))

    def gather(self, part: int, after: tuple[Ref, ...], backward: bool) -> Ref:
        """Add all that brings the part's parameters here."""
        stage, experts = self.stage, self.elements(part)[1]
        if stage.host.has_parameters:
            alone = stage.plan.copies == 1
            own = self.moving(part) / stage.plan.shards
            after = (stage.host.fetch(own, after, self.gathered_parameters(part) if alone else ()),)
            if alone:
                return after[0]
        ref = self.gather_dense(part, after, backward)
        return self.all_gather(experts, stage.plan.expert_sharing, (ref,), (), self.sent_width(part, True)) if experts else ref

    def gather_dense(self, part: int, after: tuple[Ref, ...], backward: bool) -> Ref:
        """Add the gather of the parameters that all ranks share."""
        memory = self.gathered_parameters(part) + self.gather_buffer(part)
        return self.all_gather(self.moving(part), self.stage.plan.sharing, after, memory, self.sent_width(part))

    def ready(self, part: int, gathered: Ref, backward: bool) -> Ref:
        """What the part's pass waits for, just before it."""
        return gathered

    @property
    def _flat(self) -> bool:
        """Whether parameters stay where they are gathered: FSDP1's."""
        return self.stage.plan.kernel_set.flat_parameters

    def copy_out(self, part: int, ref: Ref, backward: bool) -> None:
        """A pass begins with a copy of the part's gathered parameters."""
        if self.stage.fsdp_streams and not self._flat:
            moved = 2.0 * self._gathered(part)
            self.stage.copy("gathered parameters", "backward" if backward else "forward", (moved,), ref, first=True)

    def copy_in(self, part: int, ref: Ref) -> None:
        """A pass ends with copies of the part's gradients.

        FSDP2 copies them into one buffer of the reduction's type (`foreach_reduce_scatter_copy_in`). In FSDP1 autograd joins
        them in a flat gradient, which is cast and divided (torch 2.13, torch/distributed/fsdp/_runtime_utils.py).
        """
        if not self.stage.fsdp_streams:
            return
        plan, elements = self.stage.plan, sum(self.elements(part))
        width, gradient = plan.bytes_per_element, plan.bytes_per_gradient
        joined = (2 * width, (width + gradient) * (width != gradient), 2 * gradient)
        passes = joined if self._flat else (width + gradient,)
        self.stage.copy("gradients to reduce", "backward", tuple(float(each * elements) for each in passes if each), ref)

    def again(self, after: Ref) -> None:
        """After the update: gather what is never released, here nothing."""
        return

    def all_gather(
        self,
        elements: int,
        along: tuple[str, ...],
        after: tuple[Ref, ...],
        allocate: Memory,
        width: float,
        stream: str = "dp",
        pieces: int = 0,
        held: bool = False,
    ) -> Ref:
        """Add an all-gather of `elements` of `width` bytes. pieces, held: see Collective and Op."""
        key = elements, along, width, pieces
        if key not in self._works:
            size, algorithm = float(elements * width), self.stage.plan.algorithm
            self._works[key] = Collective("all_gather", size, "dp", "parameters", algorithm, 1, width, along=along, pieces=pieces)
        return self.stage.add(Op(stream, self._works[key], after, allocate=allocate, held=held))
