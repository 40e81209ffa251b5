"""`shardyard export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reports.commands._common import framework_names, job_options


@click.command("export")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@click.option("--to", "target", required=True, type=click.Choice(framework_names()), help="Whose settings.")
@click.option("--output", metavar="FILE", help="Write them there instead of printing them.")
@job_options
def command(job: str | None, target: str, output: str | None, **given: Any) -> None:
    """The settings that run a job's plan with a training framework; what those cannot express is listed."""
    from strategies.export import export
    from strategies.job import read_job

    written = export(target, read_job(job, **given))
    if output:
        Path(output).write_text(written.text, encoding="utf-8")
        click.echo(f"wrote {output}")
    else:
        click.echo(written.text, nl=False)
    click.echo(f"# start with: {written.launch.replace('FILE', output or written.file)}", err=not output)
    for one in written.unexpressed:
        click.echo(f"# not expressed: {one}", err=not output)
