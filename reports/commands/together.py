"""`shardyard together`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from reports.commands._common import AS_JSON, show
from reports.terminal import echo


@click.command("together", epilog="Example: shardyard together first.yaml second.yaml")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB.yaml JOB.yaml …")
@click.option("--on", multiple=True, metavar="TEXT", help="Where each job is, e.g. 'nodes 0-3'; by default one behind the other.")
@click.option("--cluster", help="What the jobs share: name or YAML; by default what they describe, with their nodes together.")
@click.option("--nodes", type=click.IntRange(1), help="Number of its nodes.")
@click.option("--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="Steps of each job at least.")
@click.option("--ideal", is_flag=True, help="GPUs of one kind are all alike.")
@AS_JSON
def command(
    jobs: tuple[str, ...], on: tuple[str, ...], cluster: str | None, nodes: int | None, steps: int, ideal: bool, as_json: bool
) -> None:
    """How much jobs on one cluster, each on GPUs of its own, slow each other down: their traffic shares the network."""
    from strategies.read_job import read_job
    from strategies.together import shared_cluster, together
    from topologies.cluster_files import load_cluster

    asked = [read_job(job, variability=0.0 if ideal else None) for job in jobs]
    whole = load_cluster(cluster, nodes) if cluster else shared_cluster(asked, nodes)
    answer = together(asked, on, whole, steps)
    if as_json:
        rows = [{**asdict(job), "together": job.together, "slowdown": job.slowdown} for job in answer]
        echo(json.dumps({"cluster": whole.described, "gpus": whole.gpus, "jobs": rows}, indent=2))
        return
    from reports.tables.together import table

    show(table(whole.described, answer))
