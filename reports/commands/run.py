"""`shardyard run`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
    report_folder,
    show,
    tell_found,
    tokens_of,
)
from reports.terminal import echo

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.planner.search.workers.executors import Engine


@click.command("run", epilog="Example: shardyard run --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --tokens 1e12")
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
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of everything that is random.")
@click.option("--advice/--no-advice", default=True, show_default=True, help="Try other intervals, and what else would help.")
@figure_option("--plot", "Draw where time goes and intervals, or goodput over one --vary (PNG or SVG).")
@click.option("--report", metavar="FOLDER", help="Also write a page with a timeline that zooms, and its figures.")
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
    report: str | None,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """What a job delivers over days: failures, checkpoints, restarts, spares; goodput, cost and where every GPU-second goes."""
    from reports.formatting import TOKENS
    from strategies.planner.search.workers.executors import engine
    from topologies.reading import UserError

    if days is not None and tokens is not None:
        raise UserError("--days and --tokens: only one of them says when the run ends")
    check_positive(days=days)
    if days is not None and days > 10_000:
        raise UserError(f"--days {days:g}: must be at most 10,000")
    folder = _page_folder(report, vary)
    total = None if days is not None else tokens_of(tokens) or TOKENS
    read = changing(job, overrides, given)
    tell_found(read({}))
    with engine(workers, dask, ray) as runs:
        asked = Asked(read, days, total, price, seed, replications, runs)
        if vary:
            _compared(asked, vary, as_json, plot)
        else:
            _one(asked, advice, as_json, plot, folder)


@dataclass(frozen=True)
class Asked:
    """The job as a function of changes, how long it runs, what a GPU-hour costs, what is drawn how often, and where."""

    read: Callable[[dict[str, Any]], Job]
    days: float | None
    tokens: float | None
    price: float | None
    seed: int
    replications: int | None
    engine: Engine


def _page_folder(report: str | None, vary: tuple[str, ...]) -> Path | None:
    """The page's folder, refused before any work is done."""
    from topologies.reading import UserError

    if report is not None and vary:
        raise UserError("--report is of the job alone: leave out --vary, or draw its comparison by --plot")
    return report_folder(report)


def _one(asked: Asked, advice: bool, as_json: bool, plot: str | None, folder: Path | None) -> None:
    """One job, and what would help it."""
    from reports.tables.run import as_data, overview
    from sim.runs.replications import recorded
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.runs import alternatives, best_interval, run
    from strategies.resilience.settings import RunSettings
    from strategies.resilience.step_interval import with_step_interval
    from topologies.costs import mean_rates

    job, seed, each = asked.read({}), asked.seed, asked.engine.map
    money = mean_rates(job.cluster, asked.price)
    prepared = prepare(job, job.run or RunSettings(), asked.days, asked.tokens)
    certain, prepared = prepared, with_step_interval(prepared)
    answer = run(prepared, money, seed, asked.replications, each)
    tried = best_interval(certain, seed, each) if advice else []
    changes = alternatives(certain, asked.days, asked.tokens, seed, each) if advice and certain.spec.components else []
    if as_json:
        echo(json.dumps(as_data(prepared, answer, tried, changes), indent=2))
    else:
        show(overview(prepared, answer, money, tried, changes, seed))
    if plot is not None:
        from reports.figures.run import run as draw

        echo(f"wrote {draw((prepared, answer, tried, recorded(prepared.spec, seed)), Path(plot))}", err=as_json)
    if folder is not None:
        from reports.inputs import describe
        from reports.page.run_report import RunReport, write_run_report
        from strategies.resilience.compare_runs import compare_runs, scales

        sizes = scales(job) if advice else []
        cases = compare_runs(asked.read, sizes, asked.days, asked.tokens, asked.price, seed, None, each)
        inputs, outcome = describe(job, shlex.join(["shardyard", *sys.argv[1:]])), recorded(prepared.spec, seed)
        page = RunReport(prepared, answer, money, tried, changes, cases, outcome, inputs, seed)
        paths = write_run_report(folder, page)
        echo(f"wrote {paths[0]} and {len(paths) - 1} files beside it", err=as_json)


def _compared(asked: Asked, vary: tuple[str, ...], as_json: bool, plot: str | None) -> None:
    """Every combination of inputs."""
    from reports.tables.compare_runs import as_data, table
    from strategies.planner.multiples import absolute
    from strategies.planner.search.space import parse_axis
    from strategies.planner.whatif import combinations
    from strategies.resilience.compare_runs import compare_runs
    from topologies.reading import UserError

    if plot and len(vary) != 1:
        raise UserError("--plot takes one --vary")
    job = asked.read({})
    axes = [absolute(parse_axis(text), job, asked.price) for text in vary]
    how = (asked.days, asked.tokens, asked.price, asked.seed, asked.replications, asked.engine.map)
    cases = compare_runs(asked.read, combinations(axes), *how)
    if as_json:
        echo(json.dumps([as_data(case) for case in cases], indent=2))
    else:
        show(table(job, cases, asked.seed))
    if plot is not None:
        from reports.figures.goodput import goodput as draw

        echo(f"wrote {draw((axes[0].name, cases), Path(plot))}", err=as_json)
    if all(case.refused for case in cases):
        sys.exit(2)
