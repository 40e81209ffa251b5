"""The plan's optimizer, with fp32 masters of 16-bit weights.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from strategies.plan.plan import Plan

RATE = 1e-3  # learning rate
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def optimizer_of(plan: Plan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of the plan's optimizer: one fused kernel."""
    arguments: dict[str, Any] = {"lr": RATE, "fused": True}
    if plan.optimizer == "adam":
        return torch.optim.Adam, arguments
    return torch.optim.SGD, arguments | ({"momentum": 0.9} if plan.optimizer == "momentum" else {})


def with_masters(plan: Plan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The same, with masters where weights have 16 bits."""
    kind, arguments = optimizer_of(plan)
    return (Masters, {"kind": kind, "arguments": arguments}) if plan.has_masters else (kind, arguments)


def make_optimizer(plan: Plan, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The plan's optimizer over `parameters`, which may have 16 bits."""
    kind, arguments = optimizer_of(plan)
    every = list(parameters)
    if plan.master_weights and any(parameter.element_size() < 4 for parameter in every):
        return Masters(every, kind, arguments)
    return kind(_groups(every), **arguments)


def _groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """A kernel updates plain tensors, or DTensors of one device mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": same} for same in groups.values()]


class Masters(torch.optim.Optimizer):
    """Updates fp32 copies of 16-bit weights, and rounds the result (Micikevicius et al. 2017, arXiv:1710.03740)."""

    def __init__(self, parameters: Iterable[Tensor], kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
        super().__init__(parameters, {})
        self.weights: list[Tensor] = [weight for group in self.param_groups for weight in group["params"]]
        self.copies = [weight.detach().float().clone() for weight in self.weights]
        self.inner = kind(_groups(self.copies), **arguments)

    @torch.no_grad()
    def take(self) -> list[Tensor]:
        """Copy gradients to fp32; the copies, whose gradients the next step reads."""
        for copy, weight in zip(self.copies, self.weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
        return self.copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, with gradients that were taken before or are taken now."""
        if all(copy.grad is None for copy in self.copies):
            self.take()
        self.inner.step()
        for copy, weight in zip(self.copies, self.weights, strict=True):
            weight.copy_(copy)
            copy.grad = None
