"""`shardyard server`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, show


@click.command("server")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option("--servers", type=int, default=1, show_default=True, help="Parameter servers, beside the GPUs of the last nodes.")
@click.option("--staleness", default="sync", show_default=True, help="sync, async, or how many steps workers may run ahead.")
@click.option("--steps", type=int, default=100, show_default=True, help="Steps of every worker.")
@click.option("--jitter", type=float, default=0.1, show_default=True, help="Of compute times: standard deviation over mean.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random compute times.")
@click.option("--plot", metavar="FILE", help="Draw throughput and staleness, as PNG or SVG.")
@AS_JSON
def command(
    job: str | None, servers: int, staleness: str, steps: int, jitter: float, seed: int, plot: str | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Train with parameter servers for many steps: throughput, staleness of gradients, what limits."""
    from calibration.predict import prices_of
    from strategies.job import read_job
    from strategies.servers import parameter_servers

    asked = read_job(job, **given)
    answer = parameter_servers(asked, prices_of(asked), servers, staleness, steps, jitter, seed)
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=2))
    else:
        from reports.servers import overview

        show(overview(answer, f"{asked.model.name} on {asked.cluster.nodes} × {asked.cluster.name}"))
    if plot:
        from pathlib import Path

        from reports.figures.staleness import staleness as draw

        click.echo(f"wrote {draw({staleness: answer}, Path(plot))}", err=as_json)
    if not answer.fits:
        sys.exit(2)
