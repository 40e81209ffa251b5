"""What becomes of gradients between their reduction and the update: fp16's loss scale is taken out, their norm is taken, they are
clipped.

As in PyTorch's recipe (torch.amp.GradScaler, then torch.nn.utils.clip_grad_norm_, which scales gradients in any case, by 1 at
most). Ranks that hold different gradients add up one number over all ranks.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.plan.plan import Plan

LARGEST = 1.0  # norm that gradients are clipped to: GPT-3's (arXiv:2005.14165, appendix B), Megatron-LM's --clip-grad
SCALE, GROWTH, FEWEST = 2.0**16, 2.0, 2000  # torch.amp.GradScaler: the first scale, its growth after so many good steps


class Held(NamedTuple):
    """A part of the gradients. copies: ranks that hold it."""

    gradient: Tensor
    copies: float = 1.0


class Clipping:
    """Of one optimizer; `norm`: of the last step's gradients before they were clipped, `scale`: of the next step's loss."""

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        self.device = device  # where ranks meet that hold no gradients, too
        self.clips, self.scaled = plan.clip_gradients, plan.precision == "fp16" and plan.master_weights
        self.scale = SCALE if self.scaled else 1.0
        self.norm: float | None = None
        self.factor = self.clipped = 1.0  # that the last step's gradients were multiplied by, in all and to clip them
        self._good = 0

    @torch.no_grad()
    def __call__(self, gradients: Iterable[Held], slots: int = 0, slot: int = 0, given: float | None = None) -> bool:
        """Change gradients in place; False: they are not finite, and this step updates nothing.

        slots: 0, this rank holds all gradients; otherwise how many independent norms all ranks add up, `slot` this rank's.
        given: the norm of all gradients, where these are only some of them.
        """
        every = [part for part in gradients if part.gradient.numel()]
        if not (self.clips or self.scaled):
            return True
        tensors, self.factor, self.clipped = [part.gradient for part in every], 1.0 / self.scale, 1.0
        if self.scaled:
            torch._foreach_mul_(tensors, self.factor)
        self.norm = _norm(every, slots, slot, self.device) if given is None else given
        if self.scaled and not math.isfinite(self.norm):
            self.scale, self._good = self.scale / GROWTH, 0
            return False
        if self.clips:
            self.clipped = LARGEST / max(self.norm, LARGEST)
            torch._foreach_mul_(tensors, self.clipped)
            self.factor *= self.clipped
        self._good += 1
        if self.scaled and self._good % FEWEST == 0:
            self.scale *= GROWTH
        return True


def _norm(every: list[Held], slots: int, slot: int, device: torch.device | str) -> float:
    if not every and not slots:
        return 0.0
    tensors = [part.gradient for part in every]
    dtype = torch.float64 if tensors and tensors[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, 2, dtype) if tensors else [torch.zeros(1, device=device)]
    squares = torch.stack(list(norms)).double().square()
    if slots:
        squares /= squares.new_tensor([part.copies for part in every] or [1.0])
    total = squares.sum()
    if slots:
        sums = total.new_zeros(slots)
        sums[slot] = total
        dist.all_reduce(sums)
        total = sums[slot]
    return math.sqrt(float(total))
