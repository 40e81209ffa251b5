"""`shardyard straggler`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, figure_option, show
from reports.terminal import echo


@click.command("straggler")
@click.argument("trace")
@click.option("--steps", is_flag=True, help="Also print a line per step.")
@figure_option("--plot", "PNG or SVG of what each worker (dp rank × stage) costs.")
@AS_JSON
def command(trace: str, steps: bool, plot: str | None, as_json: bool) -> None:
    """What stragglers cost a job, and which, by replaying its op-level trace.

    TRACE is Parquet or CSV with a row per op: dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, gmc.
    """
    from calibration.readers.op_trace import read_op_trace
    from calibration.stragglers.analysis import analyse
    from reports.tables.stragglers import as_data, every_step, overview

    found = analyse(read_op_trace(Path(trace)), trace)
    if as_json:
        echo(json.dumps(as_data(found, trace), indent=2))
    else:
        if steps:
            show(every_step(found))
        show(overview(found, trace))
    if plot is not None:
        from reports.figures.stragglers import stragglers

        echo(f"wrote {stragglers(found, Path(plot))}", err=as_json)
