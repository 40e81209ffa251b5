"""Which ranks are played as one, and what of a step needs no events.

Ranks that do the same at the same times are one lane. Where links serve several lanes or jobs, blocks are cut at their
collectives, so that these meet the other traffic: as late as possible, only where they have not ended before anything contends.
"""

from __future__ import annotations

from math import inf

import numpy as np

from sim.collectives import Ids
from sim.engine.block_splitting import expand, expand_but
from sim.engine.lanes import Lanes
from sim.engine.perturbation import Perturbation
from sim.engine.uncontended import Times, Uncontended
from sim.pricing.op_costs import OpCosts
from sim.program import Program
from topologies.reading import UserError

MAX_PERTURBED_OPS = 2_000_000  # ops of all lanes up to which ranks are played that effects make unlike
MAX_UNFOLDED_OPS = 500_000  # ops of all lanes up to which ranks that are not alike have lanes of their own


def folded(
    program: Program, op_costs: OpCosts, perturbation: Perturbation, others: frozenset[int] | None = None
) -> tuple[Program, Ids | None]:
    """`program` with its blocks cut where they must be played item by item, and the lane of each rank (None: one for all).

    others: links that other jobs use. Where one lane stands for all ranks of a job by itself, blocks are cut later, if need be:
    see `past`. Raises UserError when effects make so many ranks unlike that they cannot be played.
    """
    several = perturbation.effects or program.allotments or len(op_costs.prices.members) > 1
    if op_costs.alike and not several and others is None:
        return program, None
    touched = op_costs.touched(others or frozenset())
    unlike = perturbation.unlike(program)
    perturbed = bool(unlike.any())
    most = MAX_PERTURBED_OPS if perturbed else MAX_UNFOLDED_OPS
    lane = None if op_costs.alike and not perturbed else op_costs.lanes(unlike, most // _ops(program))
    if lane is not None:
        whole = expand(program, touched | op_costs.divided(lane))
        if _ops(whole) * (int(lane.max()) + 1) <= most:
            return whole, lane
    if perturbed:
        number = "more" if lane is None else f"{int(lane.max()) + 1} of each stage"
        raise UserError(f"effects and nodes make too many ranks unlike ({number}): more than {most:,} ops; name fewer GPUs")
    return expand(program, touched) if touched else program, None


def _ops(program: Program) -> int:
    return sum(len(cohort.ops) for cohort in program.cohorts)


def past(lanes: Lanes, perturbation: Perturbation, cut: bool) -> tuple[Lanes, Times]:
    """What has ended when something contends, or an effect may act, for the first time.

    cut: blocks that have not ended then are cut where they may meet other traffic.
    """
    if perturbation.effects:
        return lanes, Times.none(lanes.ops)
    step, program = Uncontended(lanes), lanes.program
    if step.until == inf:
        return lanes, step.times
    if step.until < 0:  # nothing is known
        touched = lanes.op_costs.touched() if cut else set()
        lanes = Lanes(expand(program, touched), lanes.op_costs) if touched else lanes
        return lanes, Times.none(lanes.ops)
    ended = np.array(step.times.end) <= step.until
    for number, cohort in enumerate(program.cohorts):  # on all lanes of a cohort
        offset = lanes.offset[lanes.of_cohort(number)]
        if len(offset) > 1:
            part = slice(offset[0], offset[-1] + len(cohort.ops))
            ended[part] = np.tile(ended[part].reshape(len(offset), -1).all(axis=0), len(offset))
    ops = np.flatnonzero(ended)
    if not cut or not step.touched:
        return lanes, step.times.moved(ops, ops, lanes.ops)
    whole = [
        set((each - first).tolist())
        for each, first in zip(np.split(ops, np.searchsorted(ops, lanes.offset[1:])), lanes.offset, strict=True)
    ]
    expanded = expand_but(program, step.touched, whole)
    result = Lanes(expanded.program, lanes.op_costs)
    place = np.concatenate([np.array(last, np.int64) + first for last, first in zip(expanded.last, result.offset, strict=True)])
    return result, step.times.moved(ops, place[ops], result.ops)
