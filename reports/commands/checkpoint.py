"""`shardyard checkpoint`."""

from __future__ import annotations

import json
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, job_with_found_plan, show
from reports.terminal import echo


@click.command("checkpoint", epilog="Example: shardyard checkpoint --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@AS_JSON
def command(job: str | None, as_json: bool, **given: Any) -> None:
    """What a job's checkpoint is: size, time, what the GPUs wait, the best interval by each rule, the bandwidth to buy."""
    from strategies.resilience.checkpoint_plan import checkpoint_plan
    from strategies.resilience.settings import RunSettings

    asked = job_with_found_plan(job, **given)
    plan = checkpoint_plan(asked, asked.run or RunSettings())
    if as_json:
        from reports.tables.checkpoint import as_data

        echo(json.dumps(as_data(plan), indent=2))
    else:
        from reports.tables.checkpoint import overview

        show(overview(plan))
