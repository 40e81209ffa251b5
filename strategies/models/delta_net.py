"""A gated delta net in place of attention (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next, Qwen3.5): sizes, parameters and
counted FLOPs.

Each value head has a state of key × value features. A token takes out of it what its key finds there, puts in its value, and
lets the rest decay. One matrix makes queries, keys, values, a gate per value feature and two numbers per value head: of how
much is written, and of the decay.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from strategies.models.parts import Matrix, Width
from topologies.reading import Config

DELTA_RULE = 8  # FLOPs per token and number of state (megatron/training/training.py, linear_self_attn_term: four products)


class DeltaNet(Config):
    """Sizes of a gated delta net: value heads, each with key_head_dim · value_head_dim numbers of state."""

    key_heads: Width = Field(description="Heads of queries and keys.")
    value_heads: Width = Field(description="Heads of values, each with a state, a decay and a gate; groups share a key head.")
    key_head_dim: Width = Field(description="Features of a query or key head.")
    value_head_dim: Width = Field(description="Features of a value head.")
    conv: Annotated[int, Field(gt=0, le=64)] = Field(
        4, description="Tokens that the convolution of queries, keys and values sees."
    )
    chunk: Width = Field(64, description="Tokens of a block that is computed by matrix products (64 in flash-linear-attention).")

    @model_validator(mode="after")
    def _check(self) -> DeltaNet:
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads={self.key_heads} must divide value_heads={self.value_heads}")
        return self

    @property
    def keys(self) -> int:
        """Features of all keys, and of all queries."""
        return self.key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Features of all values, of the gate and of the result."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Features that pass the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Results of the first matrix: what is convolved, the gate, and two numbers per value head."""
        return self.convolved + self.values + 2 * self.value_heads

    def matrices(self, hidden: int) -> list[Matrix]:
        """Weight matrices of one mixer. Qwen3.5 has four in place of the first, of as many parameters."""
        return [
            Matrix("delta net in", hidden, self.projected, split="columns"),
            Matrix("delta net out", self.values, hidden, split="rows"),
        ]

    @property
    def vectors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the other parameters: the convolution's, two numbers per value head, and the norm's, which heads share."""
        return (self.convolved, self.conv), (self.value_heads,), (self.value_heads,), (self.value_head_dim,)

    def scan_flops(self, tokens: float) -> float:
        """Counted FLOPs of the delta rule by Megatron-LM's rule; what its kernels execute depends on the chunk."""
        return float(DELTA_RULE * tokens * self.values * self.key_head_dim)
