"""Processes that compute on fewer cores than there are processes.

Linux's scheduler deals out cores by equal weights, in slices of some milliseconds (kernel documentation, EEVDF scheduler), which
is short beside the passes of a step: while more processes compute than there are cores, each gets its part of them. A process
that waits for a message takes no core.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sim.engine.effects import Effect, effects


@effects("cores")
class SharedCores(Effect):
    """So many cores are there for all processes of the target, of a cluster without GPUs."""

    component: ClassVar[str] = "shared cores"

    cores: int = Field(ge=1, le=2**20)  # how many there are

    @property
    def shared(self) -> int:
        """See `Effect.shared`."""
        return self.cores
