"""A transformer layer: norms, attention, feed-forward block.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn import functional

from calibration.execute.model.attention import Attention
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


class FeedForward(nn.Module):
    """GELU of one matrix, or SwiGLU of two, and the matrix back."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, model.mlp_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn, model.mlp_bias)
        self.down = nn.Linear(model.ffn, model.hidden, model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        y = functional.silu(self.gate(x)) * self.up(x) if self.gate else functional.gelu(self.up(x))
        result: Tensor = self.down(y)
        return result


def norm(model: Model) -> nn.Module:
    """A norm over the features of the residual stream."""
    return nn.LayerNorm(model.hidden) if model.norm == "layernorm" else nn.RMSNorm(model.hidden, 1e-5)


def dropout(asked: bool) -> nn.Module:
    """Dropout on the residual stream, or nothing."""
    return nn.Dropout(CHANCE) if asked else nn.Identity()


class Layer(nn.Module):
    """Norm, attention, residual, norm, feed-forward, residual; of models without a norm after the last layer (BERT) the norms
    follow the residual additions.
    """

    def __init__(self, model: Model, sequence: int, attention: str, dropped: Dropout) -> None:
        super().__init__()
        self.after = not model.final_norm
        self.attention_norm, self.feed_forward_norm = norm(model), norm(model)
        self.attention = Attention(model, sequence, attention, CHANCE if dropped.attention else 0.0)
        self.feed_forward = FeedForward(model)
        self.dropout = dropout(dropped.stream)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        if self.after:
            x = self.attention_norm(x + self.dropout(self.attention(x)))
            return cast(Tensor, self.feed_forward_norm(x + self.dropout(self.feed_forward(x))))
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.feed_forward_norm(x))))
