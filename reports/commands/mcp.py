"""`shardyard mcp`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("mcp", epilog="Example: shardyard mcp --folder jobs")
@click.option("--folder", metavar="FOLDER", default=".", show_default=True, help="Files of this folder only are read.")
def command(folder: str) -> None:
    """Answer a language model over stdio (Model Context Protocol): simulate, memory, plan, whatif, run, export, explain."""
    from reports.explorer.tools import serve
    from topologies.reading import UserError

    if not Path(folder).is_dir():
        raise UserError(f"--folder {folder}: is no folder")
    serve(Path(folder))
