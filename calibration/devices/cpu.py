"""The cores of a process."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from calibration.devices.base import Action, Clock, ComputeDevice, Kind, Memory
from calibration.devices.monitor import CpuMonitor, Monitor

CACHE = 2.4e7  # bytes of a last-level cache, where the system does not say


class CpuDevice(ComputeDevice):
    """Synchronous: an action is over when it returns. The process is pinned to its cores by who starts it."""

    kind: ClassVar[Kind] = "cpu"
    backend: ClassVar[str] = "gloo"
    ordered: ClassVar[bool] = False
    any_source: ClassVar[bool] = True
    batch_norm: ClassVar[bool] = False
    beyond: ClassVar[str] = "resident memory of a process"
    copies: ClassVar[int] = 16

    def count(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def select(self) -> None:
        """Nothing to choose."""

    @property
    def torch_device(self) -> Any:
        """Where tensors live."""
        import torch

        return torch.device("cpu")

    @property
    def communicates(self) -> Any:
        """Gloo is told nothing."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """The processor, and the machine's memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"name": processor(), "memory": float(memory), "cores": os.cpu_count() or 1, "cache": self.cache()}

    def versions(self) -> str:
        """Gloo is part of torch."""
        return "gloo"

    def precisions(self) -> tuple[str, ...]:
        """What PyTorch's CPU kernels are quick in."""
        return ("fp32",)

    @property
    def flash(self) -> bool:
        """There is a kernel of its own."""
        return True

    def use_tf32(self, allowed: bool) -> bool:
        """Cores have none."""
        return False

    def free(self, ranks: int) -> float:
        """An equal share of what the machine has left; 4 GiB where it does not say."""
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                left = next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            left = 2.0**32
        return left / max(1, ranks)

    def cache(self) -> float:
        """The largest cache of the first core, as Linux describes it."""
        sizes = [0.0]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            text = path.read_text(encoding="ascii").strip()
            if match := re.fullmatch(r"(\d+)([KM])", text):
                sizes.append(float(match[1]) * {"K": 2.0**10, "M": 2.0**20}[match[2]])
        return max(sizes) or CACHE

    def held(self) -> float:
        """What is resident."""
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def touch(self, size: float) -> None:
        """Write so many bytes once and let go of them: the allocator keeps them mapped (`calibration.launch.place.ALLOCATOR`).

        A new page costs a fault, in a virtual machine whose host has to find it 14 µs (zeros of 8 MB 29 ms, and 1 ms afterwards);
        training pays that in its first steps only.
        """
        import torch

        torch.ones(max(1, int(size)), dtype=torch.uint8)

    def give_back(self) -> None:
        """Nothing: pages are to stay mapped."""

    def memory(self) -> Memory:
        """Of all tensors that are alive."""
        return CpuMemory()

    def synchronise(self) -> None:
        """Nothing is queued."""

    def times(self, action: Action, count: int, before: Action | None, batch: int, clock: Clock) -> NDArray[np.float64]:
        """By the clock."""
        seconds = np.empty(count)
        for number in range(count):
            if before is not None:
                before()
            start = clock()
            for _ in range(batch):
                action()
            seconds[number] = clock() - start
        return seconds / batch

    def clock(self) -> Clock:
        """CPU time of one thread: the same when nobody takes its core away, and still right when somebody does."""
        import torch

        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def monitor(self) -> Monitor:
        """Of all cores."""
        return CpuMonitor()


class CpuMemory(Memory):
    """Tensors alive are counted: PyTorch's profiler has the allocator's events, but not those of gloo's threads, which are often
    the last to let go of a buffer; resident-set size would be off by what libraries and the C library keep. Nothing is reserved
    beyond that.
    """

    def __init__(self) -> None:
        from calibration.devices.holding import Holding

        self._holding = Holding()

    def __enter__(self) -> Self:
        self._holding.__enter__()
        return self

    def mark(self) -> None:
        """The peak so far is forgotten."""
        self.base = self._holding.peak = self._holding.held

    def __exit__(self, *error: object) -> None:
        self._holding.__exit__(*error)
        self.peak = self.reserved = self._holding.peak


def processor() -> str:
    """The processor's name, with family and model where the system says them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {
        key: match[1].strip()
        for key in ("model name", "cpu family", "model")
        if (match := re.search(rf"^{key}\s*:(.*)$", text, re.M))
    }
    family = f" (family {fields['cpu family']} model {fields['model']})" if {"cpu family", "model"} <= set(fields) else ""
    return fields.get("model name", platform.machine()) + family
