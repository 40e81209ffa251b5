"""The feed-forward block.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from strategies.models.model import Model


class FeedForward(nn.Module):
    """GELU of one matrix, or SwiGLU of two, and the matrix back. width: of the block; the model's by default."""

    def __init__(self, model: Model, width: int | None = None) -> None:
        super().__init__()
        width = width or model.ffn
        self.gate = nn.Linear(model.hidden, width, model.mlp_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, width, model.mlp_bias)
        self.down = nn.Linear(width, model.hidden, model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        y = functional.silu(self.gate(x)) * self.up(x) if self.gate else functional.gelu(self.up(x))
        result: Tensor = self.down(y)
        return result
