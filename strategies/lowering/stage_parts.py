"""What a pipeline stage consists of: sizes of its parts on one rank, sharded or gathered, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sim.program import Memory
from strategies.data_parallel.shard_padding import padded
from strategies.layers.layer_cost import LayerCost
from strategies.layers.operators import Shape
from strategies.models.model import Model
from strategies.optimizers import FLOAT
from strategies.plan.resolved import Resolved

PIPE_BUFFERS = 2  # of the last stage, in DeepSpeed's pipeline engine


class Alike(Protocol):
    """What may have equals. alike: what all of them have in common; differences: what tells them apart."""

    alike: dict[Hashable, Any]

    @property
    def differences(self) -> Hashable:
        """Equal for equals."""
        ...


A = TypeVar("A", bound=Alike)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once(method: Callable[Concatenate[A, Arguments], Result]) -> Callable[Concatenate[A, Arguments], Result]:
    """A method that is worked out once for all that are alike."""

    @wraps(method)
    def remembered(owner: A, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        key = (method, arguments, *options.items(), owner.differences)
        known = owner.alike.get(key)
        if known is None:
            known = owner.alike[key] = method(owner, *arguments, **options)
        result: Result = known
        return result

    return remembered


class StageParts:
    """Virtual stage `number` of the pipeline: `parts` (embedding, layers, head), the chunk `chunk` of pipeline rank `rank`.

    alike: what stages of the same parts have in common.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        chunk: int,
        parts: Sequence[LayerCost],
        plan: Resolved,
        model: Model,
        alike: dict[Hashable, Any] | None = None,
    ) -> None:
        self.alike: dict[Hashable, Any] = {} if alike is None else alike
        self.number, self.rank, self.chunk = number, rank, chunk
        self.parts, self.plan, self.model = tuple(parts), plan, model
        self.kinds = [(part, len(list(same))) for part, same in groupby(self.parts)]  # parts that follow each other, how many
        self._elements = sum(count * part.parameters for part, count in self.kinds)
        self.tied = 0  # parameters of a second copy of the tied embedding
        self.tied_frozen = 0  # the same where it is not trained
        self.shared_embedding = False  # whether another rank's stage has such a copy of its embedding
        self.received = self.output = 0.0  # bytes per microbatch, with kernels=torch: see `buffers`

    @property
    def differences(self) -> Hashable:
        """What tells stages of the same parts apart: copies of the embedding, buffers, which bucket is the first."""
        copies = self.tied, self.tied_frozen, self.shared_embedding
        return *copies, self.received, self.output, self.rank == 0, self.chunk == 0

    @property
    def parameters(self) -> int:
        """Elements on one rank of the stage that have gradients, before any data parallel sharding."""
        return self._elements + self.tied

    @property
    def lowest(self) -> int:
        """The first part that has a backward pass: below it nothing is trained."""
        return next(number for number, part in enumerate(self.parts) if part.backward)

    def frozen(self, part: int) -> tuple[int, float]:
        """Elements of a part's parameters that have no gradients, with what fills them up when ranks shard them, and their
        bytes.
        """
        own, more = self.parts[part], self.tied_frozen if part == len(self.parts) - 1 else 0
        if not own.frozen + more:
            return 0, 0.0
        elements = padded(self.plan, own.frozen_shapes, self.plan.shards) + more
        size = own.frozen_bytes + more * self.plan.bytes_per_element
        return elements, size * elements / (own.frozen + more)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of parameters without gradients that a rank holds all the time."""
        shards = self.plan.shards if "parameter" in self.plan.hook.shards else 1
        if shards > 1:
            return sum(self.frozen(part)[1] for part in range(len(self.parts))) / shards
        return sum(count * part.frozen_bytes for part, count in self.kinds) + self.tied_frozen * self.plan.bytes_per_element

    @property
    def module_buffers(self) -> list[tuple[int, int]]:
        """Bytes of an element, and elements, of each buffer of its modules."""
        return [sizes for part, count in self.kinds for sizes in part.buffers * count]

    def buffers(self, received: float, sent: float, microbatches: int) -> Memory:
        """What torch.distributed.pipelining holds for transfers of so many bytes from the stage before and to the stage after; 0
        where there is none on another rank. microbatches: of the whole step.

        Buffers for what it will receive of every microbatch stay for the whole step (an activation is used where it was
        received), and a stage's result stays until its backward pass, also the logits (torch 2.13, PipelineStage).
        """
        head = self.parts[-1]
        self.received = received
        self.output = sent or head.logits
        return (("buffer", microbatches * (received + sent)),)

    @once
    def sharded(self, shards: float) -> float:
        """Elements that a rank has when the ranks with the same parameters share them out over `shards` of them: of experts,
        which differ from ep rank to ep rank, fewer ranks have the same.
        """
        if shards == self.plan.shards:
            every = [(*self._padded(part), count) for part, count in self.kinds]
            dense, spread = (sum(count * each[which] for *each, count in every) for which in (0, 1))
            return dense / shards + spread / self.expert_shards
        experts = sum(count * part.experts for part, count in self.kinds)
        return (self.parameters - experts) / shards + experts / self.plan.expert_sharers(shards)

    def updated(self, shards: float) -> float:
        """Elements of `sharded` that the optimizer is given."""
        outside = sum(count * part.parameters for part, count in self.kinds if part.name in self.plan.outside_optimizer)
        return self.sharded(shards) - outside / shards

    @property
    def expert_shards(self) -> int:
        """How many ranks share the states of the same experts."""
        return self.plan.expert_sharers(self.plan.shards)

    def shapes(self, part: int, spread: bool = False) -> list[Shape]:
        """Shapes of a part's parameters on this rank; spread: of its experts that are spread over ep ranks."""
        return self._shapes(self.parts[part], spread)

    def _shapes(self, part: LayerCost, spread: bool) -> list[Shape]:
        return [gradient.shape for gradient in part.gradients if gradient.spread == spread and (self.tied or not gradient.tied)]

    def shared(self, part: int) -> tuple[int, int]:
        """Elements of a part, and of its experts, that several ranks have, with what fills them up when these shard them."""
        dense, experts = self._padded(self.parts[part])
        return dense, experts if self.plan.expert_copies > 1 else 0

    def _padded(self, part: LayerCost) -> tuple[int, int]:
        dense, experts = self._shapes(part, spread=False), self._shapes(part, spread=True)
        return padded(self.plan, dense, self.plan.shards), padded(self.plan, experts, self.expert_shards)

    def gathered_width(self, first: int, last: int, experts: bool = False) -> float:
        """Mean bytes of a parameter of parts first … last − 1 (of their spread experts) on its way when it is gathered."""
        wide, narrow, parts = self.plan.bytes_per_element, self.plan.least_gathered, self.parts[first:last]
        if narrow == wide:
            return wide
        fp8 = sum(part.fp8_expert_parameters if experts else part.fp8_parameters for part in parts)
        every = sum(part.experts if experts else part.parameters - part.experts for part in parts)
        return wide - (wide - narrow) * fp8 / max(1, every + (0 if experts or last < len(self.parts) else self.tied))

    @property
    def cached(self) -> Memory:
        """fp8 copies of weights that Transformer Engine keeps beside whole 16-bit parameters."""
        plan = self.plan
        alone = plan.lora is not None and plan.lora.weights == "fp8"  # there are no others
        if plan.fp8 is None or plan.fp8.gather or plan.kernel_set.torchao or plan.shards_parameters or alone:
            return ()
        return (("parameter", float(plan.fp8_copies * plan.fp8.width * self.fp8_parameters)),)

    @property
    def fp8_parameters(self) -> int:
        """Those of products in fp8."""
        return sum(count * (part.fp8_parameters + part.fp8_expert_parameters) for part, count in self.kinds)

    @property
    def kept_logits(self) -> Memory:
        """Logits of two microbatches before, which the last stage of DeepSpeed's pipeline engine has when it makes those of
        another: it drops its results only where others take their place in two buffers, not after their backward pass
        (deepspeed/runtime/pipe/engine.py, _exec_forward_pass, _exec_backward_pass; schedule.py, num_pipe_buffers). The results of
        Megatron-DeepSpeed's GPT are fp32 (megatron/model/gpt_model.py, GPTModelPipe: float16_to_fp32).
        """
        plan, logits = self.plan, self.parts[-1].logits
        if not plan.pipeline_engine or not logits:
            return ()
        width = FLOAT if plan.kernel_set.pipeline_modules else plan.bytes_per_element
        return (("buffer", min(PIPE_BUFFERS, plan.microbatches) * logits / plan.bytes_per_element * width),)

    def spread(self, first: int, last: int) -> int:
        """Elements of the experts of parts first … last − 1 when other ranks have the same ones; 0 when each has its own."""
        return sum(part.experts for part in self.parts[first:last]) if self.plan.expert_copies > 1 else 0
