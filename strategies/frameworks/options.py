"""Options of one framework: what a plan says under `framework`, fields of the class that its kernel set names.

A framework's folder has them in `options.py`, a subclass of `Options`; its `KernelSet` holds an instance and answers by it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from topologies.reading import Config


class Options(Config):
    """What a process of any framework can be started with."""

    droppable: ClassVar[frozenset[str]] = frozenset()  # options that advice may leave out: they change no arithmetic

    blocking_launches: bool = Field(
        False,
        description="the host waits for each kernel to end before it launches the next (CUDA_LAUNCH_BLOCKING=1)",
    )
    expandable_segments: bool = Field(
        False,
        description="segments of PyTorch's caching allocator grow, so that it loses no memory between blocks of other sizes "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); otherwise the profile's share is lost",
    )
