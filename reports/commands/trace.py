"""`shardyard trace`."""

from __future__ import annotations

from typing import Any

import click

from reports.api import TRACES
from reports.commands._common import job_options, job_with_found_plan, report_folder
from reports.terminal import echo


@click.command("trace", epilog="Example: shardyard trace --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --output out")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--format",
    "form",
    type=click.Choice(list(TRACES)),
    default="perfetto",
    show_default=True,
    help="; ".join(f"{name}: {about}" for name, about in TRACES.items()) + ".",
)
@click.option("--output", metavar="FOLDER", required=True, help="Where the files go.")
def command(job: str | None, form: str, output: str, **given: Any) -> None:
    """A simulated step as a trace for tools that read traces of real jobs; of ranks that are alike the first one's."""
    from reports.api.look import trace

    folder = report_folder(output, "--output")
    assert folder is not None
    paths = trace(job_with_found_plan(job, **given), folder, form)
    if form == "chakra":
        echo(f"wrote {paths[0]} to {paths[-2].name}, and {paths[-1].name}")
    else:
        echo("\n".join(f"wrote {path}" for path in paths))
