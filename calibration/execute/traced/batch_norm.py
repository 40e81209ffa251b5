"""Batch normalisation over the samples of all dp ranks, by the exchange of torch.nn.SyncBatchNorm.

PyTorch's own takes tensors of GPUs alone ("SyncBatchNorm expected input tensor to be on GPU", torch 2.13), and its kernels exist
nowhere else. On GPUs it is what runs; elsewhere what ranks send is the same (torch/nn/modules/_functions.py: an all-gather of
mean, variance and count of each rank forward, an all-reduce of two sums for each channel backward), and the arithmetic is
written out.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from calibration.execute.buckets import wide


def synchronise(net: nn.Module, group: Any, torchs: bool) -> None:
    """Every batch normalisation inside a module, over the ranks of `group`; None: over what one process is given. torchs: whether
    the device's tensors may go to PyTorch's own.
    """
    for module in net.modules():
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                setattr(module, name, _synchronised(child, group, torchs))


def _synchronised(norm: _BatchNorm, group: Any, torchs: bool) -> nn.Module:
    if not torchs or group is None:
        return BatchNorm(norm, group)
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    result: nn.Module = convert(norm, group)
    return result


class BatchNorm(_BatchNorm):
    """In the place of another one, with its parameters and buffers; of inputs of any dimension."""

    def __init__(self, other: _BatchNorm, group: Any) -> None:
        super().__init__(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        self._parameters, self._buffers = other._parameters, other._buffers
        self.train(other.training)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        """Any."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, …) to the same."""
        if self.group is None or not self.training:
            return super().forward(input)
        exchanged: Any = Exchanged.apply
        result, mean, variance, count = exchanged(input, self.weight, self.bias, self.eps, self.group)
        self._track(mean, variance * count / (count - 1))
        return result  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Running statistics, as torch.nn.BatchNorm2d has them: of the variance without bias."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


class Exchanged(torch.autograd.Function):
    """The result, and mean, variance and count over all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any) -> Any:
        """x: (batch, channels, …)."""
        channels, others = x.shape[1], [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(wide(x), others, correction=0)
        mine = torch.cat([mean, variance, mean.new_tensor([x.numel() / channels])])
        every = mine.new_empty(dist.get_world_size(group) * len(mine))
        dist.all_gather_into_tensor(every, mine, group=group)
        means, variances, counts = torch.split(every.view(-1, len(mine)), [channels, channels, 1], 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        context.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), total)
        context.group, context.others = group, others
        context.mark_non_differentiable(mean, variance, total)
        result = functional.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), weight, bias, False, 0.0, eps)
        return result, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(context: Any, upstream: Tensor, *_: Any) -> Any:
        """Gradients of the input, by all ranks' samples; of weight and bias, by this rank's."""
        x, weight, mean, inverse, total = context.saved_tensors
        shape, dy = [1, -1] + [1] * (x.dim() - 2), wide(upstream)
        normal = (wide(x) - mean.view(shape)) * inverse.view(shape)
        own = torch.cat([dy.sum(context.others), (dy * normal).sum(context.others)])
        sums = own.clone()
        dist.all_reduce(sums, group=context.group)
        first, second = (part.view(shape) / total for part in sums.chunk(2))
        scale = inverse if weight is None else inverse * wide(weight)
        gradient = ((dy - first - normal * second) * scale.view(shape)).to(x.dtype)
        of_bias, of_weight = (None if weight is None else part.to(weight.dtype) for part in own.chunk(2))
        return gradient, of_weight, of_bias, None, None
