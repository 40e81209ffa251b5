"""Data parallel strategies carried out: one file each, found by being there; names as in `strategies.data_parallel`.

Its modules import torch: use `executed` inside the function that needs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from topologies.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calibration.execute.chunks import Chunk
    from calibration.execute.setup import Setup
    from strategies.job import Job
    from strategies.plan.resolved import Resolved


class Hook:
    """What dp ranks do around the passes of their chunks. Made as it is, it does nothing: one rank, or the reference."""

    one_process: ClassVar[bool] = False  # one process drives all dp GPUs

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """Why the job cannot be executed."""
        return None

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        self.setup, self.chunks = setup, chunks
        for chunk in chunks:
            self.prepare(chunk.net)
        self.modules: list[nn.Module] = [self.wrap(chunk) for chunk in chunks]
        for chunk in chunks:  # later DDP hides those that tp ranks cut from the module
            chunk.held = dict(chunk.net.named_parameters())
        self.optimizer = self.make_optimizer()

    def prepare(self, net: nn.Module) -> None:
        """Give weights the plan's type."""
        net.to(self.setup.dtype)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """The module that is called in place of the chunk."""
        return chunk.net

    def make_optimizer(self) -> Any:
        """Over the parameters of all chunks."""
        from calibration.execute.optimizers import make_optimizer

        return make_optimizer(self.setup.plan, self.parameters())

    def parameters(self) -> list[Tensor]:
        """Of all chunks, each once."""
        return list(dict.fromkeys(parameter for chunk in self.chunks for parameter in chunk.held.values()))

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around a microbatch's passes, when there is no pipeline."""
        return nullcontext()

    def reduce(self) -> None:
        """After the last backward pass."""

    def update(self) -> None:
        """The optimizer's."""
        self.optimizer.step()

    def zero(self) -> None:
        """Before the first pass of a step: gradients are freed or set to zero, as the plan says."""
        from calibration.execute.buckets import local

        for parameter in self.parameters():
            if self.setup.plan.frees_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                local(parameter.grad).detach().zero_()

    def synchronise(self) -> None:
        """After the last of the local steps."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The reduced gradient of a parameter; None where no rank keeps it."""
        return parameter.grad


executed: Registry[type[Hook]] = Registry("executed data parallel strategy", package="calibration.execute.data_parallel")
