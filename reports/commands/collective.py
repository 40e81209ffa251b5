"""`shardyard collective`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reports.commands._common import AS_JSON, figure_option, show
from reports.terminal import echo


@click.command("collective", epilog="Example: shardyard collective all_reduce --cluster dgx-h100 --nodes 4")
@click.argument("operation")
@click.option("--cluster", default="dgx-h100", show_default=True, help="Name from the catalogue or YAML.")
@click.option("--nodes", type=int, help="Number of nodes.")
@click.option("--ranks", type=int, help="Only the first so many GPUs.")
@click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU.")
@click.option("--algorithm", default="auto", show_default=True, help="Algorithm and protocol: ring, ring/ll128, auto/simple.")
@click.option("--sizes", default="1KiB:1GiB", show_default=True, metavar="FROM:TO[:FACTOR]", help="Sizes of the full buffer.")
@click.option("--measured", metavar="LOG", help="Compare with a log or JSON of nccl-tests.")
@figure_option("--plot", "Draw time and bandwidth against size, as PNG or SVG.")
@figure_option("--by-ranks", "Instead draw its time against the number of ranks, up to all of the cluster.")
@AS_JSON
def command(operation: str, plot: str | None, by_ranks: str | None, as_json: bool, **asked: Any) -> None:
    """Time, algbw and busbw of a collective by algorithm, protocol and size, and what a job uses."""
    from calibration.bench import bench

    if by_ranks:
        _growth(operation, by_ranks, as_json, **asked)
        return

    data, notes = bench(operation, **asked)
    if as_json:
        echo(json.dumps(data.to_dict() | {"where": data.where, "notes": notes}, indent=2))
    else:
        from reports.tables.busbw import comparison, table

        show(table(data))
        if data.measured:
            show(comparison(data))
        for note in notes:
            echo(note)
    if plot:
        from reports.figures.busbw import busbw

        echo(f"wrote {busbw(data, Path(plot))}", err=as_json)


def _growth(operation: str, file: str, as_json: bool, ranks: int | None, measured: str | None, **asked: Any) -> None:
    from calibration.bench import by_ranks
    from topologies.reading import UserError

    if ranks or measured:
        raise UserError("--by-ranks: takes neither --ranks nor --measured")
    from reports.figures.growth import Growth, growth
    from reports.tables.busbw import size_of
    from topologies.documents.units import show

    title, sizes = by_ranks(operation, **asked)
    if as_json:
        every = {f"{name}, {show(size, 'B')}": dict(points) for size, lines in sizes.items() for name, points in lines.items()}
        echo(json.dumps(every, indent=2))
    shown = Growth(title, {size_of(size): lines for size, lines in sizes.items()})
    echo(f"wrote {growth(shown, Path(file))}", err=as_json)
