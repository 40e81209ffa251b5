"""LoRA's adapters and frozen parts in a transformer.

As PEFT's LoraLayer computes: W·x + (α/r)·B·A·dropout(x). B begins with random numbers like every other matrix here, not with
zeros, with which the first gradient of A is nothing to compare.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from strategies.models.model import Model
from strategies.plan.fine_tuning import FUSED, FineTuning, Lora, trained_parts

EMBEDDING = -1  # its place; layers have their numbers, the head the next one
PLACES = {
    "linear_q": ("attention", "query"),
    "linear_k": ("attention", "key"),
    "linear_v": ("attention", "value"),
    "linear_proj": ("attention", "output"),
    "linear_fc1_gate": ("feed_forward", "gate"),
    "linear_fc1_up": ("feed_forward", "up"),
    "linear_fc2": ("feed_forward", "down"),
}


class Adapted(nn.Linear):
    """A matrix with an adapter beside it; it keeps its own weight and bias under their names."""

    def __init__(self, matrix: nn.Linear, lora: Lora) -> None:
        device = matrix.weight.device
        super().__init__(matrix.in_features, matrix.out_features, matrix.bias is not None, device)
        self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.a = nn.Linear(matrix.in_features, lora.rank, bias=False, device=device)
        self.b = nn.Linear(lora.rank, matrix.out_features, bias=False, device=device)
        self.scale = (lora.alpha or lora.rank) / lora.rank

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        adapter: Tensor = self.b(self.a(self.dropout(input)))
        return super().forward(input) + adapter * self.scale


def tune(part: Any, tuned: FineTuning, model: Model, number: int) -> None:
    """The model's layer `number`, or what stands before or after all of them: frozen, or with adapters, or as it is. A head's
    matrix that is the embedding's is trained as that one is.
    """
    trained = trained_parts(tuned, model.layers)
    own = trained.embedding if number < 0 else trained.head if number == model.layers else trained.layers[number]
    part.requires_grad_(own.weights)
    if number == model.layers and model.tied and part.logits is not None:
        part.logits.weight.requires_grad_(trained.embedding.weights)
    if tuned.lora is None or not own.adapters:
        return
    for name in targets(tuned.lora, model):
        block, matrix = PLACES[name]
        owner = getattr(part, block)
        adapted = Adapted(getattr(owner, matrix), tuned.lora)
        for still in (adapted.weight, adapted.bias):
            if still is not None:
                still.requires_grad_(False)
        setattr(owner, matrix, adapted)


def targets(lora: Lora, model: Model) -> list[str]:
    """Names of matrices, each by itself; a block without a gate has one matrix in its first place."""
    parts = FUSED if model.gated else FUSED | {"linear_fc1": ("linear_fc1_up",)}
    return [part for name in lora.targets for part in parts.get(name, (name,))]
