"""What the call of a collective costs the host: Python and c10d, without a backend that sends.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.measure.bench import Bench, Reading

CALLS = 200  # of a collective that sends nothing, one after the other


@contextmanager
def _sending_nothing() -> Iterator[dist.ProcessGroup | None]:
    """A process group of torch's own tests, whose collectives end at once: what is left is Python and c10d."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        group = dist.new_group(backend="fake")
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _timed(bench: Bench, action: Callable[[], object]) -> Reading:
    """Seconds of the host for each of many calls."""

    def calls() -> None:
        for _ in range(CALLS):
            action()

    return bench.launching(calls, CALLS)


def _call(bench: Bench) -> Reading:
    """Host seconds of torch.distributed.all_reduce, besides what the backend does."""
    x = torch.zeros(1, device=bench.device)
    with _sending_nothing() as group:
        return _timed(bench, lambda: dist.all_reduce(x, group=group))


def _backward(bench: Bench) -> Reading:
    """The same of a call in the backward pass of an autograd function, as tensor parallel layers make it, less the function."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
            ctx.group = group
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.group is not None:
                dist.all_reduce(gradient, group=ctx.group)
            return gradient, None

    x, one = torch.zeros(1, device=bench.device, requires_grad=True), torch.ones(1, device=bench.device)

    def run(group: dist.ProcessGroup | None) -> None:
        Copy.apply(x, group).backward(one)  # type: ignore[no-untyped-call]

    with _sending_nothing() as group:
        called, plain = _timed(bench, lambda: run(group)), _timed(bench, lambda: run(None))
    more = max(called.value - plain.value, 1e-9)
    return Reading(more, more, (called.spread * called.value + plain.spread * plain.value) / more, called.count)


CALLED = {"collective": _call, "collective backward": _backward}  # by kind of launch
