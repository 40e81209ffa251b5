"""The transformer of a `Model` in plain PyTorch: as many parameters, the same matrix products, nothing fused by hand.

Imports torch: import this module inside the function that needs it.

    net = Transformer(model, sequence)                 # or one pipeline stage: layers=range(4, 8), head=False …
    loss(net(tokens), labels).backward()               # tokens, labels: (batch, sequence) integers

Query, key, value, gate and up are matrices of their own, as in most PyTorch code, so that tensor parallelism cuts each by
columns; `tensor_parallel` gives them one common input, and so one reduction of its gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from calibration.execute.limits import check_model
from calibration.execute.model.ends import Embedding, Head, loss
from calibration.execute.model.fine_tuning import EMBEDDING, tune
from calibration.execute.model.layer import Dropout, Layer, Shared
from calibration.execute.model.mixture import Routed
from calibration.execute.recomputation import Recomputation
from strategies.models.model import Model
from strategies.plan.fine_tuning import FineTuning

__all__ = ["Transformer", "loss"]
SEED = 20  # of initial parameters, tokens and dropout


class Transformer(nn.Module):
    """A whole model, or the stage of a pipeline that has `layers`, and the embedding and the head where asked.

    attention: as the plan's. dropout: nowhere by default. A tied head shares the embedding's matrix where both are in the same
    stage. tuned: what is trained; everything by default. shared: what ranks share of each layer; nothing by default.

    number: of the next forward pass, where anything is dropped. Parts draw from it and from their place in the model, so that a
    pass drops the same wherever and whenever it runs. documents: of which its sequences are packed, where they are.
    """

    number: int | None = None
    documents: Sequence[int] | None = None
    loss = staticmethod(loss)

    def __init__(
        self,
        model: Model,
        sequence: int,
        layers: range | None = None,
        *,
        embedding: bool = True,
        head: bool = True,
        attention: str = "flash",
        dropout: Dropout | None = None,
        recompute: Recomputation | None = None,
        tuned: FineTuning | None = None,
        shared: Shared | None = None,
    ) -> None:
        check_model(model)
        super().__init__()
        self.recompute = recompute or Recomputation()
        dropped = dropout or Dropout()
        self.embedding = Embedding(model, dropped.stream, shared and shared.tokens) if embedding else None
        self.numbers = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleList(Layer(model, number, sequence, attention, dropped, shared) for number in self.numbers)
        self.head = Head(model) if head else None
        self.tied = model.tied and model.head
        for matrix in self.modules():
            if isinstance(matrix, nn.Linear | nn.Embedding):
                nn.init.normal_(matrix.weight, std=0.02)  # GPT-2's, so that the loss starts near log(vocabulary)
            elif isinstance(matrix, Routed):
                nn.init.normal_(matrix.up, std=0.02)
                nn.init.normal_(matrix.down, std=0.02)
        self.tie()
        if tuned is not None and not tuned.trains_all:
            self._tune(tuned, model)

    def _tune(self, tuned: FineTuning, model: Model) -> None:
        """Put adapters beside the matrices that have them, and freeze what is not trained."""
        parts: list[tuple[int, nn.Module | None]] = [(EMBEDDING, self.embedding), (model.layers, self.head)]
        for number, part in [*parts, *zip(self.numbers, self.layers, strict=True)]:
            if part is not None:
                tune(part, tuned, model, number)
        self.tie()

    def states(self) -> list[torch.Tensor]:
        """Buffers that passes change: none."""
        return []

    def units(self) -> list[list[nn.Module]]:
        """Modules whose parameters are gathered together, in the order of the forward pass."""
        if self.tied and self.embedding is not None and self.head is not None:
            return [[self.embedding, self.head], *([layer] for layer in self.layers)]
        return [[part] for part in (self.embedding, *self.layers, self.head) if part is not None]

    def tie(self) -> None:
        """Make the head's matrix the embedding's where the model says so and both are here."""
        if self.tied and self.embedding is not None and self.head is not None and self.head.logits is not None:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, x: Any) -> Any:
        """Token ids, or features where the embedding is elsewhere, to what the head gives, or features where it is elsewhere."""
        if self.embedding is not None:
            x = self._part(self.embedding, EMBEDDING)(x)
        layers = [self._part(layer, place) for place, layer in zip(self.numbers, self.layers, strict=True)]
        x = self.recompute.forward(x, layers)
        return x if self.head is None else self.head(x)

    def _part(self, part: Any, place: int) -> Callable[[Any], Any]:
        """As this pass calls it, also again in the backward pass."""
        call, documents = drawing(part, self.number, place), self.documents
        if documents is None:
            part.pack(None)
            return call

        def packed(x: Any) -> Any:
            part.pack(documents)
            return call(x)

        return packed


def drawing(part: nn.Module, number: int | None, place: int) -> Callable[[Any], Any]:
    """The part at a place of the model, dropping what pass `number` drops there: also when it is called again in the backward
    pass.
    """
    if number is None:
        return part

    def call(x: Any) -> Any:
        torch.manual_seed(zlib.crc32(f"{SEED} {number} {place}".encode()))
        return part(x)

    return call
