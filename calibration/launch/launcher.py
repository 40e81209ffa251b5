"""Whether a launcher started this process as one of its ranks. Every command asks: nothing else is imported for it."""

from __future__ import annotations

import os

CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_launcher() -> bool:
    """Whether this process is one of the ranks that torchrun or a script started."""
    return all(name in os.environ for name in CONTRACT)


def is_root() -> bool:
    """Whether this process prints and writes: not one of the other ranks under torchrun."""
    return not under_launcher() or os.environ["RANK"] == "0"
