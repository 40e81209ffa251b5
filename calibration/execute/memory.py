"""Peak memory as the allocator itself counts it.

On a GPU the caching allocator keeps the peak. On CPU the profiler's [memory] events, from before the first tensor on, add up to
the allocator's exact level; resident-set size would be off by what libraries and the C library keep.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Memory:
    """Follows every allocation from entering to leaving. `mark` begins the stretch whose peak is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = self.peak = 0  # bytes held at the mark, and at most after it
        self._profile: Any = None
        self._marked = 0

    def __enter__(self) -> Memory:
        if self.device.type == "cpu":
            from torch.profiler import ProfilerActivity, profile

            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profile.__enter__()
        return self

    def mark(self) -> None:
        """Here begins the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.base = torch.cuda.memory_allocated(self.device)
        self._marked = time.time_ns()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._profile is None:
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        self._profile.__exit__(kind, value, trace)
        if kind is not None:
            return
        level = 0
        events = [event for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            if event.start_ns() < self._marked:
                self.base = self.peak = level
            self.peak = max(self.peak, level)
