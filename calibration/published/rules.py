"""How sources count the FLOPs of a step: a function per rule, so that a published rate is compared by its own rule.

B sequences of s tokens, l layers, hidden size h, vocabulary V, N parameters. Each function returns the FLOPs of one whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strategies.models.model import Model
from topologies.registry import Registry


@dataclass(frozen=True)
class Step:
    """A step of `batch` sequences of `sequence` tokens each."""

    model: Model
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.batch * self.sequence


flops_rules: Registry[Callable[[Step], float]] = Registry("FLOP counting rule")


def _layers(step: Step) -> float:
    """24·B·s·l·h²·(1 + s/6h): matrix products of one forward pass through the layers of a GPT, attention in full."""
    model = step.model
    return 24.0 * step.tokens * model.layers * model.hidden**2 * (1 + step.sequence / (6 * model.hidden))


def _head(step: Step) -> float:
    """2·B·s·h·V: the product with the vocabulary's matrix."""
    return 2.0 * step.tokens * step.model.hidden * step.model.padded_vocabulary


@flops_rules("megatron_recomputed")
def megatron_recomputed(step: Step) -> float:
    """96·B·s·l·h²·(1 + s/6h + V/16lh): forward, full recomputation and backward (Narayanan et al. 2021, arXiv:2104.04473)."""
    return 4 * _layers(step) + 3 * _head(step)


@flops_rules("megatron_model")
def megatron_model(step: Step) -> float:
    """72·B·l·s·h²·(1 + s/6h + V/12hl): forward and backward (Korthikanti et al. 2022, arXiv:2205.05198)."""
    return 3 * (_layers(step) + _head(step))


@flops_rules("megatron_selective")
def megatron_selective(step: Step) -> float:
    """72·B·l·s·h²·(1 + s/3h + V/12hl): hardware FLOPs with selective recomputation, as the same paper prints and tabulates them.

    It counts the attention core twice, forward and backward, though only its forward pass runs again.
    """
    return megatron_model(step) + 12.0 * step.tokens * step.sequence * step.model.layers * step.model.hidden


@flops_rules("eight_per_parameter")
def eight_per_parameter(step: Step) -> float:
    """8·N·B·s: forward, full recomputation, backward; no attention (Megatron-DeepSpeed logs of 2021)."""
    return 8.0 * step.model.parameters * step.tokens


@flops_rules("six_per_parameter")
def six_per_parameter(step: Step) -> float:
    """6·N·B·s: forward and backward; no attention."""
    return 6.0 * step.model.parameters * step.tokens


@flops_rules("six_per_parameter_and_attention")
def six_per_parameter_and_attention(step: Step) -> float:
    """(6·N + 12·l·h·s)·B·s: with attention in full (llm-foundry's benchmarks; torchtitan; PaLM, arXiv:2204.02311)."""
    return six_per_parameter(step) + 12.0 * step.model.layers * step.model.hidden * step.sequence * step.tokens


@flops_rules("whole_attention")
def whole_attention(step: Step) -> float:
    """Three forward passes of matrix products, attention in full: the rule of this project's MFU."""
    return 3 * step.model.forward_flops(step.batch, step.sequence, causal=False)


@flops_rules("causal_attention")
def causal_attention(step: Step) -> float:
    """`whole_attention` with half of causal attention (Megatron-Bridge's tables, by their own steps and rates, to 0.1 %)."""
    model = step.model
    return whole_attention(step) - 6.0 * model.layers * model.heads * model.head_dim * step.sequence * step.tokens
