"""`shardyard simulate`."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, report_folder, show


@click.command("simulate")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@AS_JSON
@click.option("--report", metavar="FOLDER", help="Also write an HTML page, figures, CSV and a Perfetto trace.")
@click.option("--unfolded", is_flag=True, help="Give every rank its own actor (same answer, slower).")
def command(job: str | None, as_json: bool, report: str | None, unfolded: bool, **given: Any) -> None:
    """Predict one training step of a job. The exit code is 2 when it runs out of memory."""
    from calibration.predict import predict, simulate
    from reports.inputs import describe
    from sim.summary import summarise
    from strategies.fixes import fixes
    from strategies.job import read_job

    asked = read_job(job, **given)
    folder = report_folder(report)
    timeline = simulate(asked, fold=not unfolded)
    summary, inputs = summarise(timeline), describe(asked, shlex.join(["shardyard", *sys.argv[1:]]))
    if not summary.fits:
        inputs["fixes"] = [str(fix) for fix in fixes(asked, summary, predict)]
    if as_json:
        click.echo(json.dumps({"job": inputs, **summary.to_dict()}, indent=2))
    else:
        from reports.tables import one_screen

        show(one_screen(summary, inputs))
        if asked.ignored:
            click.echo(f"not used from the model's file: {', '.join(asked.ignored)}")
        for note in asked.notes:
            click.echo(note)
    if folder:
        from reports.page import Report, write_report

        paths = write_report(folder, Report(timeline, summary, inputs, asked.cluster))
        click.echo(f"wrote {', '.join(str(path) for path in paths)}", err=as_json)
    if not summary.fits:
        sys.exit(2)
