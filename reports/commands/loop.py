"""`shardyard loop`."""

from __future__ import annotations

import json
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, job_with_found_plan, show
from reports.terminal import echo


@click.command("loop", epilog="Example: shardyard loop --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@AS_JSON
def command(job: str | None, as_json: bool, **given: Any) -> None:
    """The training loop at its seven cut points, from input to checkpoint: what each costs of a step, hidden and exposed."""
    from reports.tables.loop import as_data, overview
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.settings import RunSettings

    asked = job_with_found_plan(job, **given)
    prepared = prepare(asked, asked.run or RunSettings(), days=1.0)
    if as_json:
        echo(json.dumps(as_data(prepared), indent=2))
    else:
        show(overview(prepared))
