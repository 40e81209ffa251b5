"""A piece of a training step, for what is measured beside or between such pieces.

Imports torch: import this module inside the function that needs it.

A product alone leaves caches and memory to the collective that follows it, and takes all ranks the same time; a layer's forward
and backward pass with its update does neither, and ranks come to the collective as far apart as in training.
"""

from __future__ import annotations

from itertools import cycle

import torch

from calibration.execute.model import Transformer
from calibration.measure.bench import Action, Bench
from calibration.measure.layer_check import model

HIDDEN, TOKENS = 384, 64  # of the layer: some 7 ms of a core
LAYERS = 8  # in turn: 226 MB with gradients and states, so that each has left the caches when it comes again


def piece(bench: Bench, side: int) -> Action:
    """On a CPU a layer's forward and backward pass and its update, of several layers in turn; on a device with a queue a square
    product of `side`, because a layer would be held up by its host's launches.
    """
    if bench.place.compute.ordered:
        left, right = (torch.randn(side, side, device=bench.device).to(bench.dtype) for _ in range(2))
        return lambda: left @ right
    layers = [Transformer(model(HIDDEN, 1), TOKENS, embedding=False, head=False) for _ in range(LAYERS)]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=1e-5, fused=True) for layer in layers]
    turns, x = cycle(zip(layers, optimizers, strict=True)), torch.randn(1, TOKENS, HIDDEN)

    def step() -> None:
        layer, optimizer = next(turns)
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
