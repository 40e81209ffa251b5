"""Documents of unequal lengths in sequences of equal ones: which, and the same documents one by one.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from calibration.execute.setup import Setup
from strategies.plan.packing import pieces

Documents = tuple[int, ...]  # tokens of each, in the order in which they lie in a microbatch's sequences


def documents(setup: Setup, replica: int, microbatch: int) -> Documents | None:
    """Of a microbatch of a dp rank, drawn as they are simulated; None without packing."""
    plan, resolved = setup.plan, setup.resolved
    if plan.packing is None:
        return None
    each = plan.microbatch
    first = (replica * resolved.microbatches + microbatch) * each
    drawn = pieces(plan.packing.lengths, resolved.sequence, resolved.dp * resolved.microbatches * each)
    return tuple(length for sequence in drawn[first : first + each] for length in sequence)


def one_by_one(net: Any, module: nn.Module, tokens: Tensor, labels: Tensor, lengths: Documents) -> Tensor:
    """The mean loss of all tokens, (batch, sequence), each document a sequence of its own: nothing is packed."""
    total = tokens.new_zeros((), dtype=torch.float32)
    net.documents = None
    for x, right in zip(tokens.flatten().split(lengths), labels.flatten().split(lengths), strict=True):  # type: ignore[no-untyped-call]
        total = total + net.loss(module(x[None]), right[None]) * len(x)
    return total / tokens.numel()
