"""Experts in place of the feed-forward block, of which each ep rank holds some; tokens go to them by all-to-alls.

Router, experts as matrices stacked along their first dimension (transformers' and torchtitan's way), shared experts. Which
experts a token goes to is set, in turns, so that all have as many tokens (torchtitan's `debug.moe_force_load_balance`,
Megatron-LM's `--moe-router-force-load-balancing`): the plan's `imbalance: 1`. The router's scores of these experts weigh their
results, and have gradients as ever.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibration.execute.model.all_to_all import exchanged
from calibration.execute.model.feed_forward import FeedForward
from strategies.models.model import Model
from strategies.models.parts import Experts


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """The `ranks` ranks of `group`, each of which has as many experts of a layer."""

    group: Any
    ranks: int


class Routed(nn.Module):
    """A rank's experts: rows of tokens, as many for each, to results."""

    def __init__(self, model: Model, moe: Experts, ranks: int) -> None:
        super().__init__()
        self.gated = model.gated
        number, width = moe.experts // ranks, moe.ffn * (2 if model.gated else 1)
        self.up = nn.Parameter(torch.empty(number, width, model.hidden))
        self.down = nn.Parameter(torch.empty(number, model.hidden, moe.ffn))

    def forward(self, x: Tensor) -> Tensor:
        """(experts, rows, hidden) to the same. Gate and up are one matrix."""
        y = torch.bmm(x, self.up.transpose(1, 2))
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y)
        return torch.bmm(y, self.down.transpose(1, 2))


class Mixture(nn.Module):
    """Each token through `chosen` experts, and through the shared ones."""

    def __init__(self, model: Model, moe: Experts, parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.moe, self.parallel, self.ranks = moe, parallel, parallel.ranks if parallel else 1
        self.router = nn.Linear(model.hidden, moe.experts, moe.router_bias)
        self.experts = Routed(model, moe, self.ranks)
        width = moe.shared * moe.shared_ffn
        self.shared = FeedForward(model, width) if width else None
        self.shared_gate = nn.Linear(model.hidden, 1, False) if width and moe.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        tokens, chosen = x.flatten(0, 1), self.moe.chosen
        scores = self.router(tokens).softmax(-1)
        experts = self._experts(len(tokens), x.device)
        order = experts.flatten().argsort(stable=True)  # copies of tokens, those of the first expert first
        weights = scores.gather(1, experts).flatten()[order]
        copies = tokens[order // chosen]
        results = self._computed(copies) * weights[:, None]
        y: Tensor = torch.zeros_like(tokens).index_add(0, order // chosen, results).view_as(x)
        if self.shared is None:
            return y
        shared: Tensor = self.shared(x)
        return y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def _experts(self, tokens: int, device: torch.device) -> Tensor:
        """Of each token, (tokens, chosen): in turns."""
        return (torch.arange(tokens * self.moe.chosen, device=device) % self.moe.experts).view(tokens, self.moe.chosen)

    def _computed(self, copies: Tensor) -> Tensor:
        """(copies, hidden) in the order of experts to their results."""
        ranks, features = self.ranks, copies.shape[-1]
        each = self.moe.experts // ranks
        if self.parallel is None:
            alone: Tensor = self.experts(copies.view(each, -1, features)).view_as(copies)
            return alone
        there = exchanged(copies, self.parallel.group)
        rows = there.view(ranks, each, -1, features).transpose(0, 1).reshape(each, -1, features)
        back = self.experts(rows).view(each, ranks, -1, features).transpose(0, 1).reshape_as(copies)
        return exchanged(back, self.parallel.group)
