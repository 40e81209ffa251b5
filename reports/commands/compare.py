"""`shardyard compare`."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, show
from reports.terminal import echo


@click.command("compare")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB.yaml…")
@job_options
@click.option(
    "--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="Add a variant of the first job: 'plan.tp=4,plan.pp=2'."
)
@AS_JSON
def command(jobs: tuple[str, ...], as_json: bool, variants: tuple[str, ...], overrides: tuple[str, ...], **given: Any) -> None:
    """Several jobs side by side: what differs, and what it does. The exit code is 2 when none fits in memory."""
    from reports.inputs import describe
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import predict
    from strategies.read_job import read_job

    asked = [read_job(job, overrides, **given) for job in jobs]
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    asked += [read_job(jobs[0], (*overrides, *apart.split(variant)), name=variant, **given) for variant in variants]
    rows = [(job.name, with_interval(job, predict(job)), describe(job)) for job in asked]
    if as_json:
        echo(json.dumps([{"job": inputs, **summary.to_dict()} for _, summary, inputs in rows], indent=2))
    else:
        from reports.tables.comparison import comparison
        from topologies.costs import mean_rates

        priced = [{**inputs, "rates": mean_rates(job.cluster)} for job, (_, _, inputs) in zip(asked, rows, strict=True)]
        show(comparison([(name, summary, inputs) for (name, summary, _), inputs in zip(rows, priced, strict=True)]))
    if not any(summary.fits for _, summary, _ in rows):
        sys.exit(2)
