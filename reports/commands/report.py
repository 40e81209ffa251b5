"""`shardyard report`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import changing, engine_options, job_options, money_options, report_folder, tokens_of

if TYPE_CHECKING:
    from calibration.engines import Engine
    from reports.page import Section
    from sim.summary import Summary
    from strategies.job import Job

PARTS = ("runs", "scaling", "sensitivity", "published")
DEPTH = 8  # pipeline stages of the usual candidates
BESIDE = 7  # candidates that are shown
Read = Callable[[dict[str, Any]], Any]
Tell = Callable[[str], None]


@click.command("report")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@money_options
@click.option("--output", required=True, metavar="FOLDER", help="Where report.html and the files beside it go.")
@click.option("--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="A run beside it, in place of the usual ones.")
@click.option("--search", is_flag=True, help="Also simulate every tp × pp with DDP, ZeRO-1 and ZeRO-3; slow for long pipelines.")
@click.option("--results", metavar="FILE", help="Show the plans in a table of `shardyard plan --results`.")
@click.option("--validation", metavar="FILE", help="Show a table of `validate --published --csv` or `validate --output`.")
@click.option("--without", multiple=True, type=click.Choice(PARTS), help="Leave a part out; may be given several times.")
@click.option("--format", "formats", multiple=True, type=click.Choice(("png", "svg")), default=("png",), show_default=True,
              help="Of the figures beside the page; may be given twice.")  # fmt: skip
@engine_options
def command(
    job: str | None, overrides: tuple[str, ...], tokens: float | None, price: float | None, output: str,
    variants: tuple[str, ...], search: bool, results: str | None, validation: str | None, without: tuple[str, ...],
    formats: tuple[str, ...], workers: int | None, dask: str | None, ray: str | None, **given: Any,
) -> None:  # fmt: skip
    """Everything about a job on one page: the answer, where time and memory go, other ways, scaling, what limits it, how far to
    trust it, how to run it. The exit code is 2 when it runs out of memory.
    """
    from calibration.engines import engine
    from calibration.predict import predict, profile_of, simulate
    from calibration.uncertainty import with_interval
    from reports import sections
    from reports.inputs import describe
    from reports.page import Report, write_report
    from reports.published import from_file
    from sim.summary import summarise
    from strategies.fixes import fixes
    from strategies.job import read_job
    from topologies.costs import rates

    folder = report_folder(output, "--output")
    assert folder is not None
    asked, read = read_job(job, overrides, **given), changing(job, overrides, given)
    rows = from_file(Path(validation)) if validation else None
    rate = rates(asked.cluster.node.gpu, price)
    money = {"tokens": tokens_of(tokens), "rates": rate} if tokens is not None or price is not None else {}
    with engine(workers, dask, ray) as runs, _progress() as tell:
        tell("simulating the step")
        timeline = simulate(asked)
        summary, inputs = with_interval(asked, summarise(timeline)), describe(asked, shlex.join(["shardyard", *sys.argv[1:]]))
        if not summary.fits:
            inputs["fixes"] = [str(fix) for fix in fixes(asked, summary, predict)]
        made: list[Section] = []
        beside: dict[str, Summary] = {}
        if variants:
            beside = _variants(asked, summary, job, overrides, given, variants, runs, tell)
        elif "runs" not in without:
            beside = _usual(asked, summary, runs, tell, made)
        if "scaling" not in without:
            tell("scaling")
            made.append(sections.scaling(read, asked, runs))
        made += _plans(asked, read, tokens or 1e9, rate, results, search, runs, tell)
        if "sensitivity" not in without:
            tell("sensitivity")
            made.append(sections.sensitivity(asked, summary.step_seconds))
        evidence = [sections.profile_errors(profile_of(asked))]
        evidence += [sections.measured(rows, str(validation))] if rows is not None else []
        if "published" not in without:
            tell("published runs")
            evidence.append(sections.published(asked, runs))
        tell("drawing")
        page = Report(timeline, summary, inputs | money, asked.cluster, beside, tuple(made), tuple(evidence),
                      sections.launches(asked))  # fmt: skip
        paths = write_report(folder, page, formats)
    click.echo(f"wrote {', '.join(str(path) for path in paths)}")
    if not summary.fits:
        sys.exit(2)


def _variants(
    job: Job, summary: Summary, file: str | None, overrides: tuple[str, ...], given: dict[str, Any], variants: tuple[str, ...],
    engine: Engine, tell: Tell,
) -> dict[str, Summary]:  # fmt: skip
    """The job, and beside it what was asked for."""
    from calibration.predict import predict
    from strategies.job import read_job

    tell("other runs")
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    others = [read_job(file, (*overrides, *apart.split(text)), name=text, **given) for text in variants]
    return {job.name: summary, **{one.name: found for one, found in zip(others, engine.map(predict, others), strict=True)}}


def _usual(job: Job, summary: Summary, engine: Engine, tell: Tell, made: list[Section]) -> dict[str, Summary]:
    """The job, and beside it the fastest of the usual ways to train; a section says so when none of them is possible."""
    from calibration.predict import predict
    from reports.page import Section
    from strategies.advise import advise
    from topologies.reading import UserError

    tell("other runs")
    try:
        found = advise(job, predict, engine.map, DEPTH).candidates
    except UserError as error:
        made.append(Section("Beside other runs", text=(f"The usual ways to train are left out: {error}.",)))
        return {}
    return {job.name: summary, **{one.name: one.summary for one in found[:BESIDE]}}


def _plans(
    job: Job, read: Read, tokens: float, rate: Any, results: str | None, search: bool, engine: Engine, tell: Tell
) -> list[Section]:
    """Of a table of results, and of a sweep."""
    from calibration.results import Results
    from reports.plans import Plans, section
    from topologies.reading import UserError

    plan, capacity, made = job.plan.model_dump(mode="json") | {"nodes": job.cluster.nodes}, job.cluster.node.gpu.memory, []
    if results is not None:
        if not Path(results).is_file():
            raise UserError(f"--results {results}: no such file; `shardyard plan --results {results}` makes one")
        rows = list(Results(results).rows.values())
        made.append(section(Plans(rows, plan, tokens, rate, capacity), f"Plans of {results}"))
    if search:
        from calibration.sweep import sweep

        space = _small(job)
        found = sweep(read, space, engine, lambda done: tell(f"plans {done} of {space.size}"))
        made.append(section(Plans(found, plan, tokens, rate, capacity), "Other degrees"))
    return made


def _small(job: Job) -> Any:
    """Every tp of a node, every pp, and three settings of data parallelism; everything else as the job has it."""
    from strategies.search.space import Space, default_space, parse_axis

    usual = {axis.name: axis for axis in default_space(job).axes}
    sharding = parse_axis("plan.data_parallel=ddp,zero1,zero3")
    batch = parse_axis(f"plan.global_batch={job.resolve().global_batch}")
    free = [parse_axis(f"plan.{name}=null") for name in ("dp", "accumulation")]
    return Space((usual["plan.tp"], usual["plan.pp"], sharding, batch, *free))


@contextmanager
def _progress() -> Iterator[Tell]:
    """What is being done, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("reading") as status:
        yield lambda text: status.update(text)
