"""An all-to-all that gradients pass, too.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """Parts along the first dimension, as many and as large for each rank of a group; backward, of their gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Any:
        """Rank i gets the i-th part."""
        ctx.group = group
        result = torch.empty_like(parts)
        dist.all_to_all_single(result, parts.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Back."""
        return Exchange.forward(ctx, gradients[0], ctx.group), None


def exchanged(parts: Tensor, group: Any) -> Tensor:
    """What the ranks of the group have sent to this one, like the parts."""
    result: Tensor = Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return result
