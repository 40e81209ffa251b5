"""`shardyard execute`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import AS_JSON, check_files, job_options, job_with_found_plan, show, timeout_option, write_json
from reports.terminal import echo

if TYPE_CHECKING:
    from strategies.job import Job


@click.command("execute", epilog="Example: shardyard execute job.yaml --cluster cpu-gloo")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--seconds", type=click.FloatRange(0, 3600), default=5.0, show_default=True, help="How long to time steps, about; 0: do not."
)
@click.option("--servers", type=int, help="Parameter servers among the processes, the last ones; timed over --steps.")
@click.option("--staleness", help="With --servers: sync, async, or how many steps workers may run ahead.  [default: sync]")
@click.option("--steps", type=click.IntRange(1, 100_000), help="With --servers: steps of every worker.  [default: 10]")
@click.option("--output", metavar="FILE.json", help="Also write everything that was measured, with its provenance.")
@click.option("--print-launch", type=click.Choice(["local", "slurm", "k8s"]), help="Only print how to start this on a cluster.")
@AS_JSON
@timeout_option
def command(
    job: str | None,
    seconds: float,
    servers: int | None,
    staleness: str | None,
    steps: int | None,
    output: str | None,
    print_launch: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Carry out a job with PyTorch on this machine: check it against one process, time it, count bytes sent and held.

    A cluster without GPUs, such as cpu-gloo, runs as processes over gloo, others over NCCL. Under torchrun: all its ranks.
    """
    from topologies.reading import UserError

    if servers is None and (staleness is not None or steps is not None):
        raise UserError("--staleness and --steps need --servers")
    asked = job_with_found_plan(job, **given)
    if print_launch:
        from calibration.launch.instructions import launch_text

        words = [word for word in sys.argv[1:] if word not in ("--print-launch", print_launch, f"--print-launch={print_launch}")]
        echo(launch_text(print_launch, words, asked.cluster.nodes, asked.cluster.node.gpus, asked.cluster.node.gpu.sms > 0))
        return
    check_files(output=output)
    result = _trained(asked, seconds) if servers is None else _served(asked, servers, staleness or "sync", steps or 10)
    if result is None:  # another rank of a launcher answers
        return
    answer, screen = result
    if as_json:
        echo(json.dumps(answer, indent=2))
    else:
        show(screen)
    if output:
        write_json(output, answer)
        echo(f"wrote {output}", err=as_json)


def _trained(job: Job, seconds: float) -> tuple[Any, Any] | None:
    from calibration.validate import validate
    from reports.tables.execution import execution

    done = validate([job], seconds)
    return (done[0].to_dict(), execution(done[0])) if done else None


def _served(job: Job, servers: int, staleness: str, steps: int) -> tuple[Any, Any] | None:
    from calibration.execute.servers import serve
    from reports.tables.execution import served

    done = serve(job, servers, staleness, steps)
    return (done.to_dict(), served(done)) if done else None
