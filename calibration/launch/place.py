"""Where a rank is, and what it does there before and after its work: in processes started here, or under a launcher."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from calibration.devices import ComputeDevice, Kind, class_of, present
from topologies.documents.errors import UserError

# glibc returns large buffers to the system and faults them in again, which costs 5 to 20 % of a step; these thresholds keep them
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
PATIENT = 600.0
PATIENCE: ContextVar[float] = ContextVar("seconds that a rank waits for another", default=PATIENT)

Hear = Callable[[Any], None]


class RankError(UserError):
    """A rank failed: which, and its error line; `details` is all that it printed."""

    details = ""


@dataclass(frozen=True)
class Place:
    """Where a rank is. cores: those that it is pinned to; empty when it is not. `tell` passes plain data on to `hear`."""

    rank: int
    world: int
    local_rank: int
    device: Kind
    cores: tuple[int, ...]
    tell: Hear

    @cached_property
    def compute(self) -> ComputeDevice:
        """What the rank computes on."""
        return class_of(self.device).of_rank(self.local_rank)


def need_torch() -> None:
    """UserError without a torch that can be imported and talk to other processes."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed, and this runs the real thing: `pip install 'shardyard[torch]'`")
    try:
        import torch.distributed
    except (ImportError, OSError) as error:  # a library of another system, or of another CUDA
        raise UserError(f"torch is installed, but cannot be imported: {line_of(error)}") from None
    if not torch.distributed.is_available():
        raise UserError(f"torch {torch.__version__} was built without torch.distributed, and this needs it")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """While what was started is ended: a second Ctrl-C would leave it behind. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def find_device() -> Kind:
    """cuda when torch finds a GPU."""
    need_torch()
    return present()


def available_cores() -> tuple[int, ...]:
    """Cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def crowded(ranks: int, device: Kind) -> str | None:
    """What to say when there are more ranks than cores."""
    cores = len(available_cores())
    if class_of(device).ordered or ranks <= cores:
        return None
    return (
        f"{ranks} processes share {cores} cores: they take turns, and times are those of a crowded machine, several times "
        "slower, that no price was measured for"
    )


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Ranks that are launched inside wait so long for one that does not go on; then all are ended."""
    before = PATIENCE.set(seconds)
    try:
        yield
    finally:
        PATIENCE.reset(before)


def run_as_rank(work: Callable[..., Any], ranks: int, arguments: Sequence[Any], device: Kind, hear: Hear) -> list[Any]:
    import torch.distributed as dist

    place = _place_from_environment(device, hear)
    if place.world != ranks:
        raise UserError(f"WORLD_SIZE={place.world} of the launcher ≠ {ranks} ranks of the job")
    prepare(place)
    try:
        join(place, "env://")
    except Exception as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {place.rank}: cannot meet the others at {address}: {line_of(error)}") from None
    try:
        result = work(place, *arguments)
        results: list[Any] = [None] * place.world
        dist.gather_object(result, results if place.rank == 0 else None)
    except UserError:
        raise
    except Exception as error:  # most often because another rank is gone
        line = waited(line_of(error), PATIENCE.get())
        raise RankError(f"rank {place.rank} of {place.world} failed: {line}") from error
    leave()
    return results if place.rank == 0 else []


def _place_from_environment(device: Kind, tell: Hear) -> Place:
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = os.environ[name]
        if not text.isdecimal():
            raise UserError(f"environment: {name}={text!r}: must be a whole number")
        numbers[name] = int(text)
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world:
        raise UserError(f"environment: RANK={rank}: must be below WORLD_SIZE={world}")
    if numbers["LOCAL_RANK"] > rank:
        raise UserError(f"environment: LOCAL_RANK={numbers['LOCAL_RANK']}: must not be above RANK={rank}")
    return Place(rank, world, numbers["LOCAL_RANK"], device, (), tell)


def prepare(place: Place) -> None:
    """Pin, choose the GPU, and compute with as many threads as there are cores."""
    import torch

    if place.cores:
        os.sched_setaffinity(0, place.cores)
        torch.set_num_threads(len(place.cores))
    if place.compute.ordered and place.compute.index >= place.compute.count():
        found = place.compute.count()
        raise UserError(f"rank {place.rank}: needs GPU {place.compute.index} of this machine, and torch finds {found}")
    place.compute.select()


def join(place: Place, meeting: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        place.compute.backend,
        init_method=meeting,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=PATIENCE.get()),
        device_id=place.compute.communicates,
    )


def leave() -> None:
    """After work that went well (after an error NCCL would wait for operations that never end).

    What a rank sent by NCCL is under way when the operation returns: a process that ends before it has gone takes it along.
    """
    import torch.distributed as dist

    dist.destroy_process_group()


def waited(line: str, seconds: float) -> str:
    """An error line, and of a rank that waited too long for another, how long ranks do and what says so."""
    late = any(part in line.lower() for part in ("timed out", "timeout"))
    return f"{line}; ranks wait {seconds:g} s for each other (--timeout SECONDS)" if late else line


def line_of(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split("\n")[0].split()) or "no message"
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
