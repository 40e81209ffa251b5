"""`shardyard topology`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, figure_option, show
from reports.terminal import echo


@click.command("topology", epilog="Example: shardyard topology dgx-h100 --nodes 2")
@click.argument("cluster", metavar="NAME_OR_FILE")
@click.option("--gpu", help="Which GPU it is, where the file does not say: a name from the catalogue.")
@click.option("--nodes", type=int, help="Number of nodes.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field, e.g. node.nic='400 Gb/s'.")
@figure_option("--draw", "Also draw it, as PNG or SVG; at most 64 GPUs.")
@AS_JSON
def command(
    cluster: str, gpu: str | None, nodes: int | None, overrides: tuple[str, ...], draw: str | None, as_json: bool
) -> None:
    """What a cluster consists of and how it is wired.

    NAME_OR_FILE is a name from the catalogue, YAML, or the output of `nvidia-smi topo -m`, NCCL's topology dump, Slurm's
    topology.conf; several are joined by "+", as in dgx-h100+topology.conf.
    """
    from reports.figures.topology import topology as drawing
    from reports.tables.topology import as_data, overview
    from strategies.overrides import parse_changes
    from topologies.cluster_files import load_cluster

    described = load_cluster(cluster, nodes, parse_changes([*([f"node.gpu={gpu}"] if gpu else []), *overrides]))
    drawn = drawing(described, Path(draw)) if draw else None  # first: what is too large to draw is one line
    if as_json:
        echo(json.dumps(as_data(described), indent=2))
    else:
        show(overview(described))
    if drawn:
        echo(f"wrote {drawn}", err=as_json)
