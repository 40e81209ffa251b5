"""`shardyard straggler`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, figure_option, show
from reports.terminal import echo


@click.command("straggler", epilog="Example: shardyard straggler trace.csv --steps")
@click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--steps", is_flag=True, help="Also print a line per step.")
@figure_option("--plot", "PNG or SVG of what each worker (dp rank × stage) costs.")
@AS_JSON
def command(trace: tuple[Path, ...], steps: bool, plot: str | None, as_json: bool) -> None:
    """What stragglers cost a job, and which, by replaying its trace.

    TRACE is Parquet or CSV with a row per op: dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, gmc. Or traces
    of the PyTorch profiler, one file per rank, or their folder.
    """
    from calibration.stragglers.reading import analysed
    from reports.tables.stragglers import as_data, every_step, overview

    source = str(trace[0]) + (f" and {len(trace) - 1} more" if len(trace) > 1 else "")
    analysis = analysed(trace, source)
    if as_json:
        echo(json.dumps(as_data(analysis, source), indent=2))
    else:
        if steps:
            show(every_step(analysis))
        show(overview(analysis, source))
    if plot is not None:
        from reports.figures.stragglers import stragglers

        echo(f"wrote {stragglers(analysis, Path(plot))}", err=as_json)
