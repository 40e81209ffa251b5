"""`shardyard explain`."""

from __future__ import annotations

import click


@click.command("explain")
@click.argument("name")
def command(name: str) -> None:
    """What a metric, a field of a plan, a schedule or a strategy means, with its source."""
    from reports.glossary import explain

    click.echo(explain(name))
