"""What effects cost: the job is played again without them, and without each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from sim.analysis.breakdown import breakdowns, idle_seconds
from sim.analysis.summary import EffectsCost, Summary
from sim.program import Collective, Send
from strategies.predict import predict

if TYPE_CHECKING:
    from sim.engine.effects import Effect
    from sim.pricing.prices import Profile
    from sim.timeline import Timeline
    from strategies.job import Job

APART = 8  # effects up to which each is left out by itself


def with_effects(job: Job, timeline: Timeline, summary: Summary, profile: Profile | None = None) -> Summary:
    """`summary` of a played job with what its effects cost, and a note that says so; the same where it has none. timeline: it is
    enough that it goes on like what was played; profile: under whose prices it was played, by default the job's.
    """
    if not job.effects:
        return summary

    def step(effects: Iterable[Effect]) -> float:
        return predict(replace(job, effects=tuple(effects)), profile).step_seconds

    without = step(())
    each = {}
    if 1 < len(job.effects) <= APART:
        each = {str(effect): step(other for other in job.effects if other is not effect) for effect in job.effects}
    idle = [idle_seconds(parts) for parts in breakdowns(timeline)]
    more = _more_in_transfers(timeline) if _are_on_links(job) else [0.0]
    if max(more) > 0:
        critical = max(range(len(more)), key=lambda lane: more[lane])
    else:
        critical = min(range(len(idle)), key=lambda lane: idle[lane])
    world = sum(lane.ranks for lane in timeline.lanes)
    mean = sum(lane.ranks * seconds for lane, seconds in zip(timeline.lanes, idle, strict=True)) / world
    steps = timeline.program.steps
    rank = timeline.lanes[critical].rank
    cost = EffectsCost(without, each, rank, idle[critical] / steps, mean / steps, max(more) / steps)
    return replace(summary, effects=cost, notes=(_said(job, summary, cost), *summary.notes))


def _are_on_links(job: Job) -> bool:
    topology = job.cluster.topology()
    return not any(effect.gpus(topology).size for effect in job.effects)


def _more_in_transfers(timeline: Timeline) -> list[float]:
    """By lane, the seconds that its collectives and sends last longer than those of the lane of its cohort that has least."""
    lasted = (timeline.ends - timeline.starts) * timeline.counts
    seconds = [
        float(lasted[[at for at, op in timeline.ops(number) if isinstance(op.work, Collective | Send)]].sum())
        for number in range(len(timeline.lanes))
    ]
    least: dict[int, float] = {}
    for lane, each in zip(timeline.lanes, seconds, strict=True):
        least[lane.cohort] = min(each, least.get(lane.cohort, each))
    return [each - least[lane.cohort] for lane, each in zip(timeline.lanes, seconds, strict=True)]


def _said(job: Job, summary: Summary, cost: EffectsCost) -> str:
    """The cost in one sentence."""
    more = summary.step_seconds - cost.step_without
    both = f"{summary.step_seconds:.4g} s, without {cost.step_without:.4g} s"
    change = f"{abs(100 * more / cost.step_without):.1f} %"
    if change == "0.0 %":
        same = f"{summary.step_seconds:.4g}" == f"{cost.step_without:.4g}"
        return f"effects {'do not change the step' if same else 'change the step by less than 0.1 %'}: {both}"
    said = f"effects make the step {change} {'longer' if more > 0 else 'shorter'}: {both}"
    if cost.without:
        worst, left = min(cost.without.items(), key=lambda pair: pair[1])
        said += f"; without '{worst}' alone {left:.4g} s"
    if cost.critical_transfers:
        said += (
            f"; the others wait for transfers of rank {cost.critical_rank}, which last {cost.critical_transfers:.3g} s longer "
            "than those of other ranks of its stage"
        )
    elif cost.critical_idle < cost.mean_idle and not _are_on_links(job):
        said += (
            f"; the others wait for rank {cost.critical_rank}, which is idle for {cost.critical_idle:.3g} s, "
            f"the mean rank for {cost.mean_idle:.3g} s"
        )
    return said
