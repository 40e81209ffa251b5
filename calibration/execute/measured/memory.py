"""Peak memory of a step.

On a GPU the caching allocator keeps the peak. On CPU, tensors alive are counted (`holding`): PyTorch's profiler has the
allocator's events, but not those of gloo's threads, which are often the last to let go of a buffer; resident-set
size would be off by what libraries and the C library keep.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import torch

from calibration.execute.measured.holding import Holding


class Memory:
    """Follows every allocation from entering, before the first tensor, to leaving."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = self.peak = 0  # bytes held at the mark, and at most after it
        self._holding = Holding() if device.type == "cpu" else None

    def __enter__(self) -> Memory:
        if self._holding:
            self._holding.__enter__()
        return self

    def mark(self) -> None:
        """Here begins the step whose peak is asked for."""
        if self._holding:
            self.base = self._holding.peak = self._holding.held
        else:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.base = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *error: object) -> None:
        if self._holding:
            self._holding.__exit__(*error)
            self.peak = self._holding.peak
        else:
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
