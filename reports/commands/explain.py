"""`shardyard explain`."""

from __future__ import annotations

import json

import click

from reports.commands._common import AS_JSON
from reports.terminal import echo


@click.command("explain", epilog="Example: shardyard explain busbw")
@click.argument("name")
@AS_JSON
def command(name: str, as_json: bool) -> None:
    """What a metric, a field, a strategy, a machine of the catalogue or a word of the field means, with its source."""
    from reports.glossary import explain

    text = explain(name)
    echo(json.dumps({"name": name, "text": text}, indent=2, ensure_ascii=False) if as_json else text)
