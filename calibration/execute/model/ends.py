"""What stands before the first layer and after the last, and the loss.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibration.execute.model.attention import places
from calibration.execute.model.context_parallel import ContextParallel
from calibration.execute.model.layer import dropout, norm
from strategies.models.model import Model


class Embedding(nn.Module):
    """Token ids to features; learned positions, segments and a norm if the model has them. Every token is of segment 0.
    context: with whom a sequence's tokens are shared. documents: of which the next pass's sequences are packed.
    """

    documents: Sequence[int] | None = None

    def __init__(self, model: Model, dropped: bool = False, context: ContextParallel | None = None) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(model.padded_vocabulary, model.hidden)
        self.positions = nn.Embedding(model.learned_rows, model.hidden) if model.learned_rows else None
        self.segments = nn.Embedding(model.token_types, model.hidden) if model.token_types else None
        self.norm = norm(model) if model.embedding_norm else nn.Identity()
        self.dropout = dropout(dropped)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) integers to (batch, sequence, hidden)."""
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            own = tokens.shape[1]
            rows = self.context.positions(own * self.context.ranks) if self.context else torch.arange(own)
            if self.documents is not None:
                rows = places(self.documents, tokens.device).view_as(tokens)
            x = x + self.positions(rows.to(tokens.device))
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens[:1]))
        result: Tensor = self.dropout(self.norm(x))
        return result

    def pack(self, documents: Sequence[int] | None) -> None:
        """For the next pass."""
        self.documents = documents


class Head(nn.Module):
    """Final norm, BERT's transform and pooler, the matrix to the vocabulary, each if the model has it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = norm(model) if model.final_norm else nn.Identity()
        self.pooler = nn.Linear(model.hidden, model.hidden) if model.pooler else None
        self.classes = None
        if count := model.pooler_classes or model.classes:
            self.classes = nn.Linear(model.hidden, count)
        self.transform, self.transform_norm = None, None
        if model.head_transform:
            self.transform, self.transform_norm = nn.Linear(model.hidden, model.hidden), norm(model)
        self.logits = nn.Linear(model.hidden, model.padded_vocabulary, model.head_bias) if model.head else None

    def forward(self, x: Tensor) -> Any:
        """(batch, sequence, hidden) to logits (batch, sequence, vocabulary), classes (batch, classes), or both."""
        x = self.norm(x)
        classes: Tensor | None = None
        if self.classes is not None:
            first = x[:, 0]
            classes = self.classes(first if self.pooler is None else self.pooler(first).tanh())
        if self.logits is None:
            return classes
        if self.transform is not None and self.transform_norm is not None:
            x = self.transform_norm(functional.gelu(self.transform(x)))
        logits: Tensor = self.logits(x)
        return logits if classes is None else (logits, classes)


def loss(output: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in fp32; of classes, of which a sequence's first label says the right one, over all
    sequences. output: what `Head` gives; labels: (batch, sequence).
    """
    from torch.distributed.tensor import DTensor

    if isinstance(output, tuple | list):
        tokens, classes = (loss(part, labels) for part in output)
        return (tokens.full_tensor() if isinstance(tokens, DTensor) else tokens) + classes
    if output.dim() == 2:
        return functional.cross_entropy(output.float(), labels[:, 0] % output.shape[-1])
    return functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten())
