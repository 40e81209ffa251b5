"""Which ranks are played as one, and what of a step needs no events.

Ranks that do the same at the same times are one lane. Where links serve several lanes of a cohort or several jobs, blocks are cut
at their collectives, so that these meet the other traffic.
"""

from __future__ import annotations

from sim.collectives import Ids
from sim.engine.blocks.splitting import expand
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

    others: links that other jobs use. Where one lane stands for all ranks of a job by itself, no block is cut: see
    `sim.engine.blocks.contended`. Raises UserError when effects make so many ranks unlike that they cannot be played.
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
        raise UserError(
            f"effects and nodes make too many ranks unlike ({number}): more than {most:,} ops; name fewer GPUs, or use "
            "`shardyard variability`, where all of them differ by chance"
        )
    return expand(program, touched) if touched else program, None


def _ops(program: Program) -> int:
    return sum(cohort.count for cohort in program.cohorts)


def past(lanes: Lanes, perturbation: Perturbation) -> Times:
    """What has ended when something contends, or an effect may act, for the first time."""
    if perturbation.effects:
        return Times.none(lanes.ops)
    step = Uncontended(lanes)
    return step.times.by(step.until)
