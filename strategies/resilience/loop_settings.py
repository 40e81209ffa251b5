"""What a job says of its training loop besides steps and checkpoints: input, and numbers summed over replicas."""

from __future__ import annotations

from pydantic import Field

from topologies.documents.durations import Duration
from topologies.documents.units import Bytes
from topologies.reading import Config


class InputSettings(Config):
    """How sequences come: workers of each replica prepare them (torch's DataLoader), from bytes that are read from storage."""

    sample: Duration = Field(description="of a worker for one sequence")
    workers: int = Field(default=1, ge=1, le=1024, description="of each dp rank; the ranks beside it share what they bring")
    bytes: Bytes = Field(default=0.0, ge=0, description="read for one sequence, from run.checkpoint.storage")
    prefetch: bool = Field(
        default=True, description="the next batch is prepared beside a step: only what takes longer than it is waited for"
    )
    copy_bytes: Bytes = Field(
        default=0.0, gt=0, description="of a sequence to each GPU; by default tokens and labels of 8 B each"
    )
    pinned: bool = Field(
        default=True,
        description="copied from pinned memory (non_blocking) beside the microbatch before; false: each copy is waited for",
    )


class Reduction(Config):
    """Numbers that are summed over all replicas after every so many steps: losses, metrics."""

    steps: int = Field(default=1, ge=1, le=10**9, description="between two sums")
    values: int = Field(default=1, ge=1, le=10**9, description="numbers of 4 B")
    wait: bool = Field(default=True, description="the host reads them (`.item()`), and launches nothing until they are there")
