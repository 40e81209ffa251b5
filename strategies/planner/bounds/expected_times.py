"""What passes take, at least, on GPUs that are not quite alike, draw by draw, for bounds of the expected step.

The expected step is the mean of steps that `sim.replay.waiting` works out, one per draw of all GPUs, and these draws are known.
In each of them the step is the longest of all paths through the program's graph, as waits, collectives and hosts only add. So it
is no shorter than a path through one *place* of each stage (ranks that meet inside blocks), along which nothing but passes and
exchanges takes time. Bounds of GPUs that are alike are such paths. With what the passes take at a place in a draw, they bound the
step of the draw, whichever place is chosen in it, and their mean over all draws bounds the expected step. Chosen is the place of
the GPU that makes its stage's passes the slowest.

Of many microbatches only some are played (`strategies.predict.may_settle`), and each further period counts for no less than
any GPU computes in it: paths with one pass more per microbatch bound such steps, others need not.

A pass in a draw. The replay takes a block as a line through its seconds with kernels as they are and FACTOR times as slow. Where
no collective runs beside kernels, seconds grow with kernels whatever they wait for, and the line is exact. Otherwise its
collectives may take longer than a bound says. Seconds A of a block grow with seconds of kernels and of collectives, so A ≥ B,
the bound's, with kernels as they are and FACTOR times as slow, and on the line between. Below, the line falls by no more than
kernels that are slowed down throughout; beyond, it does not fall.

Where this does not hold (`deviation_of`), plans have the bounds of GPUs that are alike alone, below which no expected step is.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from sim.grid import Grid
from sim.pricing.op_costs import FACTOR, OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Collective, Start
from sim.replay.draws import slowest_of_places
from strategies.job import Job
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_cost_table import PHASES, SPLIT, Floats, Ids, Kind, priced_on, summed
from strategies.planner.bounds.layer_layout import Layout, through
from strategies.predict import variability_of
from strategies.schedules import schedules

KEPT = 64  # grids whose draws are kept


def deviation_of(job: Job, plan: Resolved, prices: Prices) -> float:
    """σ of the logarithm of kernels' seconds among GPUs, where every rank of a stage has the same program, blocks are played
    whole, and the step is replayed; else 0.
    """
    schedule, deviations = schedules[plan.schedule], variability_of(job, prices)
    odd = job.effects or plan.dealt or schedule.versions or schedule.copies > 1
    return 0.0 if odd or len(deviations) > 1 or priced_on(job.cluster, plan)[1] else deviations[0]


class Growth(NamedTuple):
    """How seconds of a block grow with those of its kernels: by `rise` where kernels take twice as long, up to factors of 1 +
    `limit` for certain; and fall by no more than `fall` where they take no time.
    """

    rise: float | Floats
    fall: float | Floats
    limit: float | Floats

    @classmethod
    def of_block(cls, block: Block, pricing: OpCosts, beside: bool = False) -> Growth:
        """beside: other passes' collectives may run beside its kernels."""
        cost = pricing.block(block, 0)
        rise = (pricing.block(block, 0, FACTOR).busy - cost.busy) / (FACTOR - 1)
        if not beside and not any(isinstance(item, Start) for run in block.runs for item in run.items):
            return cls(rise, rise, inf)
        kernels = sum(seconds for (part, _), seconds in cost.parts.items() if part in PHASES)
        return cls(min(rise, kernels) if beside else rise, kernels * pricing.prices.profile.slowdown, FACTOR - 1)

    def more(self, factors: Floats) -> Floats:
        """Seconds that it takes longer, at least, where kernels take 1 + `factors` as long."""
        result: Floats = self.fall * np.minimum(factors, 0.0) + self.rise * np.clip(factors, 0.0, self.limit)
        return result


class Slowest(NamedTuple):
    """What all plans share whose ranks stand alike. factors: of kernels at each place, less 1, shape (pipeline ranks, places,
    draws); place: the slowest of each pipeline rank, shape (pipeline ranks, draws); most: its factor.
    """

    factors: Floats
    place: Ids
    most: Floats

    def where(self, busy: Floats, rise: Floats) -> Floats:
        """The factors of all pipeline ranks at the place, in each draw, of the rank that is busy longest: shape (pipeline ranks,
        draws). busy: seconds of each pipeline rank; rise: by which they grow where kernels take twice as long.
        """
        rank = (busy[:, None] + rise[:, None] * self.most).argmax(axis=0)
        draws = np.arange(len(rank))
        return self.factors[:, self.place[rank, draws], draws]


@lru_cache(maxsize=KEPT)
def slowest(grid: Grid, inside: tuple[str, ...], deviation: float) -> Slowest:
    """See `Slowest`. inside: axes along which ranks meet inside blocks."""
    factors = slowest_of_places(grid, inside, deviation) - 1
    place = factors.argmax(axis=1)
    return Slowest(factors, place, np.take_along_axis(factors, place[:, None], axis=1)[:, 0])


class Draws(NamedTuple):
    """A plan's passes in every draw. time: of each pass, shape (draws, stages), seconds; factors: of kernels, less 1, at the
    places that were chosen, shape (pipeline ranks, draws).
    """

    time: dict[str, Floats]
    factors: Floats


class Expected:
    """Passes of plans of one job in every draw. kinds: of their layer work."""

    def __init__(self, job: Job, kinds: list[Kind], prices: Prices) -> None:
        self.job, self.kinds, self.prices = job, kinds, prices
        self._growing: dict[tuple[int, bool], Kind] = {}

    def applies(self, plan: Resolved) -> bool:
        """Whether there are such bounds of a plan."""
        return deviation_of(self.job, plan, self.prices) > 0

    def draws(self, plan: Resolved, kind: int, layout: Layout) -> Draws:
        """See `Draws`. kind: number of its layer work."""
        growing = self._growth(kind, layout.paired)
        time = {name: table[0] for name, table in layout.times([self.kinds[kind]]).items()}
        grow = {name: {way: layout.quantity(f"{name} {way}", [growing])[0] for way in ("rise", "fall")} for name in SPLIT}
        limit = np.where(layout.quantity("limited", [growing])[0] > 0, FACTOR - 1, inf)
        own = np.zeros((layout.ranks, layout.last + 1))
        for rank, stages in enumerate(layout.stages):
            own[rank, list(stages)] = through(plan)
        busy, rise = time["forward"] + time["backward"], grow["forward"]["rise"] + grow["backward"]["rise"]
        factors = self.places(plan, kind).where(own @ busy, own @ rise)
        of_stages = factors[own.argmax(axis=0)]
        growths = {name: Growth(each["rise"][:, None], each["fall"][:, None], limit[:, None]) for name, each in grow.items()}
        return Draws({name: (time[name][:, None] + growth.more(of_stages)).T for name, growth in growths.items()}, factors)

    def places(self, plan: Resolved, kind: int) -> Slowest:
        """The draws of a plan."""
        blocks = [block for part in self.kinds[kind].priced.parts for block in part.values()]
        items = [item for block in blocks for _, item in block.items() if isinstance(item, Collective)]
        axes = {axis for item in items for axis in item.axes if axis != "pp"}
        return slowest(plan.grid, tuple(sorted(axes)), deviation_of(self.job, plan, self.prices))

    def _growth(self, kind: int, beside: bool) -> Kind:
        """The growth of each part's passes, as quantities of `Kind`."""
        if (kind, beside) not in self._growing:
            priced = self.kinds[kind].priced
            values = [_quantities(part, priced.pricing, beside) for part in priced.parts]
            ends, sums = summed(values, priced.layers)
            self._growing[kind, beside] = self.kinds[kind]._replace(ends=ends, sums=sums)
        return self._growing[kind, beside]


def _quantities(part: dict[str, Block], pricing: OpCosts, beside: bool) -> dict[str, float]:
    growths = {name: Growth.of_block(block, pricing, beside) for name, block in part.items()}
    result = {f"{name} {way}": float(getattr(growth, way)) for name, growth in growths.items() for way in ("rise", "fall")}
    return result | {"limited": float(any(growth.limit < inf for growth in growths.values()))}
