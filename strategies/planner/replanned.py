"""The best plans of several jobs that are compared: one is found for each by itself, and tried on all the others.

A short search stops where nothing that is left can be faster by more than a part (`auto_plan.WITHIN`), which may be more than
what two jobs differ by: without the second round a faster network could seem to make a step longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.planner.auto_plan import CHOSEN, with_auto_plan
from strategies.planner.ranking import HEADROOM
from strategies.planner.search.workers.executors import Engine
from strategies.predict import predict
from topologies.reading import UserError

Asked = tuple[Job, frozenset[str]]
"""A job, and the fields of its plan that are kept."""
Answer = tuple[Job, Summary | str]
"""The job with its plan, and its summary; or the reason why there is none."""
Tell = Callable[[str], None]


def silent(_: str) -> None:
    """Tell nobody."""


def replanned(asked: Sequence[Asked], engine: Engine, tell: Tell = silent) -> list[Answer]:
    """Each job at the fastest of the plans that are found for any of them. tell: hears how far that is."""
    found = engine.results(_found, asked, lambda number, of: tell(f"{number} of {of} plans found"))
    plans = [job.plan for job, outcome in found if isinstance(outcome, Summary)]
    tries = [
        {} if isinstance(outcome, str) else {other.hash: other for other in (_with(job, plan, kept) for plan in plans)}
        for (job, outcome), (_, kept) in zip(found, asked, strict=True)
    ]
    others = {key: job for (own, _), each in zip(found, tries, strict=True) for key, job in each.items() if key != own.hash}
    tried = engine.results(
        answered, [(job,) for job in others.values()], lambda number, of: tell(f"{number} of {of} tried elsewhere")
    )
    answers = dict(zip(others, tried, strict=True))
    return [
        min((own, *(answers[key] for key in each if key in answers)), key=_place) for own, each in zip(found, tries, strict=True)
    ]


def answered(job: Job) -> Answer:
    """The job, and its summary or why it is refused. Runs on workers."""
    try:
        return job, predict(job)
    except UserError as error:
        return job, str(error)


def _found(job: Job, kept: frozenset[str]) -> Answer:
    """Runs on workers."""
    try:
        return answered(with_auto_plan(job, kept))
    except UserError as error:
        return job, str(error)


def _with(job: Job, plan: Plan, kept: frozenset[str]) -> Job:
    """The job with what the search for another one chose."""
    chosen = {name: getattr(plan, name) for name in CHOSEN if name not in kept | job.said}
    return replace(job, plan=job.plan.model_copy(update=chosen), remarks=job.own_remarks)


def _place(answer: Answer) -> tuple[bool, bool, float]:
    """What fits with room to spare first, then what fits, the fastest first; refused last."""
    summary = answer[1]
    if isinstance(summary, str):
        return True, True, 0.0
    return not summary.fits_with(HEADROOM), not summary.fits, summary.step_seconds
