"""Stochastic gradient descent, with momentum or without, and with its sign."""

from __future__ import annotations

from strategies.optimizers import FLOAT, Optimizer, optimizers


@optimizers("sgd")
def sgd() -> Optimizer:
    """Stochastic gradient descent: no state (torch/optim/sgd.py)."""
    return Optimizer(states=0, operators=(("update", 3),))


@optimizers("momentum")
def momentum() -> Optimizer:
    """SGD with momentum: one state."""
    return Optimizer(states=FLOAT, operators=(("scale", 2), ("momentum", 3), ("update", 3)))


@optimizers("lion")
def lion() -> Optimizer:
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolation between momentum and gradient; one state."""
    operators = (("decay", 2), ("interpolation scale", 2), ("interpolation", 3), ("sign", 2), ("update", 3))
    return Optimizer(states=FLOAT, operators=(*operators, ("momentum scale", 2), ("momentum", 3)))
