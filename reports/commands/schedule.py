"""`shardyard schedule`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, check_files
from reports.terminal import echo


@click.command("schedule", epilog="Example: shardyard schedule 1f1b --pp 4 --microbatches 8")
@click.argument("name", metavar="NAME_OR_CSV")
@click.option("--pp", type=click.IntRange(1), help="Number of pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(1), help="Microbatches in a step.")
@click.option("--chunks", type=click.IntRange(1), help="Virtual stages of each rank, for schedules that interleave.")
@click.option("--csv", "file", metavar="FILE", help="Write it as PyTorch's CSV instead: torch.distributed.pipelining loads it.")
@AS_JSON
def command(name: str, pp: int | None, microbatches: int | None, chunks: int | None, file: str | None, as_json: bool) -> None:
    """The order in which each rank of a pipeline runs its passes: stage, F B I W, microbatch; one line per rank."""
    from strategies.schedules.table import cells, text_table, write_schedule

    check_files(csv=file)
    rows, notes = cells(name, pp, microbatches, chunks)
    if file:
        echo(f"wrote {write_schedule(rows, Path(file), name)}", err=as_json)
    if as_json:
        echo(json.dumps({"schedule": name, "ranks": rows, "notes": list(notes)}, indent=2))
        return
    if not file:
        echo(text_table(rows))
    for note in notes:
        echo(note)
