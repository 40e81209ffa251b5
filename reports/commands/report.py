"""`shardyard report`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.api import PARTS
from reports.commands._common import changing, engine_options, job_options, money_options, progress, report_folder, tokens_of
from reports.terminal import echo

if TYPE_CHECKING:
    from reports.page.job_report import Wanted
    from strategies.job import Job


@click.command("report", epilog="Example: shardyard report --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --output page")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@money_options
@click.option("--output", required=True, metavar="FOLDER", help="Where report.html and the files beside it go.")
@click.option("--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="A run beside it, in place of the usual ones.")
@click.option("--search", is_flag=True, help="Also simulate every tp × pp with DDP, ZeRO-1 and ZeRO-3.")
@click.option(
    "--search-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="How long --search may take, about; plans that are left are counted.",
)
@click.option("--results", metavar="FILE", help="Show the plans in a table of `shardyard plan --results`.")
@click.option("--validation", metavar="FILE", help="Show a table of `validate --published --csv` or `validate --output`.")
@click.option("--without", multiple=True, type=click.Choice(PARTS), help="Leave a part out; may be given several times.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(("png", "svg")),
    default=("png",),
    show_default=True,
    help="Format of the figures beside the page; may be given twice.",
)
@engine_options
def command(
    job: str | None,
    overrides: tuple[str, ...],
    output: str,
    formats: tuple[str, ...],
    workers: int | None,
    dask: str | None,
    ray: str | None,
    tokens: float | None,
    price: float | None,
    variants: tuple[str, ...],
    search: bool,
    search_seconds: float,
    results: str | None,
    validation: str | None,
    without: tuple[str, ...],
    **given: Any,
) -> None:
    """Everything about a job on one page: the answer, where time and memory go, other ways, scaling, other clusters, what limits
    it, how far to trust it, how to run it. The exit code is 2 when it runs out of memory.
    """
    from reports.page.job_report import write_job_report
    from strategies.planner.search.workers.executors import engine

    folder = report_folder(output, "--output")
    assert folder is not None
    read = changing(job, overrides, given)
    asked = read({})
    others = [read({}, _APART.split(text), text) for text in variants]
    wanted = _wanted(asked, tokens, price, without, others, search_seconds if search else None, results, validation)
    with engine(workers, dask, ray) as runs, progress() as tell:
        paths, summary = write_job_report(
            folder, asked, read, wanted, runs, shlex.join(["shardyard", *sys.argv[1:]]), formats, tell
        )
    echo(f"wrote {paths[0]} and {len(paths) - 1} files beside it")
    if not summary.fits:
        sys.exit(2)


_APART = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list


def _wanted(
    job: Job,
    tokens: float | None,
    price: float | None,
    without: tuple[str, ...],
    others: list[Job],
    search: float | None,
    results: str | None,
    validation: str | None,
) -> Wanted:
    """What was asked for, with the files that it names read before any work is done."""
    from reports.page.job_report import Wanted, results_of
    from reports.tables.published import from_file
    from topologies.costs import rates

    return Wanted(
        rates(job.cluster.node.gpu, price),
        tokens_of(tokens),
        price,
        frozenset(without),
        others,
        search,
        (results, results_of(results)) if results else None,
        (validation, from_file(Path(validation))) if validation else None,
    )
