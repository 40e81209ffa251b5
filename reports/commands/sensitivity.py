"""`shardyard sensitivity`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, figure_option, job_options, job_with_found_plan, show
from reports.terminal import echo


@click.command("sensitivity", epilog="Example: shardyard sensitivity --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@AS_JSON
@click.option("--by", type=float, default=0.1, show_default=True, help="Move each price by this fraction.")
@click.option("--spread", is_flag=True, help="Move each price by its own standard deviation instead.")
@figure_option("--plot", "Draw it as a tornado (PNG or SVG).")
def command(job: str | None, as_json: bool, by: float, spread: bool, plot: str | None, **given: Any) -> None:
    """Which price moves the answer: the step with each price lower and higher, the strongest first."""
    from math import exp

    from strategies.planner.sensitivity import PRICES, Play, kernels_of
    from strategies.planner.uncertainty import spreads
    from topologies.reading import UserError

    if not 0 < by <= 10:
        raise UserError(f"--by {by}: must be more than 0 and at most 10")
    asked = job_with_found_plan(job, **given)
    if spread and len(asked.cluster.gpu_kinds) > 1:
        raise UserError("--spread: GPUs of several kinds have a spread each; --by moves the prices of all of them together")
    play = Play.of(asked, expected=True)
    longest = play.timelines[-1]
    factors = (
        {name: exp(sigma) for name, sigma in spreads(longest, kernels_of(longest)).items()}
        if spread
        else {price.name: 1 + by for price in PRICES}
    )
    groups = ("kernels",) if spread else ("kernels", "clock")  # which others are part of
    swings = play.swings({name: factor for name, factor in factors.items() if name not in groups})
    if as_json:
        echo(json.dumps({"step_seconds": play.seconds, "effects": [asdict(swing) for swing in swings]}, indent=2))
    else:
        from reports.tables.sensitivity import table

        show(table(asked.name, play.seconds, swings))
    if plot is not None:
        from reports.figures.tornado import tornado

        echo(f"wrote {tornado((asked.name, play.seconds, swings), Path(plot))}", err=as_json)
