"""Buffers of a module (running statistics), of which every dp rank has its own, in one process that takes the part of all.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Buffers:
    """states: a module's buffers; broadcast: whether a step begins with those of the first rank, as DDP's do."""

    def __init__(self, states: Sequence[Tensor], ranks: Sequence[int], broadcast: bool) -> None:
        self.states, self.broadcast = states, broadcast
        self.of = {rank: [state.clone() for state in states] for rank in ranks}

    def begin(self) -> None:
        """A step."""
        if self.broadcast:
            first = self.of[min(self.of)]
            self.of = {rank: [state.clone() for state in first] for rank in self.of}

    @contextmanager
    def as_of(self, ranks: Sequence[int]) -> Iterator[None]:
        """A forward pass on samples of these ranks, whose buffers are alike."""
        for state, own in zip(self.states, self.of[ranks[0]], strict=True):
            state.copy_(own)
        yield
        for rank in ranks:
            self.of[rank] = [state.clone() for state in self.states]


@torch.no_grad()
def broadcast(states: Sequence[Tensor], group: Any) -> None:
    """Take the first rank's, one broadcast for each type, as DDP does by itself."""
    for dtype in dict.fromkeys(state.dtype for state in states):
        same = [state for state in states if state.dtype == dtype]
        flat = torch.cat([state.flatten() for state in same])
        dist.broadcast(flat, group=group, group_src=0)
        for state, piece in zip(same, torch.split(flat, [state.numel() for state in same]), strict=True):
            state.copy_(piece.view_as(state))


def apart(mine: Sequence[Tensor], right: Sequence[Tensor], slack: float = 0.0) -> float:
    """The largest difference of a buffer, less `slack`, relative to its largest number."""
    pairs = ((own.double(), other.double()) for own, other in zip(mine, right, strict=True))
    far = (((own - other).abs().max() - slack) / other.abs().max().clamp(min=1e-30) for own, other in pairs)
    return max(0.0, *map(float, far))
