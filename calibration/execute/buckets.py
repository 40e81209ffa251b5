"""Plain collectives over many tensors: a few flat buffers in their place.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wide(tensor: Tensor) -> Tensor:
    """In fp32 at least."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def whole_sum(gradient: Tensor) -> Tensor:
    """A gradient of which tp ranks have partial sums, added up."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor) or not any(how.is_partial() for how in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if how.is_partial() else how for how in gradient.placements])


def held(parameter: Tensor) -> Tensor:
    """The tensor in which this rank holds its part of a parameter: to be given other memory."""
    from torch.distributed.tensor import DTensor

    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def like(parameter: Tensor, flat: Tensor) -> Tensor:
    """A flat tensor as a gradient of this rank's part of a parameter, cut over ranks as that is."""
    from torch.distributed.tensor import DTensor

    view = flat.view_as(held(parameter))
    if not isinstance(parameter, DTensor):
        return view
    how = (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(view, *how, run_check=False, shape=parameter.shape, stride=parameter.stride())


def in_buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Neighbouring tensors, until they have `limit` bytes or more together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(held(member).nbytes for member in bucket) >= limit:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@torch.no_grad()
def reduce_in_buckets(tensors: Sequence[Tensor], limit: float, group: Any, mean: bool = True) -> None:
    """Replace tensors by their mean (or sum) over the group, one all-reduce per bucket."""
    for bucket in in_buckets(map(local, tensors), limit):
        _reduce(bucket, group, mean)


def _reduce(bucket: Sequence[Tensor], group: Any, mean: bool) -> None:
    """One all-reduce; its flat tensor is gone when this returns."""
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    dist.all_reduce(flat, group=group)
    if mean:
        flat /= dist.get_world_size(group)
    for tensor, piece in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(piece.view_as(tensor))
