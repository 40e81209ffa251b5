"""Local SGD and DiLoCo by plain collectives: dp ranks train by themselves for `local_steps` steps, then agree."""

from __future__ import annotations

import torch
from torch import Tensor

from calibration.execute.buckets import local, reduce_in_buckets, wide
from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.setup import Setup

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # arXiv:2311.08105: Nesterov momentum; learning rate 0.7, momentum 0.9


@executed("local_sgd")
class LocalSGD(Hook):
    """Parameters are averaged."""

    def synchronise(self) -> None:
        """All-reduce the parameters in buckets."""
        if self.setup.resolved.dp > 1:
            self._reduce([parameter.data for parameter in self.parameters()])

    def _reduce(self, values: list[Tensor]) -> None:
        """Their mean, in the buckets in which gradients would be reduced: the last layer's first."""
        reduce_in_buckets(values[::-1], self.setup.bucket, self.setup.group("dp"))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Each rank has its own."""
        return parameter.grad if self.setup.resolved.dp == 1 else None


@executed("diloco")
class DiLoCo(LocalSGD):
    """The mean change of the parameters is the gradient of an outer Nesterov momentum."""

    def __init__(self, setup: Setup, chunks: list[Chunk]) -> None:
        super().__init__(setup, chunks)
        self.start = [wide(local(parameter.detach())).clone() for parameter in self.parameters()]
        self.momentum = [torch.zeros_like(value) for value in self.start]

    @torch.no_grad()
    def synchronise(self) -> None:
        """Subtract, all-reduce, update."""
        if self.setup.resolved.dp == 1:
            return
        values = [local(parameter.detach()) for parameter in self.parameters()]
        for start, value in zip(self.start, values, strict=True):
            value.copy_(start - value)
        self._reduce(values)
        outer_update(self.start, self.momentum, values)
        for start, value in zip(self.start, values, strict=True):
            value.copy_(start)


@torch.no_grad()
def outer_update(start: list[Tensor], momentum: list[Tensor], change: list[Tensor]) -> None:
    """Nesterov momentum as torch.optim.SGD has it, in place, on fp32 parameters `start`."""
    for value, moment, gradient in zip(start, momentum, change, strict=True):
        moment.mul_(OUTER_MOMENTUM).add_(gradient)
        value.sub_(gradient + OUTER_MOMENTUM * moment, alpha=OUTER_RATE)
