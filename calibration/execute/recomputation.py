"""Layers that forget activations and compute them again in the backward pass: torch.utils.checkpoint, as the plan says.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.plan.plan import Plan

Part = Callable[[Tensor], Tensor]
KEPT = ("_scaled_dot_product", "reduce_scatter_tensor")  # in names of operators: what `operators` never computes again


@dataclass(frozen=True)
class Recomputation:
    """Of the layers of a stage. kind, method, number: `recompute`, `recompute_method` and `recompute_layers` of the plan."""

    kind: str = "none"
    method: str | None = None
    number: int = 1
    early_stop: bool = True

    @classmethod
    def of(cls, plan: Plan) -> Recomputation:
        """The plan's."""
        return cls(plan.recompute, plan.recompute_method, plan.recompute_layers or 1, plan.stops_early)

    def again(self, count: int) -> list[bool]:
        """Which of a stage's layers run again, or of its groups of layers with method uniform."""
        if self.kind == "none":
            return [False] * count
        if self.method == "block":
            return [layer < self.number for layer in range(count)]
        if self.method == "every":
            return [(layer + 1) % self.number == 0 for layer in range(count)]
        return [True] * count

    def forward(self, x: Tensor, layers: Sequence[Part]) -> Tensor:
        """(batch, sequence, hidden) through all layers."""
        size = self.number if self.method == "uniform" else 1
        groups = [layers[first : first + size] for first in range(0, len(layers), size)]
        for again, group in zip(self.again(len(groups)), groups, strict=True):
            x = self._checkpointed(x, group) if again else _through(group, x)
        return x

    def _checkpointed(self, x: Tensor, group: Sequence[Part]) -> Tensor:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        options: dict[str, Any] = {"use_reentrant": False, "early_stop": self.early_stop}
        if self.kind == "operators":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy())
        result: Tensor = checkpoint(partial(_through, group), x, **options)
        return result


def _through(group: Sequence[Part], x: Tensor) -> Tensor:
    for layer in group:
        x = layer(x)
    return x


def _policy() -> Callable[..., Any]:
    """Matrix products are kept but every second one, attention and reduce-scatters are kept, all else runs again: what torchtitan
    calls selective_ac_option = 'op'."""
    from torch.utils.checkpoint import CheckpointPolicy

    products = {False: 0, True: 0}  # forward, and again

    def decide(context: Any, operator: Any, *_: Any, **__: Any) -> Any:
        product = operator == torch.ops.aten.mm.default
        products[context.is_recompute] += product
        second = product and products[context.is_recompute] % 2 == 0
        kept = product or any(part in str(operator) for part in KEPT)
        return CheckpointPolicy.MUST_SAVE if kept and not second else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
