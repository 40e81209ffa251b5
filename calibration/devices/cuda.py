"""A GPU through torch.cuda."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from calibration.devices.base import Action, Clock, ComputeDevice, Kind, Memory
from calibration.devices.monitor import Monitor, NvidiaMonitor, free_memory

BF16 = (8, 0)  # compute capability from which products in bf16 and TF32 run on tensor cores (CUDA C++ Programming Guide, table of
FP8 = (8, 9)  # features by compute capability), and from which they do in fp8
CACHE = 6e7  # bytes of L2 where torch does not say
CYCLES = 2e9  # per second, of the clock that torch.cuda._sleep counts: an upper bound, so that it holds long enough
QUEUED = 0.02  # seconds that the device is held at most while the host queues a stretch


class CudaDevice(ComputeDevice):
    """Asynchronous: a stretch of actions is timed by events on the stream, with the actions queued before the first begins, so
    that kernels of microseconds are not timed at the speed of the host that launches them.
    """

    kind: ClassVar[Kind] = "cuda"
    backend: ClassVar[str] = "nccl"
    ordered: ClassVar[bool] = True
    any_source: ClassVar[bool] = False
    batch_norm: ClassVar[bool] = True
    beyond: ClassVar[str] = "memory that the device lost"
    copies: ClassVar[int] = 2**13  # of 64 KiB: an L2 cache has up to 126 MB, and three times as much is overwritten

    def __init__(self, index: int = 0) -> None:
        import torch

        super().__init__(index)
        self._cuda: Any = torch.cuda
        self._launching = 0.0  # seconds of the host for the stretch before

    @classmethod
    def of_rank(cls, local_rank: int) -> Self:
        """A launcher may show each of its processes one GPU, which is then the first that it sees."""
        alone = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
        return cls(0 if alone else local_rank)

    def count(self) -> int:
        """GPUs that CUDA shows to this process."""
        return int(self._cuda.device_count())

    def select(self) -> None:
        """Make it the current device."""
        self._cuda.set_device(self.index)

    @property
    def torch_device(self) -> Any:
        """Where tensors live."""
        import torch

        return torch.device("cuda", self.index)

    @property
    def communicates(self) -> Any:
        """NCCL makes its communicator at once, on this GPU."""
        return self.torch_device

    @property
    def _properties(self) -> Any:
        return self._cuda.get_device_properties(self.index)

    def facts(self) -> Mapping[str, Any]:
        """What the driver says of it."""
        own = self._properties
        return {
            "name": str(own.name),
            "memory": float(own.total_memory),
            "multiprocessors": int(own.multi_processor_count),
            "capability": f"{own.major}.{own.minor}",
            "cache": self.cache(),
            "uuid": str(getattr(own, "uuid", "")),
        }

    def versions(self) -> str:
        """NCCL and CUDA."""
        import torch

        return f"NCCL {'.'.join(map(str, self._cuda.nccl.version()))}, CUDA {torch.version.cuda}"

    def precisions(self) -> tuple[str, ...]:
        """bf16 first where it runs on tensor cores, else fp16 (V100, T4). AMD's have another fp8, and most no TF32."""
        import torch

        own = self._properties
        if torch.version.hip is not None:
            return ("bf16", "fp16", "fp32")
        if (own.major, own.minor) < BF16:
            return ("fp16", "fp32")
        return ("bf16", "fp16", "tf32", "fp32", *(["fp8"] if (own.major, own.minor) >= FP8 else []))

    @property
    def flash(self) -> bool:
        """From Ampere on ("FlashAttention only supports Ampere GPUs or newer", torch 2.13)."""
        own = self._properties
        return bool((own.major, own.minor) >= BF16)

    def use_tf32(self, allowed: bool) -> bool:
        """Of cuBLAS."""
        import torch

        before = bool(torch.backends.cuda.matmul.allow_tf32)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        return before

    def free(self, ranks: int) -> float:
        """What is free on it: a GPU takes one rank.

        CUDA tells it in a context alone, which takes memory itself, and of which a GPU in exclusive mode has one, its rank's: a
        process that has none here asks the driver.
        """
        import torch

        known = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        told = free_memory(self._driver_name) if known is not None and not known(self.index) else None
        return float(self._cuda.mem_get_info(self.index)[0]) if told is None else told

    def cache(self) -> float:
        """The L2 cache."""
        return float(getattr(self._properties, "L2_cache_size", 0) or CACHE)

    def held(self) -> float:
        """What the device has lost beyond the allocator's memory: context, libraries, communicators."""
        free, total = self._cuda.mem_get_info(self.index)
        return float(total - free - self._cuda.memory_reserved(self.index))

    def touch(self, size: float) -> None:
        """Nothing: its allocator maps memory once, in a warm-up."""

    def give_back(self) -> None:
        """What the caching allocator has cached."""
        self._cuda.empty_cache()

    def memory(self) -> Memory:
        """As the caching allocator counts it."""
        return CudaMemory(self._cuda, self.index)

    def synchronise(self) -> None:
        """Wait for all streams of the device."""
        self._cuda.synchronize(self.index)

    def times(self, action: Action, count: int, before: Action | None, batch: int, clock: Clock) -> NDArray[np.float64]:
        """By events. The stream is held while the host queues a stretch, for as long as it took the last time."""
        marks = []
        for _ in range(count):
            if before is not None:
                before()
            self._hold()
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            start.record()
            for _ in range(batch):
                action()
            end.record()
            self._launching = time.perf_counter() - begun
            marks.append((start, end))
        self.synchronise()
        return np.array([1e-3 * start.elapsed_time(end) for start, end in marks]) / batch

    def _hold(self) -> None:
        sleep = getattr(self._cuda, "_sleep", None)
        if sleep is not None and self._launching:
            sleep(int(CYCLES * min(1.5 * self._launching, QUEUED)))

    def clock(self) -> Clock:
        """The host's."""
        return time.perf_counter

    def monitor(self) -> Monitor:
        """Of this GPU."""
        return NvidiaMonitor(self._driver_name)

    @property
    def _driver_name(self) -> str:
        """As nvidia-smi knows it, which may number GPUs otherwise."""
        uuid = str(self.facts()["uuid"])
        return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else str(self.index)


class CudaMemory(Memory):
    """The allocator keeps peaks; what others left in its cache is given back first. Workspaces of cuBLAS, which it holds from the
    first product on (32 MiB on Hopper), are no tensors.
    """

    def __init__(self, cuda: Any, index: int) -> None:
        import torch

        self._cuda, self._index = cuda, index
        self._clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)

    def __enter__(self) -> Self:
        self._cuda.empty_cache()
        self.mark()
        return self

    def mark(self) -> None:
        """The peaks so far are forgotten."""
        self._cuda.synchronize(self._index)
        self._cuda.reset_peak_memory_stats(self._index)
        self.base = int(self._cuda.memory_allocated(self._index))

    def __exit__(self, *error: object) -> None:
        self._cuda.synchronize(self._index)
        self.peak = int(self._cuda.max_memory_allocated(self._index))
        self.reserved = int(self._cuda.max_memory_reserved(self._index))
        held = int(self._cuda.memory_allocated(self._index))
        self._clear()
        self.peak -= held - int(self._cuda.memory_allocated(self._index))
