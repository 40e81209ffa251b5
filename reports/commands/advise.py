"""`shardyard advise`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from reports.commands._common import AS_JSON, headroom_option, job_options, show, throttled
from reports.terminal import echo
from topologies.reading import plain


@click.command("advise")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@headroom_option
@AS_JSON
def command(job: str | None, headroom: float, as_json: bool, **given: Any) -> None:
    """Which way to train a model on a cluster: the usual candidates simulated, the fastest that fits first."""
    from strategies.planner.advise import advise
    from strategies.planner.arguments import arguments_of
    from strategies.planner.auto_plan import quick_way
    from strategies.planner.search.workers.executors import engine
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import predict
    from strategies.read_job import stated_job

    asked = stated_job(job, **given)
    tell = throttled(lambda text: echo(text, err=True))

    def run(way: Callable[..., Any], ways: Sequence[Any]) -> Iterator[Any]:
        tasks = [runs.submit(way, candidate) for candidate in ways]
        for number, task in enumerate(tasks, 1):
            yield task.result()
            tell(f"{number} of {len(ways)} ways simulated")

    with engine() as runs:
        answer = advise(asked, predict, run, headroom=headroom, more=quick_way(asked))
    if (best := answer.best) is not None:  # the others' intervals would take ten simulations each
        best = replace(best, summary=with_interval(best.job, best.summary))
        answer = replace(answer, candidates=(best, *answer.candidates[1:]))
    if as_json:
        rows = [
            {
                "name": shown.name,
                "changes": {field: plain(value) for field, value in shown.changes.items()},
                "arguments": arguments_of(asked, shown.job),
                "dropped": list(shown.dropped),
                "comfortable": shown.comfortable,
                **shown.summary.to_dict(),
            }
            for shown in answer.candidates
        ]
        echo(json.dumps({"questions": dict(answer.questions), "candidates": rows}, indent=2))
    else:
        from reports.tables.advice import advice

        show(advice(answer, asked))
    if answer.best is None:
        sys.exit(2)
