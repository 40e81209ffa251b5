"""`shardyard validate`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, show


@click.command("validate")
@click.option("--published", "is_published", is_flag=True, help="Against measurements that others published.")
@click.option("--source", "names", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--rows", is_flag=True, help="Also print a line per row.")
@AS_JSON
@click.option("--csv", "table", metavar="FILE", help="Write a line per row.")
@click.option("--plot", metavar="FILE", help="Draw predicted against published, and how often intervals hold (PNG or SVG).")
def command(is_published: bool, names: tuple[str, ...], rows: bool, as_json: bool, table: str | None, plot: str | None) -> None:
    """How right predictions are: error by source, GPU, scale and strategy, and what could not be expressed."""
    from rich.console import Console
    from rich.progress import track

    from calibration.published import published
    from calibration.validation import compared
    from topologies.reading import UserError

    if not is_published:
        raise UserError("validate: needs --published")
    for option, path in (("--csv", table), ("--plot", plot)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise UserError(f"{option} {path}: its folder does not exist")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise UserError(f"--plot {plot}: must end in .png or .svg")
    asked = list(published(names))
    bar = track(compared(asked), "playing rows", len(asked), console=Console(stderr=True), transient=True)
    found = list(bar)
    from reports.figures.published import published as draw
    from reports.validation import as_csv, every_row, overview

    if as_json:
        click.echo(json.dumps([row.to_dict() for row in found], indent=2))
    else:
        if rows:
            show(every_row(found))
        show(overview(found))
    if table is not None:
        Path(table).write_text(as_csv(found), encoding="utf-8")
    if plot is not None:
        draw(found, Path(plot))
