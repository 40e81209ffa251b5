"""`shardyard ranks`."""

from __future__ import annotations

import json

import click

from reports.commands._common import AS_JSON
from reports.terminal import echo


@click.command("ranks", epilog="Example: shardyard ranks --nodes 2 --gpus 4 --gpus-per-process 2")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@click.option("--gpus", type=int, default=8, show_default=True, help="GPUs of a node.")
@click.option("--gpus-per-process", type=int, default=1, show_default=True, help="GPUs that one process drives.")
@AS_JSON
def command(nodes: int, gpus: int, gpus_per_process: int, as_json: bool) -> None:
    """Which process has which rank, local rank and GPUs."""
    from topologies.ranks import rank_table

    table = rank_table(nodes, gpus, gpus_per_process)
    if as_json:
        echo(json.dumps({"world_size": len(table), "ranks": [row._asdict() for row in table]}, indent=2))
        return
    echo(f"world size {len(table)}\nrank  node  local rank  GPUs")
    for row in table:
        echo(f"{row.rank:<5} {row.node:<5} {row.local_rank:<11} {', '.join(map(str, row.gpus))}")
