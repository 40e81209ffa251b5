"""Mixers in place of attention, Mamba-2's (Dao and Gu 2024, arXiv:2405.21060) and Mamba's (Gu and Dao 2023, arXiv:2312.00752):
sizes, parameters and counted FLOPs.

Mamba's has a head per channel, each with `state` decays of its own; a matrix of low rank makes a step for every channel, and
another makes B, C and that matrix' input of what is convolved.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from strategies.models.parts import Matrix, Width, unsaid
from topologies.reading import Config

SCAN = 7  # FLOPs per token, channel and state (megatron/training/training.py, num_floating_point_operations, mamba_layer_flops)
SELECTIVE_SCAN = 9  # the same of Mamba's (github.com/state-spaces/mamba, issue 110)


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
    step_rank: Width | None = Field(
        None,
        exclude_if=unsaid,
        description="Mamba's mixer: rank of the matrix that makes a step for each channel; none: Mamba-2's.",
    )
    step_norms: bool | Literal["unweighted"] = Field(
        False,
        exclude_if=unsaid,
        description="Steps, B and C of Mamba's mixer are normed (Jamba); unweighted: without parameters (Falcon Mamba).",
    )

    @model_validator(mode="after")
    def _check(self) -> StateSpace:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} must divide heads={self.heads}")
        if self.step_rank and (self.head_dim, self.groups, self.norm) != (1, 1, False):
            raise ValueError(f"step_rank={self.step_rank} (Mamba's mixer) needs head_dim=1, groups=1 and norm=false")
        if self.step_norms and not self.step_rank:
            raise ValueError(f"step_norms={self.step_norms} needs step_rank: Mamba-2's mixer has no such norms")
        return self

    @property
    def channels(self) -> int:
        """Features inside the mixer."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Features that pass the convolution: channels, and Mamba-2's B and C."""
        if self.step_rank:
            return self.channels
        return self.channels + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Results of the first matrix: the gate, what is convolved, and Mamba-2's step per head."""
        return self.channels + self.convolved + (0 if self.step_rank else self.heads)

    @property
    def chosen(self) -> int:
        """Results of Mamba's second matrix: what steps are made of, B and C."""
        return (self.step_rank or 0) + 2 * self.state

    def matrices(self, hidden: int) -> list[Matrix]:
        """Weight matrices of one mixer."""
        into = Matrix("state space in", hidden, self.projected, self.bias, "columns")
        out = Matrix("state space out", self.channels, hidden, self.output_bias, "rows")
        if not self.step_rank:
            return [into, out]
        chosen = Matrix("state space choice", self.channels, self.chosen)
        return [into, chosen, Matrix("state space steps", self.step_rank, self.channels), out]

    @property
    def vectors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the other parameters: the convolution's, three numbers per head (step bias, decay, skip), the norm's. Mamba's
        heads have a decay for each number of state.
        """
        conv = ((self.convolved, self.conv), *[(self.convolved,)] * self.conv_bias)
        if self.step_rank:
            norms = ((self.step_rank,), (self.state,), (self.state,)) if self.step_norms is True else ()
            return (*conv, (self.channels, self.state), (self.channels,), (self.channels,), *norms)
        return (*conv, *[(self.heads,)] * 3, *[(self.channels,)] * self.norm)

    def scan_flops(self, tokens: float) -> float:
        """Counted FLOPs of the scan, Mamba-2's by Megatron-LM's rule; what its kernels execute depends on the chunk."""
        return float((SELECTIVE_SCAN if self.step_rank else SCAN) * tokens * self.channels * self.state)
