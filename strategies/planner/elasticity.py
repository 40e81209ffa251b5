"""By how much a played step grows with each of its prices: ∂ ln step / ∂ ln price.

The step is worked out anew for prices that are a tenth higher, all of them at once (`sim.replay.repriced`); a steady state of an
asynchronous schedule, which is not replayed, is played anew, without effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sim.analysis.link_load import link_kinds
from sim.engine.player import run
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
    """That of each of `prices`, by name. The step must be of GPUs of one kind."""
    usual = timeline.op_costs
    each = [usual.prices, *(scaled(usual.prices, price, STEP) for price in prices.values())]
    if timeline.program.cohorts[0].steady:
        step, *others = (run(timeline.program, nominal(usual.topology), other).step for other in each)
    else:
        step, *others = repriced(timeline, [usual.under(other) for other in each]).tolist()
    return {name: math.log(other / step) / math.log(STEP) for name, other in zip(prices, others, strict=True)}
