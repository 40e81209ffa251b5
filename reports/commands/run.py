"""`shardyard run`."""

from __future__ import annotations

import json
from typing import Any

import click

from reports.commands._common import AS_JSON, check_positive, engine_options, job_options, show, tokens_of
from reports.commands._common import _number as number
from reports.terminal import echo


@click.command("run")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option("--days", type=float, help="Run for so many days: how many tokens is it trained on?")
@click.option(
    "--tokens", callback=number, help="Run until so many tokens, such as 15T: how many days does it take? [default: 10¹²]"
)
@click.option("--price", type=float, help="Dollars per GPU-hour; by default a listed price, named with its date.")
@click.option(
    "--replications",
    type=click.IntRange(1, 100_000),
    help="Runs that differ by chance; by default until the mean goodput is known within ±0.2 %.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--advice/--no-advice", default=True, show_default=True, help="Try other intervals, and what else would help.")
@engine_options
@AS_JSON
def command(
    job: str | None,
    days: float | None,
    tokens: float | None,
    price: float | None,
    replications: int | None,
    seed: int,
    advice: bool,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """What a job delivers over days: failures, checkpoints, restarts, spares; goodput, cost and where every GPU-second goes."""
    from reports.formatting import TOKENS
    from strategies.planner.search.executors import engine
    from strategies.read_job import read_job
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.runs import alternatives, best_interval, run
    from strategies.resilience.settings import RunSettings
    from topologies.costs import rates
    from topologies.reading import UserError

    if days is not None and tokens is not None:
        raise UserError("--days and --tokens: only one of them says when the run ends")
    check_positive(days=days)
    if days is not None and days > 10_000:
        raise UserError(f"--days {days:g}: must be at most 10,000")
    total = None if days is not None else tokens_of(tokens) or TOKENS
    asked = read_job(job, **given)
    money = rates(asked.cluster.node.gpu, price)
    prepared = prepare(asked, asked.run or RunSettings(), days, total)
    with engine(workers, dask, ray) as runs:
        answer = run(prepared, money, seed, replications, runs.map)
        tried = best_interval(prepared, seed, runs.map) if advice else []
        changes = alternatives(prepared, days, total, seed, runs.map) if advice and prepared.spec.components else []
    if as_json:
        from reports.tables.run import as_data

        echo(json.dumps(as_data(prepared, answer, tried, changes), indent=2))
    else:
        from reports.tables.run import overview

        show(overview(prepared, answer, money, tried, changes, seed))
