"""`shardyard execute`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from reports.commands._common import AS_JSON, job_options, show, write_json


@click.command("execute")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--seconds", type=click.FloatRange(0, 3600), default=5.0, show_default=True, help="How long to time steps, about; 0: do not."
)
@click.option("--output", metavar="FILE.json", help="Also write everything that was measured, with its provenance.")
@click.option("--print-launch", type=click.Choice(["local", "slurm", "k8s"]), help="Only print how to start this on a cluster.")
@AS_JSON
def command(job: str | None, seconds: float, output: str | None, print_launch: str | None, as_json: bool, **given: Any) -> None:
    """Carry out a job with PyTorch on this machine: check it against one process, time it, count bytes sent and held.

    A cluster without GPUs, such as cpu-gloo, runs as processes over gloo, others over NCCL. Under torchrun: all its ranks.
    """
    from calibration.validate import validate
    from strategies.job import read_job

    asked = read_job(job, **given)
    if print_launch:
        from calibration.launch_text import launch_text

        words = [word for word in sys.argv[1:] if word not in ("--print-launch", print_launch, f"--print-launch={print_launch}")]
        click.echo(launch_text(print_launch, words, asked.cluster.nodes, asked.cluster.node.gpus))
        return
    done = validate([asked], seconds)
    if not done:
        return
    answer = done[0].to_dict()
    if output:
        write_json(output, answer)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from reports.execution import execution

    show(execution(done[0]))
    if output:
        click.echo(f"wrote {output}")
