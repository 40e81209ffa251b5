"""Attention of one layer, whose queries, keys and values are products of their own.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibration.execute.model.context_parallel import ContextParallel
from strategies.models.model import Model

BASE = 10000.0  # of rotary frequencies (arXiv:2104.09864); it changes no size


def places(documents: Sequence[int], device: torch.device) -> Tensor:
    """Positions of tokens, each document's from 0: (tokens)."""
    return torch.cat([torch.arange(length, device=device) for length in documents])


class Attention(nn.Module):
    """Calls scaled_dot_product_attention; materialised writes scores and probabilities to memory. Causal in decoders.
    context: with whom tokens are shared; `sequence` are those of all. documents: tokens of each of those that the next pass's
    sequences are packed of, which attend to themselves only.
    """

    documents: Sequence[int] | None = None

    cosine: Tensor
    sine: Tensor
    future: Tensor

    def __init__(
        self, model: Model, sequence: int, attention: str, dropout: float, context: ContextParallel | None = None
    ) -> None:
        super().__init__()
        self.context, self.sequence = context, sequence
        self.dim, self.flash, self.dropout = model.head_dim, attention != "materialised", dropout
        self.causal = model.family == "decoder"
        self.repeat = model.heads // model.kv_heads
        width, shared = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, width, model.attention_bias)
        self.key = nn.Linear(model.hidden, shared, model.attention_bias)
        self.value = nn.Linear(model.hidden, shared, model.attention_bias)
        self.output = nn.Linear(width, model.hidden, model.output_bias)
        self.rotary = model.positions == "rotary"
        if self.rotary:
            own = sequence // (context.ranks if context else 1)
            self.register_buffer("cosine", torch.empty(own, self.dim), persistent=False)
            self.register_buffer("sine", torch.empty(own, self.dim), persistent=False)
        self.masked = self.causal and not self.flash
        if self.masked:
            self.register_buffer("future", torch.empty(sequence, sequence), persistent=False)
        self.fill_tables()

    @torch.no_grad()
    def fill_tables(self) -> None:
        """Set rotary positions and the mask of the future, which a module that was built on the meta device does not have."""
        if self.rotary:
            rows = (self.context.positions(self.sequence) if self.context else torch.arange(self.sequence)).to(self.cosine.device)
            frequency = BASE ** -(torch.arange(0, self.dim, 2, device=self.cosine.device).float() / self.dim)
            angle = torch.outer(rows.float(), frequency).repeat(1, 2)
            self.cosine.copy_(angle.cos())
            self.sine.copy_(angle.sin())
        if self.masked:
            self.future.fill_(-math.inf).triu_(1)

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions: (batch, heads, sequence, dim)."""
        left, right = x.chunk(2, -1)
        cosine, sine = self.cosine[: x.shape[2]], self.sine[: x.shape[2]]
        if self.documents is not None:
            own = places(self.documents, x.device)
            cosine, sine = (table[own].view(len(x), 1, *x.shape[2:]) for table in (self.cosine, self.sine))
        return x * cosine.to(x.dtype) + torch.cat((-right, left), -1) * sine.to(x.dtype)

    def _within(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention of each document, (batch, heads, sequence, dim) each: Σ l² pairs of tokens."""
        assert self.documents is not None
        lengths, parts = list(self.documents), []
        rows = (torch.split(part.transpose(0, 1).flatten(1, 2), lengths, 1) for part in (q, k, v))
        for mine, keys, values in zip(*rows, strict=True):
            y = functional.scaled_dot_product_attention(
                mine, keys, values, None, dropout, self.causal, enable_gqa=self.repeat > 1
            )
            parts.append(y)
        return torch.cat(parts, 1).view(q.shape[1], len(q), *q.shape[2:]).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        q, k, v = (part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.rotary:
            q, k = self._turn(q), self._turn(k)
        dropout = self.dropout if self.training else 0.0
        if self.context:
            y = self.context.attend(q, k, v)
        elif self.documents is not None:
            y = self._within(q, k, v, dropout)
        elif self.flash:
            y = functional.scaled_dot_product_attention(q, k, v, None, dropout, self.causal, enable_gqa=self.repeat > 1)
        else:
            if self.repeat > 1:
                k, v = k.repeat_interleave(self.repeat, 1), v.repeat_interleave(self.repeat, 1)
            scores = (q / math.sqrt(self.dim)) @ k.transpose(2, 3)
            if self.masked:
                scores = scores + self.future.to(q.dtype)
            y = functional.dropout(scores.softmax(-1), dropout) @ v
        result: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return result
