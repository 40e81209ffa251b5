"""What effects cost: the job is played again without them, and without each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.analysis.breakdown import breakdowns, idle_seconds
from sim.analysis.summary import EffectsCost, Summary, summarise
from strategies.predict import simulate

if TYPE_CHECKING:
    from sim.engine.effects import Effect
    from sim.timeline import Timeline
    from strategies.job import Job

APART = 8  # effects up to which each is left out by itself


def with_effects(job: Job, timeline: Timeline, summary: Summary) -> Summary:
    """`summary` of a played job with what its effects cost, and a note that says so; the same where it has none."""
    if not job.effects:
        return summary
    without = _step(job, ())
    each = {}
    if 1 < len(job.effects) <= APART:
        each = {str(effect): _step(job, tuple(other for other in job.effects if other is not effect)) for effect in job.effects}
    idle = [idle_seconds(parts) for parts in breakdowns(timeline)]
    least = min(range(len(idle)), key=lambda lane: idle[lane])
    world = sum(lane.ranks for lane in timeline.lanes)
    mean = sum(lane.ranks * seconds for lane, seconds in zip(timeline.lanes, idle, strict=True)) / world
    steps = timeline.program.steps
    cost = EffectsCost(without, each, timeline.lanes[least].rank, idle[least] / steps, mean / steps)
    return replace(summary, effects=cost, notes=(_said(job, summary, cost), *summary.notes))


def _step(job: Job, effects: tuple[Effect, ...]) -> float:
    other = replace(job, effects=effects)
    return summarise(simulate(other)).step_seconds


def _said(job: Job, summary: Summary, cost: EffectsCost) -> str:
    """The cost in one sentence."""
    more = summary.step_seconds - cost.step_without
    both = f"{summary.step_seconds:.4g} s, without {cost.step_without:.4g} s"
    said = f"effects make the step {100 * more / cost.step_without:.1f} % longer: {both}"
    if cost.without:
        worst, left = min(cost.without.items(), key=lambda pair: pair[1])
        said += f"; without '{worst}' alone {left:.4g} s"
    if cost.critical_idle < cost.mean_idle:
        said += (
            f"; the others wait for rank {cost.critical_rank}, which is idle for {cost.critical_idle:.3g} s, "
            f"the mean rank for {cost.mean_idle:.3g} s"
        )
    return said
