"""`shardyard variability`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, figure_option, job_options, job_with_found_plan, show
from reports.terminal import echo


@click.command("variability", epilog="Example: shardyard variability --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@AS_JSON
@click.option(
    "--gpus", type=float, help="Standard deviation of the logarithm of kernels' times among GPUs. [default: the profile's]"
)
@click.option(
    "--collectives",
    type=float,
    default=0.0,
    show_default=True,
    help="Standard deviation of the logarithm of the times of collectives and sends.",
)
@click.option("--samples", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Number of draws.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the draws.")
@figure_option("--plot", "Draw what waiting for the slowest leaves, by ranks (PNG or SVG).")
def command(
    job: str | None,
    as_json: bool,
    gpus: float | None,
    collectives: float,
    samples: int,
    seed: int,
    plot: str | None,
    **given: Any,
) -> None:
    """How long a step takes when GPUs of one kind differ: every rank draws its own speed, the step waits for the slowest."""
    from strategies.planner.variability import variability
    from topologies.reading import UserError

    for option, value in (("--gpus", gpus), ("--collectives", collectives)):
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{option} {value:g}: must be from 0 to 1")
    asked = job_with_found_plan(job, **given)
    spread = variability(asked, gpus, collectives, samples, seed)
    replica = asked.cluster.gpus // asked.resolve().dp
    if as_json:
        echo(json.dumps({**asdict(spread), "cost": spread.cost, "gpus_per_replica": replica}, indent=2))
    else:
        from reports.tables.variability import table

        show(table(asked.name, spread, replica))
    if plot is not None:
        from reports.figures.variability import variability as draw

        echo(f"wrote {draw((spread, replica), Path(plot))}", err=as_json)
