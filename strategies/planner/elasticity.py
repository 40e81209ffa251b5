"""By how much a played step grows with each of its prices: ∂ ln step / ∂ ln price.

The step is worked out anew for prices that are a tenth higher, all of them at once (`sim.replay.repriced`); a steady state of an
asynchronous schedule, which is not replayed, is played anew, without effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sim.analysis.link_load import link_kinds
from sim.engine.player import run
from sim.pricing.prices import Prices
from sim.program import Kernel
from sim.replay.repriced import repriced
from sim.timeline import Timeline
from strategies.planner.sensitivity import Price, relevant, scaled
from topologies.links.impaired import nominal

STEP = 1.1  # factor by which a price is moved


def paid(timeline: Timeline, kernels: Mapping[Kernel, float]) -> dict[str, Price]:
    """By name, the prices that the step pays, whose kernels are known."""
    return {price.name: price for price in relevant(kernels, link_kinds(timeline))}


def elasticities(timeline: Timeline, prices: Mapping[str, Price]) -> dict[str, float]:
    """That of each of `prices`, by name, of GPUs of all kinds together."""
    usual = timeline.op_costs.prices
    step, *others = _steps(timeline, [usual, *(scaled(usual, price, STEP) for price in prices.values())])
    return {name: math.log(other / step) / math.log(STEP) for name, other in zip(prices, others, strict=True)}


def elasticities_by_kind(timeline: Timeline, prices: Mapping[str, Price]) -> list[dict[str, float]]:
    """By kind of GPU, that of each of `prices` where only GPUs of this kind have them changed. Ranks on one kind wait for those
    on another: where both take nearly as long, a dearer price costs what a cheaper one does not save. It is the mean of the two.
    """
    usual = timeline.op_costs.prices
    every = range(len(usual.members))
    each = [scaled(usual, price, factor, kind) for kind in every for price in prices.values() for factor in (STEP, 1 / STEP)]
    steps = iter(_steps(timeline, each))
    return [{name: math.log(next(steps) / next(steps)) / (2 * math.log(STEP)) for name in prices} for _ in every]


def _steps(timeline: Timeline, each: Sequence[Prices]) -> list[float]:
    """Seconds of the step under each of these prices."""
    usual = timeline.op_costs
    if timeline.program.cohorts[0].steady:
        return [run(timeline.program, nominal(usual.topology), other).step for other in each]
    steps: list[float] = repriced(timeline, [usual.under(other) for other in each]).tolist()
    return steps
