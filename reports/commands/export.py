"""`shardyard export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, check_files, framework_names, job_options, job_with_found_plan
from reports.terminal import echo


@click.command("export", epilog="Example: shardyard export job.yaml --to megatron")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@click.option("--to", "target", required=True, type=click.Choice(framework_names()), help="Framework whose settings are written.")
@click.option("--output", metavar="FILE", help="Write them there instead of printing them.")
@job_options
@AS_JSON
def command(job: str | None, target: str, output: str | None, as_json: bool, **given: Any) -> None:
    """The settings that run a job's plan with a training framework; what those cannot express is listed."""
    from strategies.frameworks.export import export
    from topologies.documents.writing import write_whole

    check_files(output=output)
    written = export(target, job_with_found_plan(job, **given))
    if output:
        write_whole(Path(output), written.text)
        echo(f"wrote {output}", err=as_json)
    launch = written.launch.replace("FILE", output or written.file)
    if as_json:
        about = {"framework": target, "file": output or written.file, "text": written.text, "launch": launch}
        echo(json.dumps(about | {"unexpressed": list(written.unexpressed)}, indent=2))
        return
    if not output:
        echo(written.text, nl=False)
    for line in (f"start with: {launch}", *(f"not expressed: {field}" for field in written.unexpressed)):
        echo(f"# {line}", err=not output)
