"""`shardyard whatif`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, changing, engine_options, job_options, money_options, show, tokens_of


@click.command("whatif")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--vary", multiple=True, metavar="FIELD=V,V,…", help="Inputs: nodes=8,16; cluster.node.nic=25 GB/s,50 GB/s; price=2,3."
)
@click.option(
    "--one-at-a-time", is_flag=True, help="Not all combinations, but a tornado: each value alone, the largest effect first."
)
@click.option("--weak", is_flag=True, help="Weak scaling over --vary nodes: the global batch grows with them.")
@click.option("--strong", is_flag=True, help="Strong scaling over --vary nodes: the global batch stays.")
@click.option(
    "--also",
    "plans",
    multiple=True,
    metavar="FIELD=VALUE[,…]",
    help="Compare with another plan at every point: where does the winner change?",
)
@click.option("--plot", metavar="FILE", help="Draw tokens/s/GPU as a curve over one --vary of numbers, as PNG or SVG.")
@money_options
@engine_options
@AS_JSON
def command(
    job: str | None, overrides: tuple[str, ...], vary: tuple[str, ...], one_at_a_time: bool, weak: bool, strong: bool,
    plans: tuple[str, ...], plot: str | None, tokens: float | None, price: float | None, workers: int | None, dask: str | None,
    ray: str | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Change inputs and see the answer move: a table, a tornado, weak and strong scaling, where the winner changes."""
    from calibration import whatif
    from calibration.engines import engine
    from reports.words import TOKENS
    from strategies.job import parse_changes
    from strategies.search.space import parse_axis
    from topologies.reading import UserError

    if weak + strong + one_at_a_time > 1:
        raise UserError("--weak, --strong, --one-at-a-time: only one of them")
    if not vary:
        raise UserError("--vary: name at least one input, such as --vary nodes=8,16,32")
    axes = [parse_axis(text) for text in vary]
    if (plot or weak or strong) and len(axes) != 1:
        raise UserError("--plot, --weak and --strong take one --vary")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise UserError(f"--plot {plot}: must end in .png or .svg")
    read = changing(job, overrides, given)
    inputs = whatif.scaling(read, axes[0], weak) if weak or strong else None
    inputs = inputs or (whatif.one_at_a_time(axes) if one_at_a_time else whatif.combinations(axes))
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    named: dict[str, dict[str, Any]] = {"": {}}
    for text in plans:
        parse_changes(apart.split(text))
        named[text] = dict(_pair(part) for part in apart.split(text))
    total = tokens_of(tokens) or TOKENS
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [({}, name, fields) for name, fields in named.items()] + [
        (one, name, f) for one in inputs for name, f in named.items()
    ]
    with engine(workers, dask, ray) as runs:
        found = whatif.ask(read, cases, runs, total, price)
    base, rest = found[: len(named)], found[len(named) :]
    if as_json:
        from reports.whatif import as_data

        click.echo(json.dumps([as_data(case) for case in found], indent=2))
    else:
        from reports.whatif import overview

        show(
            overview(
                read({}), base, rest, tornado=one_at_a_time, scaling="weak" if weak else "strong" if strong else "", tokens=total
            )
        )
    if plot:
        from reports.figures.curve import Curve, curve
        from reports.whatif import lines

        click.echo(f"wrote {curve(Curve(axes[0].name, lines(rest, axes[0].name)), Path(plot))}", err=as_json)


def _pair(text: str) -> tuple[str, Any]:
    import yaml

    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)
