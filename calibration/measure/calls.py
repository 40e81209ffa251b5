"""What the call of a collective costs the host: Python and c10d, without a backend that sends.

`python -m calibration.measure.calls` prints it in CPU time, which others that compute beside it do not lengthen.
Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.measure.bench import Reading

CALLS = 200  # of a collective that sends nothing, one after the other
STRETCHES = 20  # of calls whose CPU time is taken


class Host(Protocol):
    """Where calls are timed: `calibration.measure.bench.Bench`."""

    @property
    def device(self) -> torch.device:
        """Of the tensors."""

    def launching(self, action: Callable[[], object], launches: int) -> Reading:
        """Seconds of the host for each of the launches that one action makes."""


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


def _timed(bench: Host, action: Callable[[], object]) -> Reading:
    """Seconds of the host for each of many calls."""

    def calls() -> None:
        for _ in range(CALLS):
            action()

    return bench.launching(calls, CALLS)


def _call(bench: Host) -> Reading:
    """Host seconds of torch.distributed.all_reduce, besides what the backend does."""
    x = torch.zeros(1, device=bench.device)
    with _sending_nothing() as group:
        return _timed(bench, lambda: dist.all_reduce(x, group=group))


def _backward(bench: Host) -> Reading:
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


class _CpuTime:
    """The least CPU time of this process over STRETCHES."""

    device = torch.device("cpu")

    def launching(self, action: Callable[[], object], launches: int) -> Reading:
        taken = []
        for _ in range(STRETCHES):
            start = time.process_time()
            action()
            taken.append((time.process_time() - start) / launches)
        return Reading(min(taken), min(taken), max(taken) / min(taken) - 1, STRETCHES)


if __name__ == "__main__":
    each = ", ".join(f"{kind} {1e6 * measure(_CpuTime()).value:.1f} us" for kind, measure in CALLED.items())
    print(f"CPU time of a call with torch {torch.__version__}: {each}")
