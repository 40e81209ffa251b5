"""Mamba-2's mixer in place of attention (Dao and Gu 2024, arXiv:2405.21060): its sizes, parameters and counted FLOPs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from strategies.models.parts import Matrix, Width, unsaid
from topologies.reading import Config

SCAN = 7  # FLOPs per token, channel and state (megatron/training/training.py, num_floating_point_operations, mamba_layer_flops)


class StateSpace(Config):
    """Sizes of a state-space mixer: channels (heads · head_dim), each with `state` numbers that a token changes."""

    heads: Width = Field(description="Heads, each with a decay and a step of its own.")
    head_dim: Width = Field(description="Channels of a head.")
    state: Width = Field(description="Numbers of state per channel.")
    groups: Width = Field(1, description="Groups of heads that share B and C, which lead into the state and out of it.")
    conv: Annotated[int, Field(gt=0, le=64)] = Field(4, description="Tokens that the convolution before the scan sees.")
    conv_bias: bool = Field(True, description="The convolution has a bias.")
    bias: bool = Field(False, description="The matrix into the mixer has a bias.")
    output_bias: bool = Field(False, exclude_if=unsaid, description="The matrix out of it has one.")
    norm: bool = Field(True, description="The result is normed before the matrix out of the mixer; its gate is in the norm.")
    chunk: Width = Field(256, description="Tokens of a block that is computed by matrix products.")

    @model_validator(mode="after")
    def _check(self) -> StateSpace:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} must divide heads={self.heads}")
        return self

    @property
    def channels(self) -> int:
        """Features inside the mixer."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Features that pass the convolution: channels, B and C."""
        return self.channels + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Results of the first matrix: the gate, what is convolved, and a step per head."""
        return self.channels + self.convolved + self.heads

    def matrices(self, hidden: int) -> list[Matrix]:
        """Weight matrices of one mixer."""
        into = Matrix("state space in", hidden, self.projected, self.bias, "columns")
        return [into, Matrix("state space out", self.channels, hidden, self.output_bias, "rows")]

    @property
    def vectors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the other parameters: the convolution's, three numbers per head (step bias, decay, skip), the norm's."""
        conv = ((self.convolved, self.conv), *[(self.convolved,)] * self.conv_bias)
        return (*conv, *[(self.heads,)] * 3, *[(self.channels,)] * self.norm)

    def scan_flops(self, tokens: float) -> float:
        """Counted FLOPs of the scan, by Megatron-LM's rule; what its kernels execute depends on the chunk."""
        return float(SCAN * tokens * self.channels * self.state)
