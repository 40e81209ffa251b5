"""`predict`: the summary of a step, with its interval where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.analysis.summary import Summary
    from sim.pricing.prices import Profile
    from strategies.job import Job


def predict(job: Job | str | Path | Mapping[str, Any], profile: Profile | None = None, *, interval: bool = False) -> Summary:
    """The summary of one simulated step. interval: with the 80 % interval around the step and the costs of effects, as
    `shardyard simulate` tells them, for about ten simulations more. Raises UserError for impossible jobs.
    """
    from sim.analysis.summary import summarise
    from strategies.job import Job
    from strategies.planner.effects_cost import with_effects
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import played
    from strategies.predict import predict as summary_of
    from strategies.read_job import read_job

    asked = job if isinstance(job, Job) else read_job(job)
    if not interval:
        return summary_of(asked, profile)
    timeline = played(asked, profile)
    summary = with_interval(asked, summarise(timeline), timeline)
    return with_effects(asked, timeline, summary, profile)
