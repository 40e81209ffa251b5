"""`shardyard advise`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import (
    AS_JSON,
    headroom_option,
    job_options,
    money_options,
    picture_options,
    report_folder,
    show,
    tokens_of,
)
from reports.terminal import echo, throttled

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.planner.advise import Advice
    from topologies.costs import Rates


@click.command("advise", epilog="Example: shardyard advise --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@headroom_option
@picture_options("the best ways side by side")
@money_options
@AS_JSON
def command(
    job: str | None,
    headroom: float,
    plot: str | None,
    report: str | None,
    tokens: float | None,
    price: float | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Which way to train a model on a cluster: the usual candidates simulated, the fastest that fits first."""
    from reports.formatting import TOKENS, training_cost
    from reports.tables.advice import SHOWN
    from strategies.planner.advise import advise
    from strategies.planner.arguments import arguments_of
    from strategies.planner.auto_plan import quick_way
    from strategies.planner.fixes import fixes
    from strategies.planner.search.workers.executors import engine
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import predict
    from strategies.read_job import stated_job
    from topologies.costs import mean_rates
    from topologies.reading import plain

    folder, asked = report_folder(report), stated_job(job, **given)
    total, rates = tokens_of(tokens) or TOKENS, mean_rates(asked.cluster, price)
    tell = throttled(lambda text: echo(text, err=True))

    def run(way: Callable[..., Any], ways: Iterable[Any]) -> Iterator[Any]:
        tasks = [runs.submit(way, candidate) for candidate in ways]
        for number, task in enumerate(tasks, 1):
            yield task.result()
            tell(f"{number} of {len(tasks)} ways simulated")

    with engine() as runs:
        answer = advise(asked, predict, run, headroom=headroom, more=quick_way(asked), shown=None if as_json else SHOWN)
    if (best := answer.best) is not None:  # the others' intervals would take ten simulations each
        best = replace(best, summary=with_interval(best.job, best.summary))
        answer = replace(answer, candidates=(best, *answer.candidates[1:]))
    else:
        nearest = answer.candidates[0]
        answer = replace(answer, fixes=tuple(map(str, fixes(nearest.job, nearest.summary, predict))))
    if as_json:
        rows = [
            {
                "name": shown.name,
                "changes": {field: plain(value) for field, value in shown.changes.items()},
                "arguments": arguments_of(asked, shown.job),
                "dropped": list(shown.dropped),
                "comfortable": shown.comfortable,
                "training": training_cost(shown.summary, {"rates": rates, "tokens": total}).to_dict(),
                **shown.summary.to_dict(),
            }
            for shown in answer.candidates
        ]
        echo(json.dumps({"questions": dict(answer.questions), "candidates": rows, "fixes": list(answer.fixes)}, indent=2))
    else:
        from reports.tables.advice import advice

        show(advice(answer, asked, rates, total))
    _draw(answer, asked, rates, tokens, plot, folder, as_json)
    if answer.best is None:
        sys.exit(2)


def _draw(
    answer: Advice, job: Job, rates: Rates, tokens: float | None, plot: str | None, folder: Path | None, as_json: bool
) -> None:
    """The figure and the page that were asked for."""
    from reports.figures.comparison import comparison
    from reports.page.chosen import first, write_chosen
    from reports.tables.advice import verdict
    from strategies.planner.arguments import arguments_of

    runs = {candidate.name: candidate.summary for candidate in answer.candidates}
    if plot is not None:
        echo(f"wrote {comparison(first(runs), Path(plot))}", err=as_json)
    if folder is not None:
        chosen = answer.best or answer.candidates[0]
        said = f"{verdict(answer, job)}. As arguments: {arguments_of(job, chosen.job)}" if answer.best else verdict(answer, job)
        command = shlex.join(["shardyard", *sys.argv[1:]])
        paths = write_chosen(folder, chosen.job, runs, rates, tokens, command, best=said)
        echo(f"wrote {paths[0]} and {len(paths) - 1} files beside it", err=as_json)
