"""A transformer layer: norms, attention, feed-forward block.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn

from calibration.execute.model.attention import Attention
from calibration.execute.model.context_parallel import ContextParallel
from calibration.execute.model.feed_forward import FeedForward
from calibration.execute.model.mixture import ExpertParallel, Mixture
from strategies.models.model import Model
from strategies.plan.plan import Plan

CHANCE = 0.1  # of dropout: GPT-2's and BERT's


class Dropout(NamedTuple):
    """Where activations are dropped: on the residual stream, and in attention's probabilities."""

    stream: bool = False
    attention: bool = False

    @classmethod
    def of(cls, model: Model, plan: Plan) -> Dropout:
        """As the plan says, or else the model."""
        asked = plan.dropout
        return cls(model.dropout, model.attention_dropout) if asked is None else cls(asked, asked)


class Shared(NamedTuple):
    """What of a layer its ranks share: cp ranks the tokens, ep ranks the experts; None: one rank has all."""

    tokens: ContextParallel | None = None
    experts: ExpertParallel | None = None


def norm(model: Model) -> nn.Module:
    """A norm over the features of the residual stream."""
    return nn.LayerNorm(model.hidden) if model.norm == "layernorm" else nn.RMSNorm(model.hidden, 1e-5)


def dropout(asked: bool) -> nn.Module:
    """Dropout on the residual stream, or nothing."""
    return nn.Dropout(CHANCE) if asked else nn.Identity()


class Layer(nn.Module):
    """Norm, attention, residual, norm, feed-forward, residual; of models without a norm after the last layer (BERT) the norms
    follow the residual additions. number: its place in the model, of which some layers may have experts.
    """

    def __init__(
        self, model: Model, number: int, sequence: int, attention: str, dropped: Dropout, shared: Shared | None = None
    ) -> None:
        super().__init__()
        self.after = not model.final_norm
        self.attention_norm, self.feed_forward_norm = norm(model), norm(model)
        shared = shared or Shared()
        self.attention = Attention(model, sequence, attention, CHANCE if dropped.attention else 0.0, shared.tokens)
        moe = model.experts if model.is_mixture(number) else None
        self.feed_forward = Mixture(model, moe, shared.experts) if moe else FeedForward(model)
        self.dropout = dropout(dropped.stream)

    def pack(self, documents: Sequence[int] | None) -> None:
        """For the next pass, of sequences that are packed of documents of so many tokens."""
        self.attention.documents = documents

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        if self.after:
            x = self.attention_norm(x + self.dropout(self.attention(x)))
            return cast(Tensor, self.feed_forward_norm(x + self.dropout(self.feed_forward(x))))
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.feed_forward_norm(x))))
