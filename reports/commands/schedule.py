"""`shardyard schedule`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("schedule")
@click.argument("name", metavar="NAME_OR_CSV")
@click.option("--pp", type=click.IntRange(1), help="Number of pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(1), help="Microbatches in a step.")
@click.option("--chunks", type=click.IntRange(1), help="Virtual stages of each rank, for schedules that interleave.")
@click.option("--csv", "file", metavar="FILE", help="Write it as PyTorch's CSV instead: torch.distributed.pipelining loads it.")
def command(name: str, pp: int | None, microbatches: int | None, chunks: int | None, file: str | None) -> None:
    """The order in which each rank of a pipeline runs its passes: stage, F B I W, microbatch; one line per rank."""
    from strategies.schedule_file import cells, text_table, write_schedule

    rows, notes = cells(name, pp, microbatches, chunks)
    if file:
        click.echo(f"wrote {write_schedule(rows, Path(file), name)}")
    else:
        click.echo(text_table(rows))
    for note in notes:
        click.echo(note)
