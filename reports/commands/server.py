"""`shardyard server`."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import AS_JSON, figure_option, job_options, report_folder, show
from reports.terminal import echo

if TYPE_CHECKING:
    from reports.page.parameter_servers import ServerReport
    from sim.analysis.summary import Summary
    from strategies.job import Job
    from strategies.lowering.parameter_servers import Answer


@click.command(
    "server", epilog="Example: shardyard server --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --servers 2 --staleness async"
)
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option("--servers", type=int, default=1, show_default=True, help="Parameter servers, beside the GPUs of the last nodes.")
@click.option("--staleness", default="sync", show_default=True, help="sync, async, or how many steps workers may run ahead.")
@click.option("--steps", type=int, default=100, show_default=True, help="Steps of every worker.")
@click.option(
    "--jitter", type=float, default=0.1, show_default=True, help="Jitter of compute times: standard deviation over mean."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random compute times.")
@click.option("--embedding", multiple=True, metavar="ROWSxWIDTH:LOOKUPS", help="A table on the servers; may be repeated.")
@click.option("--embedding-type", default="fp32", show_default=True, help="Number type of tables: fp32, bf16 or fp16.")
@click.option(
    "--embedding-optimizer",
    default="rowwise_adagrad",
    show_default=True,
    help="Optimizer of tables: rowwise_adagrad, adagrad or sgd.",
)
@figure_option("--plot", "Draw throughput and staleness, as PNG or SVG.")
@click.option("--report", metavar="FOLDER", help="Also write a page: other staleness, other numbers of servers, all-reduce.")
@AS_JSON
def command(
    job: str | None,
    servers: int,
    staleness: str,
    steps: int,
    jitter: float,
    seed: int,
    embedding: tuple[str, ...],
    embedding_type: str,
    embedding_optimizer: str,
    plot: str | None,
    report: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train with parameter servers for many steps: throughput, staleness of gradients, what limits."""
    from strategies.lowering.embeddings import Embeddings, tables_of
    from strategies.lowering.parameter_servers import parameter_servers
    from strategies.predict import prices_of
    from strategies.read_job import stated_job
    from topologies.reading import UserError

    folder, asked = report_folder(report), stated_job(job, **given)
    if asked.auto and asked.auto.asked:
        raise UserError(f"{asked.where}: auto: parameter servers are a way to train by themselves: say the plan's fields")
    tables = Embeddings(tables_of(embedding), embedding_type, embedding_optimizer) if embedding else None
    if tables is None and (embedding_type, embedding_optimizer) != (Embeddings.precision, Embeddings.optimizer):
        raise UserError("--embedding-type and --embedding-optimizer describe tables: say which, as --embedding 100000000x128:20")
    answer = parameter_servers(asked, prices_of(asked), servers, staleness, steps, jitter, seed, tables)
    reduced = _reduced(asked, answer) if folder or not as_json else None
    if as_json:
        echo(json.dumps(answer.to_dict(), indent=2))
    else:
        from reports.tables.parameter_servers import overview

        show(overview(answer, f"{asked.model.name} on {asked.cluster.nodes} × {asked.cluster.name}", reduced))
    if plot:
        from pathlib import Path

        from reports.figures.staleness import staleness as draw

        echo(f"wrote {draw({staleness: answer}, Path(plot))}", err=as_json)
    if folder:
        from reports.page.parameter_servers import write_server_report

        paths = write_server_report(folder, _report(asked, answer, reduced, staleness, steps, jitter, seed))
        echo(f"wrote {', '.join(str(path) for path in paths)}", err=as_json)
    if not answer.fits:
        sys.exit(2)


def _report(
    job: Job, answer: Answer, reduced: Summary | None, staleness: str, steps: int, jitter: float, seed: int
) -> ServerReport:
    """The answer beside other staleness, other numbers of servers on the same nodes, and all-reduce on the workers' GPUs."""
    from reports.inputs import describe
    from reports.page.parameter_servers import ServerReport
    from strategies.lowering.parameter_servers import parameter_servers
    from strategies.predict import prices_of

    def ask(servers: int, how: str) -> Answer:
        return (
            answer
            if (servers, how) == (answer.servers, staleness)
            else parameter_servers(job, prices, servers, how, steps, jitter, seed, answer.embeddings)
        )

    prices, each = prices_of(job), job.cluster.node.gpus
    nodes = _nodes(job, answer)
    by_staleness = {how: ask(answer.servers, how) for how in dict.fromkeys(("sync", "1", "4", "async", staleness))}
    numbers = sorted({answer.servers, *(2**power for power in range(10) if -(-(2**power) // each) == nodes)})
    inputs = describe(job, shlex.join(["shardyard", *sys.argv[1:]]))
    inputs |= {"servers": answer.servers, "staleness": staleness, "steps": steps, "jitter": jitter, "seed": seed}
    by_servers = {str(number): ask(number, staleness) for number in numbers}
    return ServerReport(f"{job.model.name} on {inputs['cluster']}", inputs, answer, by_staleness, by_servers, reduced)


def _nodes(job: Job, answer: Answer) -> int:
    """Of the servers."""
    return -(-answer.servers // job.cluster.node.gpus)


def _reduced(job: Job, answer: Answer) -> Summary | None:
    """All-reduce on the workers' GPUs; None where that is no job, as with a batch that they cannot share, or with tables, which
    GPUs do not hold.
    """
    from dataclasses import replace

    from strategies.predict import predict
    from topologies.reading import UserError

    nodes = _nodes(job, answer)
    if answer.embeddings is not None:
        return None
    try:
        return predict(replace(job, cluster=job.cluster.model_copy(update={"nodes": job.cluster.nodes - nodes})))
    except UserError:
        return None
