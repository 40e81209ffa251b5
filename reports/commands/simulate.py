"""`shardyard simulate`."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, money_options, report_folder, show, tokens_of


@click.command("simulate")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@money_options
@AS_JSON
@click.option("--report", metavar="FOLDER", help="Also write an HTML page, figures, CSV and a Perfetto trace.")
@click.option("--unfolded", is_flag=True, help="Give every rank its own actor (same answer, slower).")
def command(
    job: str | None, as_json: bool, report: str | None, unfolded: bool, tokens: float | None, price: float | None, **given: Any
) -> None:  # fmt: skip
    """Predict one training step of a job. The exit code is 2 when it runs out of memory."""
    from calibration.predict import predict, simulate
    from calibration.uncertainty import with_interval
    from reports.inputs import describe
    from reports.words import training_cost
    from sim.summary import summarise
    from strategies.fixes import fixes
    from strategies.job import read_job
    from topologies.costs import rates

    asked = read_job(job, **given)
    of_training = {"tokens": tokens_of(tokens), "rates": rates(asked.cluster.node.gpu, price)}
    folder = report_folder(report)
    timeline = simulate(asked, fold=not unfolded)
    summary, inputs = with_interval(asked, summarise(timeline)), describe(asked, shlex.join(["shardyard", *sys.argv[1:]]))
    if not summary.fits:
        inputs["fixes"] = [str(fix) for fix in fixes(asked, summary, predict)]
    if as_json:
        training = training_cost(summary, of_training).to_dict()
        click.echo(json.dumps({"job": inputs, **summary.to_dict(), "training": training}, indent=2))
    else:
        from reports.tables import one_screen

        show(one_screen(summary, inputs | of_training))
        if asked.ignored:
            click.echo(f"not used from the model's file: {', '.join(asked.ignored)}")
        for note in asked.notes:
            click.echo(note)
    if folder:
        from reports.page import Report, write_report

        paths = write_report(folder, Report(timeline, summary, inputs | of_training, asked.cluster))
        click.echo(f"wrote {', '.join(str(path) for path in paths)}", err=as_json)
    if not summary.fits:
        sys.exit(2)
