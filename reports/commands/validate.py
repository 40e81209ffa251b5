"""`shardyard validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, show, write_json


@click.command("validate")
@click.argument("variants", required=False, metavar="[SET.yaml]")
@click.option("--model", help="Preset, config.json or YAML, instead of the set's.")
@click.option("--cluster", help="Name from the catalogue or YAML, instead of the set's.")
@click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field of all, e.g. model.layers=2.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this variant of the set. May be repeated.")
@click.option("--quick", is_flag=True, help="Only the variants that the set calls quick.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=5.0, show_default=True, help="How long to time each, about.")
@click.option("--plot", metavar="FILE", help="PNG or SVG of predicted against measured step times.")
@click.option("--output", metavar="FILE.json", help="Also write everything that was predicted and measured.")
@AS_JSON
def command(
    variants: str | None, only: tuple[str, ...], quick: bool, seconds: float, plot: str | None, output: str | None,
    as_json: bool, overrides: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Execute strategies on this machine and simulate the same plans: step time, bytes sent, memory; predicted and measured.

    Without a file: the strategies that PyTorch runs over 2 processes of this machine's cores.
    """
    from calibration.validate import validate
    from calibration.validation_set import read_set
    from reports.execution import progress, validation

    if plot and Path(plot).suffix not in (".png", ".svg"):
        raise click.BadParameter("must end in .png or .svg", param_hint="--plot")
    if plot and not seconds:
        raise click.BadParameter("step times are plotted, and --seconds 0 measures none", param_hint="--plot")
    jobs = read_set(variants, overrides, only, quick, **given)
    with progress(len(jobs), as_json) as hear:
        done = validate(jobs, seconds, hear)
    if not done:
        return
    answer = [one.to_dict() for one in done]
    if output:
        write_json(output, answer)
    if plot:
        from reports.validation import validation as draw

        draw(done, Path(plot))
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(validation(done))
    for file in filter(None, (output, plot)):
        click.echo(f"wrote {file}", err=as_json)
