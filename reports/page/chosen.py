"""The page and the figure of `compare`, `advise` and `plan`: the best plan's step, and beside it what it was chosen from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.page.page import Report, Section, write_report
from sim.analysis.summary import Summary
from strategies.job import Job
from topologies.costs import Rates

BESIDE = 8  # runs in one figure


def write_chosen(
    folder: Path,
    job: Job,
    runs: Mapping[str, Summary],
    rates: Rates,
    tokens: float | None,
    command: str,
    sections: Sequence[Section] = (),
    best: str = "",
) -> list[Path]:
    """A page of `job`, played once more for its timeline, with runs beside it. best: a sentence about the choice; tokens: of the
    training. Returns the paths that were written, the page's first.
    """
    from reports.inputs import describe
    from strategies.planner.uncertainty import predict_with_interval
    from strategies.predict import simulate

    timeline = simulate(job)
    summary = predict_with_interval(job, whole=timeline)
    inputs: dict[str, Any] = describe(job, command) | {"rates": rates} | ({"tokens": tokens} if tokens else {})
    page = Report(timeline, summary, inputs, job.cluster, first(runs), tuple(sections), best=best)
    return write_report(folder, page)


def first(runs: Mapping[str, Summary]) -> dict[str, Summary]:
    """As many runs as one figure holds."""
    return dict(list(runs.items())[:BESIDE])
