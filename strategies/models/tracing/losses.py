"""The loss of what a module's forward pass returns: its own, or the cross-entropy of its logits.

Imports torch: import it inside a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from strategies.models.tracing.records import LOSS_IS_SUM
from strategies.models.tracing.tensor_parallel import is_distributed
from topologies.reading import UserError

Labels = Callable[[torch.Tensor], torch.Tensor]  # of logits (rows, classes), (rows,) integers


def loss_of(result: Any, labels: Labels) -> tuple[torch.Tensor, str]:
    """A number to be differentiated, and in words what it is. Raises UserError for results of which no loss can be made."""
    result = getattr(result, "loss", None) if getattr(result, "loss", None) is not None else result
    hidden = getattr(result, "last_hidden_state", None)
    if isinstance(hidden, torch.Tensor) and not hasattr(result, "logits"):
        return hidden.float().sum(), f"the module has no head: {LOSS_IS_SUM} its last hidden state"
    result, whose = _logits(result)
    if is_distributed([type(result)]):
        raise UserError("the module's result is a DTensor, of which a rank has a part: let the last layer return local tensors")
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        raise UserError(f"the module's result is {type(result).__name__}, of which no loss can be made: return a tensor")
    if result.dim() == 0:
        return result, "the module's result is the loss"
    if result.dim() >= 2 and result.shape[-1] > 1:
        rows = result.flatten(0, -2)
        said = f"the loss is the mean cross-entropy in fp32 over the last dimension of the {whose}"
        return functional.cross_entropy(rows.float() if rows.element_size() < 4 else rows, labels(rows)), said
    return result.float().sum(), f"{LOSS_IS_SUM} the {whose}"


def _logits(result: Any) -> tuple[Any, str]:
    """The tensor among a module's results, and where it was."""
    whose = "module's result"
    if hasattr(result, "logits"):
        result = result.logits
    elif isinstance(result, Mapping):  # the first that may have a gradient
        is_real = ((key, each) for key, each in result.items() if isinstance(each, torch.Tensor) and each.is_floating_point())
        key, result = next(is_real, ("", result))
        whose = f"result's {key}"
    return (result[0] if isinstance(result, (tuple, list)) else result), whose
