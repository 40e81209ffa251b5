"""What commands share: the options that make a job, the folder of a report, printing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")


def job_options(command: Any) -> Any:
    """What makes a job."""
    for option in reversed((
        click.option("--model", help="Preset, config.json or YAML, instead of the job's."),
        click.option("--cluster", help="Name from the catalogue or YAML, instead of the job's."),
        click.option("--nodes", type=int, help="Number of nodes."),
        click.option("--plan", help="YAML of the plan, instead of the job's."),
        click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU."),
        click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field, e.g. plan.tp=4."),
    )):  # fmt: skip
        command = option(command)
    return command


def show(renderable: Any) -> None:
    """To the terminal; lines are not broken when it is not one."""
    from rich.console import Console

    console = Console()
    console.width = console.width if console.is_terminal else 1000
    console.print(renderable)


def write_json(path: str, data: Any) -> None:
    """Whole or not at all."""
    import json

    target = Path(path)
    whole = target.with_name(f".{target.name}.part")
    whole.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    whole.replace(target)


def report_folder(report: str | None) -> Path | None:
    """The folder of a report, refused before any work is done."""
    if report is None:
        return None
    from topologies.reading import UserError

    if not report or (Path(report).exists() and not Path(report).is_dir()):
        raise UserError(f"--report {report!r}: must name a folder, and no file")
    return Path(report)
