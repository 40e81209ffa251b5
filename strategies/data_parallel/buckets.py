"""Which gradients are reduced together, and when the backward pass has made all of them.

A bucket holds whole parameters in the order in which their gradients are made. PyTorch's DDP closes it with the parameter that
fills it (Li et al. 2020, arXiv:2006.15704, section 4.2; torch/csrc/distributed/c10d/reducer.cpp,
compute_bucket_assignment_by_size), and so does Megatron-LM (megatron/core/distributed/param_and_grad_buffer.py); the reduction
starts when its last gradient is made, inside of a layer. DeepSpeed reduces what is in its bucket when a gradient that has just
been made does not fit (deepspeed/runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads), and the rest
after the backward pass. Experts that are spread over ep ranks have buckets of their own: other ranks have the same.

Sizes, unless the plan says one:
* DDP and its hooks: 25 MiB, the first 1 MiB (torch 2.13, nn/parallel/distributed.py, _BucketCapacityConfig);
* Megatron-LM: max(40e6, 1e6·dp) parameters; whole stages without overlap, on pipeline ranks after the first and in chunks after
  the first (distributed_data_parallel.py; training.py, disable_bucketing). Its FSDP (zero2) cuts on every pipeline rank;
* Megatron-LM of 2020 to 2022 (kernels=apex): all after the backward pass, or with overlap PyTorch's DDP (--DDP-impl).

Buffers that ranks share out evenly (Megatron-LM's distributed optimizer) have gaps: each parameter starts, and each bucket ends,
at a multiple of so many elements (`Alignment`). What fills the gaps is moved and held with the rest. An embedding that two
pipeline stages have is a bucket of its own there, but in chunks after the first, where all buckets are reduced together.

Parameters that are gathered in fp8 have a buffer of their own there. Those of 16 bits (embedding, head, norms) are reduced, and
gathered, with the last bucket of that buffer, all of them (param_and_grad_buffer.py, partition_buckets): when the first layers'
gradients are there, and before the first layer runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from strategies.data_parallel.shard_padding import multiple
from strategies.frameworks import Alignment
from strategies.layers.operators import Shape
from strategies.plan.resolved import Resolved

MIB = 2.0**20
PYTORCH, FIRST = 25 * MIB, 1 * MIB  # bytes


class Cut(NamedTuple):
    """A moment of a backward pass: all parts after `part` are over, and of `part` but `left` items are to run."""

    part: int
    left: int = 0


class Gradient(NamedTuple):
    """A parameter's gradient and when it is made; shared: of an embedding that another pipeline stage has, too; fp8: of a
    parameter that is in the buffer of those that are gathered in fp8.
    """

    shape: Shape
    complete: Cut
    spread: bool
    shared: bool = False
    fp8: bool = False


class Bucket(NamedTuple):
    """Gradients of `shapes`, `elements` in all, that are reduced from `cut` on; spread: of experts that are spread over ep ranks.
    padding: elements between and behind them. fp8: of both, those that are gathered in fp8.
    """

    cut: Cut
    shapes: tuple[Shape, ...]
    elements: int
    spread: bool
    padding: int = 0
    fp8: int = 0


class Limits(NamedTuple):
    """Elements that close the first bucket and any other; fits: a bucket never has more, unless one parameter has. aligned: of
    parameters that all ranks have, and of experts that are spread over ep ranks.
    """

    first: float
    size: float
    fits: bool = False
    aligned: tuple[Alignment, Alignment] = (Alignment(), Alignment())


def limits(plan: Resolved, rank: int = 0, chunk: int = 0) -> Limits:
    """Sizes of the buckets of chunk `chunk` of pipeline rank `rank`."""
    if (room := plan.runtime.reduce_bucket_size) is not None:
        return Limits(room, room, fits=True)
    first, size = _sizes(plan, (rank == 0 or "gradient" in plan.hook.shards) and chunk == 0)
    if not plan.hook.even_buckets:
        return Limits(first, size)
    experts = plan.expert_sharers(plan.shards)
    dense, spread = (plan.kernel_set.alignment(ranks) for ranks in (plan.shards, experts))
    return Limits(first, size, aligned=(dense._replace(shared_apart=dense.shared_apart and chunk == 0), spread))


def _sizes(plan: Resolved, first: bool) -> tuple[float, float]:
    """Elements that close the first bucket and any other. first: of the stage whose backward pass ends a step."""
    width, hook = plan.bytes_per_gradient, plan.hook
    if plan.bucket is not None:
        return plan.bucket / width, plan.bucket / width
    size = plan.kernel_set.bucket(plan.overlap, first, plan.dp) if hook.framework_buckets else None
    if size is not None:
        return size, size
    return (FIRST if hook.of_ddp else PYTORCH) / width, PYTORCH / width


def filled(gradients: Iterable[Gradient], of: Limits, end: Cut) -> list[Bucket]:
    """Buckets of gradients in the order in which they are made; `end` is the end of the backward pass."""
    result: list[Bucket] = []
    for spread, aligned in zip((False, True), of.aligned, strict=True):
        own = [gradient for gradient in gradients if gradient.spread == spread]
        fp8, wide = (
            _filled([gradient for gradient in own if gradient.fp8 == narrow], of, aligned, end) for narrow in (True, False)
        )
        fp8 = [bucket._replace(fp8=bucket.elements + bucket.padding) for bucket in fp8]
        result += [*fp8[:-1], _together(fp8[-1:] + wide)] if fp8 and wide else fp8 + wide
    return sorted(result, key=lambda bucket: (-bucket.cut.part, -bucket.cut.left, bucket.spread))


def _together(buckets: Sequence[Bucket]) -> Bucket:
    """What is reduced at once, when the last of all these gradients is made."""
    last = min(buckets, key=lambda bucket: (bucket.cut.part, bucket.cut.left))
    shapes = tuple(chain.from_iterable(bucket.shapes for bucket in buckets))
    elements, padding, fp8 = (sum(getattr(bucket, size) for bucket in buckets) for size in ("elements", "padding", "fp8"))
    return Bucket(last.cut, shapes, elements, last.spread, padding, fp8)


def _filled(gradients: Sequence[Gradient], of: Limits, aligned: Alignment, end: Cut) -> list[Bucket]:
    result: list[Bucket] = []
    held, length, limit = list[Shape](), 0, of.first
    previous = end

    def close(cut: Cut) -> None:
        nonlocal held, length, limit
        elements = sum(map(math.prod, held))
        padding = multiple(length, aligned.end) - elements
        result.append(Bucket(cut, tuple(held), elements, gradients[0].spread, padding))
        held, length, limit = [], 0, of.size

    for gradient in gradients:
        size = math.prod(gradient.shape)
        alone = gradient.shared and aligned.shared_apart
        if held and (alone or (of.fits and length + size > limit)):
            close(previous if alone else gradient.complete)
        held.append(gradient.shape)
        length = multiple(length, aligned.start) + size
        if alone or (not of.fits and length >= limit):
            close(gradient.complete)
        previous = gradient.complete
    if held:
        close(end if of.fits else gradients[-1].complete)
    return result
