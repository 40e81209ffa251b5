"""Rotary embedding of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from strategies.layers.operators import Operator, pointwise
from strategies.layers.rank_shapes import RankShapes


def rotary(rank: RankShapes, elements: int) -> Operator:
    """Rotary embedding of so many elements of queries and keys."""
    ways = rank.kernels.rotary(rank.element)
    forward, backward = (
        rank.run("rotary", phase, elements, way) for phase, way in zip(("forward", "backward"), ways, strict=True)
    )
    return replace(pointwise(rank, "rotary", elements, elements), forward=forward, input_gradient=backward)
