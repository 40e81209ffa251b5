"""`shardyard run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import (
    AS_JSON,
    changing,
    check_positive,
    engine_options,
    figure_option,
    job_options,
    money_options,
    show,
    tokens_of,
)
from reports.terminal import echo

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.planner.search.executors import Engine


@click.command("run")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option("--days", type=float, help="Run for so many days: how many tokens is it trained on?")
@money_options
@click.option("--vary", multiple=True, metavar="FIELD=V,V,…", help="Compare inputs: run.spares=0,2,4; nodes=x1,x2; price=2,3.")
@click.option(
    "--replications",
    type=click.IntRange(1, 100_000),
    help="Runs that differ by chance; by default until the mean goodput is known within ±0.2 %.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--advice/--no-advice", default=True, show_default=True, help="Try other intervals, and what else would help.")
@figure_option("--plot", "Draw where time goes and intervals, or goodput over one --vary (PNG or SVG).")
@engine_options
@AS_JSON
def command(
    job: str | None,
    overrides: tuple[str, ...],
    days: float | None,
    vary: tuple[str, ...],
    tokens: float | None,
    price: float | None,
    replications: int | None,
    seed: int,
    advice: bool,
    plot: str | None,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """What a job delivers over days: failures, checkpoints, restarts, spares; goodput, cost and where every GPU-second goes."""
    from reports.formatting import TOKENS
    from strategies.planner.search.executors import engine
    from topologies.reading import UserError

    if days is not None and tokens is not None:
        raise UserError("--days and --tokens: only one of them says when the run ends")
    check_positive(days=days)
    if days is not None and days > 10_000:
        raise UserError(f"--days {days:g}: must be at most 10,000")
    total = None if days is not None else tokens_of(tokens) or TOKENS
    read = changing(job, overrides, given)
    with engine(workers, dask, ray) as runs:
        if vary:
            _compared(read, vary, days, total, price, seed, replications, runs, as_json, plot)
        else:
            _one(read({}), days, total, price, seed, replications, advice, runs, as_json, plot)


def _one(
    job: Job,
    days: float | None,
    tokens: float | None,
    price: float | None,
    seed: int,
    replications: int | None,
    advice: bool,
    engine: Engine,
    as_json: bool,
    plot: str | None,
) -> None:
    """One job, and what would help it."""
    from reports.tables.run import as_data, overview
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.runs import alternatives, best_interval, run
    from strategies.resilience.settings import RunSettings
    from topologies.costs import mean_rates

    money = mean_rates(job.cluster, price)
    prepared = prepare(job, job.run or RunSettings(), days, tokens)
    answer = run(prepared, money, seed, replications, engine.map)
    tried = best_interval(prepared, seed, engine.map) if advice else []
    changes = alternatives(prepared, days, tokens, seed, engine.map) if advice and prepared.spec.components else []
    if as_json:
        echo(json.dumps(as_data(prepared, answer, tried, changes), indent=2))
    else:
        show(overview(prepared, answer, money, tried, changes, seed))
    if plot is not None:
        from reports.figures.run import run as draw

        echo(f"wrote {draw((prepared, answer, tried, seed), Path(plot))}", err=as_json)


def _compared(
    read: Callable[[dict[str, Any]], Job],
    vary: tuple[str, ...],
    days: float | None,
    tokens: float | None,
    price: float | None,
    seed: int,
    replications: int | None,
    engine: Engine,
    as_json: bool,
    plot: str | None,
) -> None:
    """Every combination of inputs."""
    from reports.tables.compare_runs import as_data, table
    from strategies.planner.multiples import absolute
    from strategies.planner.search.space import parse_axis
    from strategies.planner.whatif import combinations
    from strategies.resilience.compare_runs import compare_runs
    from topologies.reading import UserError

    if plot and len(vary) != 1:
        raise UserError("--plot takes one --vary")
    axes = [absolute(parse_axis(text), read({}), price) for text in vary]
    cases = compare_runs(read, combinations(axes), days, tokens, price, seed, replications, engine.map)
    if as_json:
        echo(json.dumps([as_data(case) for case in cases], indent=2))
    else:
        show(table(read({}), cases, seed))
    if plot is not None:
        from reports.figures.goodput import goodput as draw

        echo(f"wrote {draw((axes[0].name, cases), Path(plot))}", err=as_json)
    if all(case.refused for case in cases):
        sys.exit(2)
