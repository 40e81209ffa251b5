"""`shardyard validate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from reports.commands import end_interrupted
from reports.commands._common import AS_JSON, check_files, figure_option, show, timeout_option, write_json
from reports.terminal import echo, terminal

if TYPE_CHECKING:
    from calibration.validate import Validated

HERE = (
    "variants",
    "model",
    "cluster",
    "profile",
    "overrides",
    "only",
    "quick",
    "seconds",
    "launches",
    "emulated",
    "output",
)  # options of executions
THERE = ("names", "rows", "table", "results")  # of published measurements


@click.command("validate", epilog="Example: shardyard validate --published --source narayanan-2021")
@click.argument("variants", required=False, metavar="[SET.yaml]")
@click.option("--model", help="Preset, config.json or YAML, instead of the set's.")
@click.option("--cluster", help="Name from the catalogue or YAML, instead of the set's.")
@click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field of all, e.g. model.layers=2.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this variant of the set. May be repeated.")
@click.option("--quick", is_flag=True, help="Only the variants that the set calls quick.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=5.0, show_default=True, help="How long to time each, about.")
@click.option(
    "--launches", type=click.IntRange(1, 99), help="How often to start anew, of which the median counts.  [default: 3, --quick 1]"
)
@click.option(
    "--emulate", "emulated", metavar="nodes=N,bandwidth=B[,slow=B][,ranks=R]", help="On nodes that are emulated here; needs root."
)
@click.option("--output", metavar="FILE.json", help="Also write everything that was predicted and measured.")
@click.option("--published", "is_published", is_flag=True, help="Instead against measurements that others published.")
@click.option("--source", "names", multiple=True, metavar="NAME", help="With --published: only this source. May be repeated.")
@click.option("--rows", is_flag=True, help="With --published: also print a line per row.")
@click.option("--csv", "table", metavar="FILE", help="With --published: write a line per row.")
@click.option("--results", metavar="FILE.jsonl", help="Keep rows as they are done; rows that are there already are not played.")
@figure_option("--plot", "PNG or SVG of predicted against measured step times.")
@AS_JSON
@timeout_option
@click.pass_context
def command(context: click.Context, /, is_published: bool, plot: str | None, as_json: bool, **given: Any) -> None:
    """How right predictions are: strategies executed on this machine and simulated, or published measurements.

    Without a file: the strategies that PyTorch runs over 2 processes of this machine's cores.
    """
    from topologies.reading import UserError

    apart = (*HERE, "timeout") if is_published else THERE
    for name in apart:
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise UserError(f"validate: '{name}' {'contradicts' if is_published else 'needs'} --published")
    check_files(csv=given["table"], results=given["results"])
    if is_published:
        _published(plot, as_json, **{name: given[name] for name in THERE})
    else:
        _executed(plot, as_json, **{name: given[name] for name in HERE})


def _executed(
    plot: str | None,
    as_json: bool,
    variants: str | None,
    only: tuple[str, ...],
    quick: bool,
    seconds: float,
    launches: int | None,
    output: str | None,
    emulated: str | None,
    overrides: tuple[str, ...],
    **given: Any,
) -> None:
    from calibration.launch.emulation import read_emulation
    from calibration.validate import emulate, validate
    from calibration.validation_set import read_set
    from reports.tables.execution import progress
    from topologies.reading import UserError

    if plot and not seconds:
        raise UserError("--plot: step times are plotted, and --seconds 0 measures none")
    check_files(output=output)
    emulation = read_emulation(emulated) if emulated else None
    part: Literal["", "quick", "emulated"] = "emulated" if emulation else "quick" if quick else ""
    jobs = read_set(variants, overrides, only, part, emulation.nodes * emulation.ranks if emulation else None, **given)
    results: dict[str, Validated] = {}
    launches = launches or (1 if quick else 3)
    stopped: BaseException | None = None
    try:
        with progress(len(jobs) * (launches if seconds else 1), as_json, results) as hear:
            if emulation:
                emulate(jobs, seconds, emulation, hear, launches)
            else:
                validate(jobs, seconds, hear, launches)
    except (KeyboardInterrupt, UserError) as error:
        if not results:
            raise
        stopped = error
    done = list(results.values())
    if not done:  # another rank of a launcher answers
        return
    _answer(done, plot, as_json, output)
    missing = ", ".join(job.name for job in jobs[len(done) :])
    left = f"{len(done)} of {len(jobs)} are done; " + (f"not done: {missing}" if missing else "not all launches are")
    if isinstance(stopped, KeyboardInterrupt):
        end_interrupted(stopped, left)
    if stopped:
        raise UserError(f"{stopped}; {left}")


def _answer(done: Sequence[Validated], plot: str | None, as_json: bool, output: str | None) -> None:
    """Shown, then written and drawn: a full disk loses nothing."""
    from reports.tables.execution import validation

    answer = [validated.to_dict() for validated in done]
    if as_json:
        echo(json.dumps(answer, indent=2))
    else:
        show(validation(done))
    if output:
        write_json(output, answer)
    if plot:
        from reports.figures.validation import validation as draw

        draw(done, Path(plot))
    for file in filter(None, (output, plot)):
        echo(f"wrote {file}", err=as_json)


def _published(
    plot: str | None, as_json: bool, names: tuple[str, ...], rows: bool, table: str | None, results: str | None
) -> None:
    from rich.progress import track

    from calibration.published import published
    from calibration.published.comparison import compared
    from calibration.published.components import components
    from calibration.published.kept import resumed
    from reports.tables import components as parts
    from reports.tables.published import as_csv, every_row, overview
    from topologies.documents.writing import write_whole

    asked = list(published(names))
    every = compared(asked) if results is None else resumed(asked, Path(results))
    bar = track(every, "playing rows", len(asked), console=terminal(stderr=True), transient=True)
    comparisons = list(bar)
    if as_json:
        echo(json.dumps([row.to_dict() for row in comparisons], indent=2))
    else:
        sets = list(components(zip(asked, comparisons, strict=True)))
        if rows:
            show(every_row(comparisons))
            if sets:
                show(parts.every_set(sets))
        show(overview(comparisons))
        if sets:
            show(parts.overview(sets))
    if table is not None:
        write_whole(Path(table), as_csv(comparisons))
    if plot is not None:
        from reports.figures.published import published as draw

        draw(comparisons, Path(plot))
