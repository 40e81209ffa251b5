"""What commands share: the options that make a job, the folder of a report, printing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")


def framework_names() -> list[str]:
    """The frameworks whose settings are read and written, without importing them."""
    return sorted(path.stem for path in (Path(__file__).parents[2] / "strategies/frameworks").glob("[!_]*.py"))


def job_options(command: Any) -> Any:
    """What makes a job."""
    settings = [
        click.option(f"--from-{name}", metavar="FILE", help=f"Plan from {name}'s settings; keys not used are printed.")
        for name in framework_names()
    ]
    for option in reversed((
        click.option("--model", help="Preset, config.json or YAML, instead of the job's."),
        click.option("--cluster", help="Name from the catalogue or YAML, instead of the job's."),
        click.option("--nodes", type=int, help="Number of nodes."),
        click.option("--plan", help="YAML of the plan, instead of the job's."),
        click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU."),
        click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field, e.g. plan.tp=4."),
        *settings,
    )):  # fmt: skip
        command = option(command)
    return command


def show(renderable: Any) -> None:
    """To the terminal; lines are not broken when it is not one."""
    from rich.console import Console

    console = Console()
    console.width = console.width if console.is_terminal else 1000
    console.print(renderable)


def report_folder(report: str | None) -> Path | None:
    """The folder of a report, refused before any work is done."""
    if report is None:
        return None
    from topologies.reading import UserError

    if not report or (Path(report).exists() and not Path(report).is_dir()):
        raise UserError(f"--report {report!r}: must name a folder, and no file")
    return Path(report)
