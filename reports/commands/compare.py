"""`shardyard compare`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import (
    AS_JSON,
    TOTAL,
    changing,
    job_options,
    money_options,
    picture_options,
    report_folder,
    show,
    tokens_of,
)
from reports.terminal import echo

if TYPE_CHECKING:
    from sim.analysis.summary import Summary
    from strategies.job import Job
    from strategies.resilience.runs import RunAnswer
    from topologies.costs import Rates


@click.command("compare", epilog="Example: shardyard compare job.yaml --also plan.tp=4,plan.data_parallel=zero1")
@click.argument("jobs", nargs=-1, metavar="[JOB.yaml]…")
@job_options
@click.option(
    "--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="Add a variant of the first job: 'plan.tp=4,plan.pp=2'."
)
@click.option("--runs", is_flag=True, help="Also over days: goodput, days and cost with failures and checkpoints, 20 runs each.")
@TOTAL
@picture_options("steps and memory side by side")
@money_options
@AS_JSON
def command(
    jobs: tuple[str, ...],
    as_json: bool,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
    runs: bool,
    total: bool,
    plot: str | None,
    report: str | None,
    tokens: float | None,
    price: float | None,
    **given: Any,
) -> None:
    """Several jobs side by side: what differs, and what it does. The exit code is 2 when none fits in memory."""
    from reports.formatting import TOKENS, training_cost
    from reports.inputs import describe
    from reports.tables.compare_runs import run_data
    from reports.tables.comparison import comparison
    from strategies.planner.uncertainty import predict_with_interval
    from strategies.read_job import read_job
    from strategies.resilience.runs import run_training
    from topologies.costs import mean_rates

    folder = report_folder(report)
    files: tuple[str | None, ...] = jobs or (None,)
    asked = [read_job(job, overrides, **given) for job in files]
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    first = changing(files[0], overrides, given)
    asked += [first({}, apart.split(variant), variant) for variant in variants]
    all_tokens = tokens_of(tokens)
    about = {"tokens": all_tokens or TOKENS}
    rows = [(job.name, predict_with_interval(job, total), {**describe(job), **about}) for job in asked]
    money = [mean_rates(job.cluster, price) for job in asked]
    delivered: list[RunAnswer | None] = [None] * len(rows)
    if runs:
        fitting = [summary if summary.fits else None for _, summary, _ in rows]
        delivered = [
            run_training(job, summary, all_tokens or TOKENS, rates) if summary else None
            for job, summary, rates in zip(asked, fitting, money, strict=True)
        ]
    if as_json:
        over_days: list[dict[str, Any]] = [{} if answer is None else {"run": run_data(answer)} for answer in delivered]
        costs = [
            training_cost(summary, inputs | {"rates": rates}) for (_, summary, inputs), rates in zip(rows, money, strict=True)
        ]
        plain = [
            {"job": inputs, **summary.to_dict(), "training": cost.to_dict(), **run}
            for (_, summary, inputs), cost, run in zip(rows, costs, over_days, strict=True)
        ]
        echo(json.dumps(plain, indent=2))
    else:
        priced = [(name, summary, {**inputs, "rates": rates}) for (name, summary, inputs), rates in zip(rows, money, strict=True)]
        show(comparison(priced, delivered))
    _draw(asked, [summary for _, summary, _ in rows], money, plot, folder, all_tokens, as_json)
    if not any(summary.fits for _, summary, _ in rows):
        sys.exit(2)


def _draw(
    jobs: list[Job],
    summaries: list[Summary],
    money: list[Rates],
    plot: str | None,
    folder: Path | None,
    tokens: float | None,
    as_json: bool,
) -> None:
    """The figure and the page that were asked for."""
    from reports.figures.comparison import comparison
    from reports.page.chosen import first, write_chosen
    from strategies.planner.ranking import rank

    runs = {_named(jobs, number): summary for number, summary in enumerate(summaries)}
    if plot is not None:
        echo(f"wrote {comparison(first(runs), Path(plot))}", err=as_json)
    if folder is not None:
        best = min(range(len(jobs)), key=lambda at: rank(summaries[at], dict(jobs[at].plan), jobs[at].hash))
        paths = write_chosen(folder, jobs[best], runs, money[best], tokens, shlex.join(["shardyard", *sys.argv[1:]]))
        echo(f"wrote {paths[0]} and {len(paths) - 1} files beside it", err=as_json)


def _named(jobs: list[Job], number: int) -> str:
    """The name of a job, told apart from equal ones before it."""
    name = jobs[number].name
    return f"{name} ({number + 1})" if name in {job.name for job in jobs[:number]} else name
