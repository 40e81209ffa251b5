"""Data parallel strategies carried out: one file each, found by being there; names as in `strategies.data_parallel`.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from calibration.execute import buckets  # whose `local` has the name of a module of this package
from calibration.execute.chunks import Chunk, original, share
from calibration.execute.clipping import Clipping, Held
from calibration.execute.optimizers import Masters, make_optimizer
from calibration.execute.setup import Setup
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.registry import Registry


class Hook:
    """What dp ranks do around the passes of their chunks. Made as it is, it does nothing: one rank, or the reference."""

    one_process: ClassVar[bool] = False  # one process drives all dp GPUs
    divided: ClassVar[bool] = False  # dp ranks hold different parts of the gradients
    experts: ClassVar[bool] = False  # routed experts may be spread over ep ranks

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """Why the job cannot be executed."""
        return None

    @classmethod
    def reason(cls, job: Job, resolved: Resolved) -> str | None:
        """The same, also of what no strategy but some does."""
        if job.plan.ep > 1 and not cls.experts:
            return f"data_parallel={job.plan.data_parallel} with ep={job.plan.ep}: experts have other ranks to share with"
        return cls.check(job, resolved)

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        self.setup, self.chunks = setup, chunks
        for chunk in chunks:
            self.prepare(chunk)
        share(setup, chunks)
        self.modules: list[nn.Module] = [self.wrap(chunk) for chunk in chunks]
        for chunk in chunks:  # later DDP hides those that tp ranks cut from the module
            chunk.held = dict(chunk.net.named_parameters())
        self.optimizer = self.make_optimizer()
        self.clipping = Clipping(setup.plan, setup.device)

    def prepare(self, chunk: Chunk) -> None:
        """Give weights the plan's type, memory and values."""
        chunk.net.to(self.setup.dtype)
        chunk.materialise(self.setup.device)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """The module that is called in place of the chunk."""
        return chunk.net

    @classmethod
    def reference(cls, setup: Setup, net: nn.Module) -> nn.Module:
        """The module that the one process calls in place of the whole model."""
        return net

    def make_optimizer(self) -> Any:
        """Over the parameters of all chunks."""
        return make_optimizer(self.setup.plan, self.parameters())

    def parameters(self) -> list[Tensor]:
        """Of all chunks that are trained, each once."""
        every = (parameter for chunk in self.chunks for parameter in chunk.held.values() if parameter.requires_grad)
        return list(dict.fromkeys(every))

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around a microbatch's passes, when there is no pipeline."""
        return nullcontext()

    def backward(self, loss: Tensor, count: int, last: bool) -> None:
        """A microbatch's backward pass, when there is no pipeline; count: microbatches of the step."""
        factor = self.clipping.scale / count
        (loss * factor if factor != 1 else loss).backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        """After the last backward pass."""

    @torch.no_grad()
    def reduce_experts(self, chunk: Chunk) -> None:
        """Sum the gradients of routed experts over the ranks that have the same, one all-reduce per bucket, and make them the
        mean over all tokens: those of other ranks came to these experts.
        """
        setup = self.setup
        gradients = [parameter.grad for parameter in chunk.spread.values() if parameter.grad is not None]
        if gradients and setup.resolved.expert_copies > 1:
            buckets.reduce_in_buckets(gradients, setup.bucket, setup.group("dp"), mean=False)
        for gradient in gradients:
            gradient /= setup.resolved.copies

    def update(self) -> None:
        """The optimizer's, with clipped gradients; none where fp16's are not finite."""
        if self.clip():
            self.optimizer.step()

    def clip(self) -> bool:
        """Unscale and clip gradients: whether there is an update."""
        setup = self.setup
        together = setup.plan.tp > 1 or setup.plan.pp > 1 or setup.plan.ep > 1 or self.divided
        return self.clipping(self.gradients(), setup.norms * together, setup.replica % setup.norms)

    def gradients(self) -> Iterator[Held]:
        """What the optimizer reads, and how many ranks of those that share a norm hold each part."""
        masters = self.masters()
        for parameter in self.parameters():
            reader = masters.get(parameter, parameter)
            if reader.grad is not None:
                reader.grad = buckets.whole_sum(reader.grad)
                yield Held(buckets.local(reader.grad), self.copies(parameter, reader.grad))

    def masters(self) -> dict[Tensor, Tensor]:
        """The fp32 copies of 16-bit parameters, with their gradients."""
        if not isinstance(self.optimizer, Masters):
            return {}
        return dict(zip(self.optimizer.weights, self.optimizer.take(), strict=True))

    def copies(self, parameter: Tensor, gradient: Tensor) -> float:
        """How many of the ranks that share a norm hold the same part of a parameter's gradient."""
        setup = self.setup
        chunk, name = next((chunk, name) for chunk in self.chunks for name, held in chunk.held.items() if held is parameter)
        tied = setup.tied_apart and original(True, name) == "embedding.tokens.weight"
        return (2 if tied else 1) * setup.place.world / setup.plan.pp / setup.norms / chunk.parts(name, gradient)

    def zero(self) -> None:
        """Before the first pass of a step: gradients are freed or set to zero, as the plan says."""
        for parameter in self.parameters():
            if self.setup.plan.frees_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                buckets.local(parameter.grad).detach().zero_()

    def synchronise(self) -> None:
        """After the last of the local steps."""

    def value(self, chunk: Chunk, name: str) -> Tensor:
        """A parameter as one process has it: every rank that holds a part of it must ask."""
        return chunk.whole(name, chunk.held[name].detach())

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter, unscaled and clipped; None where no rank keeps it."""
        if parameter.grad is None or not isinstance(self.optimizer, Masters):
            return parameter.grad
        return parameter.grad.float() * self.clipping.factor  # its fp32 copy is gone


def hook_class(plan: Plan) -> type[Hook]:
    """Who carries out the plan's strategy."""
    return executed["deepspeed" if plan.deepspeed is not None else plan.data_parallel]


executed: Registry[type[Hook]] = Registry("executed data parallel strategy", package="calibration.execute.data_parallel")
