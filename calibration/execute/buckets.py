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


def in_buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Neighbouring tensors of at most `limit` bytes together; a larger one alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.nbytes for one in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@torch.no_grad()
def reduce_in_buckets(tensors: Sequence[Tensor], limit: float, group: Any, mean: bool = True) -> None:
    """Replace tensors by their mean (or sum) over the group, one all-reduce per bucket."""
    for bucket in in_buckets(map(local, tensors), limit):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        if mean:
            flat /= dist.get_world_size(group)
        for tensor, piece in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))
