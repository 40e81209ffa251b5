"""`shardyard simulate`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import (
    AS_JSON,
    SEARCHABLE,
    TOTAL,
    job_options,
    money_options,
    only_set,
    progress,
    report_folder,
    show,
    tokens_of,
)
from reports.terminal import echo

if TYPE_CHECKING:
    from sim.analysis.summary import Summary
    from sim.timeline import Timeline
    from strategies.job import Job


@click.command("simulate", epilog="Example: shardyard simulate --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --tokens 15T")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@money_options
@AS_JSON
@click.option("--report", metavar="FOLDER", help="Also write an HTML page, figures, CSV and a Perfetto trace.")
@click.option("--by-layer", is_flag=True, help="Also what each part of the model holds, and the textbook's counts beside it.")
@TOTAL
@click.option("--unfolded", is_flag=True, help="Give every rank its own actor (same answer, slower).")
def command(
    job: str | None,
    as_json: bool,
    report: str | None,
    by_layer: bool,
    total: bool,
    unfolded: bool,
    tokens: float | None,
    price: float | None,
    **given: Any,
) -> None:
    """Predict one training step of a job. The exit code is 2 when it runs out of memory."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which start with it, and which nothing here uses
    from reports.formatting import training_cost
    from reports.inputs import describe
    from reports.tables.step import UNEVEN
    from sim.analysis.summary import summarise
    from strategies.planner.uncertainty import with_interval
    from strategies.predict import played, predict, simulate
    from strategies.read_job import read_job
    from topologies.costs import mean_rates

    tokens, folder = tokens_of(tokens), report_folder(report)

    @cache
    def whole() -> Timeline:
        """With all microbatches, where only some were played."""
        return simulate(asked) if timeline.periods else timeline

    with progress() if sys.stderr.isatty() else nullcontext(lambda _: None) as tell:
        tell("finding a plan")
        asked = read_job(job, **given)
        of_training = {"tokens": tokens, "rates": mean_rates(asked.cluster, price)}
        tell("simulating the step")
        timeline = simulate(asked, fold=False) if unfolded else played(asked)
        summary = summarise(timeline, total)
        tell("how sure the step is")
        summary = with_interval(asked, summary, None if unfolded else timeline)
        inputs = describe(asked, shlex.join(["shardyard", *sys.argv[1:]]))
        if asked.effects:
            from strategies.planner.effects_cost import with_effects

            tell("what effects cost")
            summary = with_effects(asked, timeline, summary)
        tell("what would make the step shorter")
        if summary.gpu_kinds and (note := _dealt_out(asked, whole(), summary)) is not None:
            summary = replace(summary, notes=(note, *summary.notes))
        if summary.uneven > UNEVEN:
            summary = replace(summary, notes=(_uneven(asked, timeline, summary), *summary.notes))
        if not summary.fits:
            from strategies.planner.fixes import fixes

            tell("what would make it fit")
            inputs["fixes"] = [str(fix) for fix in fixes(asked, summary, predict)]
    if by_layer or folder:
        from strategies.memory_by_layer import memory_by_layer
    if as_json:
        training = training_cost(summary, of_training).to_dict()
        more = {"by_layer": memory_by_layer(asked, summary).to_dict()} if by_layer else {}
        echo(json.dumps({"job": inputs, **summary.to_dict(), "training": training, **more}, indent=2))
    else:
        from reports.tables.step import one_screen

        show(one_screen(summary, inputs | of_training))
        if by_layer:
            from reports.tables.by_layer import tables

            show(tables(memory_by_layer(asked, summary)))
        if asked.ignored:
            echo(f"not used from the model's file: {', '.join(asked.ignored)}")
        for note in asked.notes:
            echo(note)
        if not summary.fits and only_set(job, given["overrides"], given):
            echo(SEARCHABLE)
    if folder:
        from reports.page.by_layer import section
        from reports.page.page import Report, write_report

        sections = (section(memory_by_layer(asked, summary)),)
        paths = write_report(folder, Report(whole(), summary, inputs | of_training, asked.cluster, sections=sections))
        echo(f"wrote {', '.join(str(path) for path in paths)}", err=as_json)
    if not summary.fits:
        sys.exit(2)


def _uneven(job: Job, timeline: Timeline, summary: Summary) -> str:
    """What uneven stages cost, and what more even ones would take, played."""
    from reports.formatting import percent, seconds, signed
    from sim.analysis.breakdown import breakdowns, busy_seconds
    from strategies.planner.arguments import arguments_of
    from strategies.planner.balance import balanced_by
    from strategies.predict import predict

    busy = busy_seconds(timeline, breakdowns(timeline))
    most = max(range(len(busy)), key=lambda stage: busy[stage])
    what = f"stage {most} is busy for {seconds(busy[most])}, the mean stage for {seconds(sum(busy) / len(busy))}"
    message = f"{percent(summary.uneven)} of the step is waiting for uneven stages: {what}"
    other = balanced_by(job, timeline)
    better = predict(other) if other is not None else None
    if other is None or better is None or better.step_seconds >= summary.step_seconds or better.fits < summary.fits:
        return message
    change = signed(better.step_seconds / summary.step_seconds - 1)
    setting = arguments_of(job, other)
    return f"{message}; with {setting} the step takes {seconds(better.step_seconds)} ({change})"


def _dealt_out(job: Job, timeline: Timeline, summary: Summary) -> str | None:
    """What the step takes, played, when dp ranks on faster GPUs have more microbatches; None where that is no shorter."""
    from reports.formatting import seconds, signed
    from sim.analysis.summary import summarise
    from strategies.planner.arguments import arguments_of
    from strategies.planner.balance import allotted
    from strategies.predict import simulate

    better = allotted(job, timeline, simulate)
    if better is None:
        return None
    other, played = better
    step = summarise(played).step_seconds
    setting = arguments_of(job, other)
    return f"with {setting} the step takes {seconds(step)} ({signed(step / summary.step_seconds - 1)})"
