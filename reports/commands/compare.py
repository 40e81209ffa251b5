"""`shardyard compare`."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import AS_JSON, changing, job_options, money_options, show, tokens_of
from reports.terminal import echo

if TYPE_CHECKING:
    from strategies.resilience.runs import RunAnswer


@click.command("compare")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB.yaml…")
@job_options
@click.option(
    "--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="Add a variant of the first job: 'plan.tp=4,plan.pp=2'."
)
@click.option("--runs", is_flag=True, help="Also over days: goodput, days and cost with failures and checkpoints, 20 runs each.")
@money_options
@AS_JSON
def command(
    jobs: tuple[str, ...],
    as_json: bool,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
    runs: bool,
    tokens: float | None,
    price: float | None,
    **given: Any,
) -> None:
    """Several jobs side by side: what differs, and what it does. The exit code is 2 when none fits in memory."""
    from reports.formatting import TOKENS
    from reports.inputs import describe
    from reports.tables.compare_runs import run_data
    from reports.tables.comparison import comparison
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import predict
    from strategies.read_job import read_job
    from strategies.resilience.runs import run_training
    from topologies.costs import mean_rates

    asked = [read_job(job, overrides, **given) for job in jobs]
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    first = changing(jobs[0], overrides, given)
    asked += [first({}, apart.split(variant), variant) for variant in variants]
    total = tokens_of(tokens)
    about = {} if total is None else {"tokens": total}
    rows = [(job.name, with_interval(job, predict(job)), {**describe(job), **about}) for job in asked]
    money = [mean_rates(job.cluster, price) for job in asked]
    delivered: list[RunAnswer | None] = [None] * len(rows)
    if runs:
        fitting = [summary if summary.fits else None for _, summary, _ in rows]
        delivered = [
            run_training(job, summary, total or TOKENS, rates) if summary else None
            for job, summary, rates in zip(asked, fitting, money, strict=True)
        ]
    if as_json:
        over_days = [{} if answer is None else {"run": run_data(answer)} for answer in delivered]
        plain = [{"job": inputs, **summary.to_dict(), **run} for (_, summary, inputs), run in zip(rows, over_days, strict=True)]
        echo(json.dumps(plain, indent=2))
    else:
        priced = [(name, summary, {**inputs, "rates": rates}) for (name, summary, inputs), rates in zip(rows, money, strict=True)]
        show(comparison(priced, delivered))
    if not any(summary.fits for _, summary, _ in rows):
        sys.exit(2)
