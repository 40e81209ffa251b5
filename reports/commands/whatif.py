"""`shardyard whatif`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import (
    AS_JSON,
    SEARCHABLE,
    changing,
    engine_options,
    figure_option,
    job_options,
    money_options,
    only_set,
    progress,
    show,
    tokens_of,
)
from reports.terminal import echo

LONGEST = 10_000  # letters of --also

if TYPE_CHECKING:
    from strategies.planner.search.space import Axis


@click.command("whatif", epilog="Example: shardyard whatif --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --vary nodes=1,2,4")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--vary",
    multiple=True,
    metavar="FIELD=V,V,…",
    help="Inputs: nodes=8,16; cluster.node.nic=25 GB/s,x2; price=2,3. x2 is twice what the job has.",
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
@click.option(
    "--batch",
    type=click.Choice(("keep", "scale")),
    help="The global batch: keep the job's, or scale it with the GPUs, in whole microbatches. [default: what the job says]",
)
@click.option("--replan", is_flag=True, help="Find the best plan anew at every point (plan: auto), instead of the job's.")
@click.option(
    "--runs", is_flag=True, help="Days and cost with failures and checkpoints: 20 runs each, which meet the same failures."
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the runs of --runs. [default: 0]")
@figure_option("--plot", "Draw tokens/s/GPU as a curve over one --vary of numbers, as PNG or SVG.")
@money_options
@engine_options
@AS_JSON
def command(
    job: str | None,
    overrides: tuple[str, ...],
    vary: tuple[str, ...],
    one_at_a_time: bool,
    weak: bool,
    strong: bool,
    plans: tuple[str, ...],
    batch: str | None,
    replan: bool,
    runs: bool,
    seed: int | None,
    plot: str | None,
    tokens: float | None,
    price: float | None,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Change inputs and see the answer move: a table, a tornado, weak and strong scaling, where the winner changes.

    The exit code is 2 when a value is refused wherever it was tried.
    """
    from reports.formatting import TOKENS, unit_of_job
    from strategies.planner import whatif
    from strategies.planner.multiples import absolute, own_value, rounded
    from strategies.planner.search.workers.executors import engine
    from topologies.reading import UserError

    if weak + strong + one_at_a_time > 1:
        raise UserError("--weak, --strong, --one-at-a-time: only one of them")
    if batch and (weak or strong):
        raise UserError("--batch: --weak scales the batch and --strong keeps it")
    if replan and plans:
        raise UserError("--replan, --also: only one of them says the plans")
    if seed is not None and not runs:
        raise UserError("--seed is of --runs: without them nothing is drawn")
    read, named = changing(job, overrides, given), _plans(plans)
    given_axes = _axes(vary, plot, weak or strong)
    axes = [absolute(axis, read({}), price) for axis in given_axes]
    remarks = [remark for axis in given_axes for remark in rounded(axis, read({}))]
    inputs = whatif.scaling(read, axes[0], weak) if weak or strong else None
    if inputs is None:
        several = whatif.one_at_a_time(axes) if one_at_a_time else whatif.combinations(axes)
        inputs = whatif.batched(read, [*([{}] if replan else []), *several], batch)
    total = tokens_of(tokens) or TOKENS
    cases = [(inputs_of_case, name, fields) for inputs_of_case in ({}, *inputs) for name, fields in named.items()]
    with engine(workers, dask, ray) as executor, progress() as tell:
        answer = whatif.ask(read, cases, executor, total, price, (seed or 0) if runs else None, replan, tell)
    base, rest = answer[: len(named)], answer[len(named) :]
    if as_json:
        from reports.tables.whatif import as_data

        echo(json.dumps([as_data(case, read({})) for case in answer], indent=2))
    else:
        from reports.tables.whatif import overview

        scaling = "weak" if weak else "strong" if strong else ""
        show(overview(read({}), base, rest, tornado=one_at_a_time, scaling=scaling, tokens=total, remarks=remarks))
        if base[0].summary is not None and not base[0].summary.fits and only_set(job, overrides, given):
            echo(SEARCHABLE)
    if plot:
        from reports.figures.curve import curve
        from reports.tables.whatif import curves

        field = axes[0].name
        own = [] if replan else [replace(case, changes={field: own_value(field, read({}), price)}) for case in base]
        echo(f"wrote {curve(curves(rest, field, own, unit_of_job(read({}))), Path(plot))}", err=as_json)
    if whatif.impossible(rest):
        sys.exit(2)


def _axes(vary: tuple[str, ...], plot: str | None, scaling: bool) -> list[Axis]:
    """What varies."""
    from strategies.planner.search.space import parse_axis
    from topologies.reading import UserError

    if not vary:
        raise UserError("--vary: name at least one input, such as --vary nodes=8,16,32")
    if (plot or scaling) and len(vary) != 1:
        raise UserError("--plot, --weak and --strong take one --vary")
    return [parse_axis(text) for text in vary]


def _plans(texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The job's own plan under no name, and what others change."""
    from strategies.overrides import parse_changes
    from strategies.planner.search.space import known_field
    from topologies.reading import UserError

    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    named: dict[str, dict[str, Any]] = {"": {}}
    for text in texts:
        if len(text) > LONGEST:  # each comma is looked behind to the next bracket
            raise UserError(f"--also {text}: more than {LONGEST:,} letters")
        parse_changes(apart.split(text))
        named[text] = dict(_pair(part) for part in apart.split(text))
        for field in named[text]:
            known_field(field, f"--also {text}")
    return named


def _pair(text: str) -> tuple[str, Any]:
    from topologies.reading import parse_value

    name, _, value = text.partition("=")
    return name, parse_value(value, f"--also {text}")
