"""shardyard: how long is a training step, what does it move, what does it hold, and what would it cost to do it differently?

The front door: the command line (`shardyard --help`) and the public Python API. It imports the rooms and holds no logic of its
own.

>>> import shardyard
>>> job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"data_parallel": "zero1", "sequence": 4096})
>>> timeline = shardyard.simulate(job)
>>> summary = shardyard.summarise(timeline)
>>> summary.fits
True
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sim.prices import Prices, Profile
    from sim.summary import Summary, summarise
    from sim.timeline import Timeline
    from strategies.job import Job, read_job
    from topologies.hardware import Gpu
    from topologies.reading import UserError

__all__ = ["Job", "Summary", "Timeline", "UserError", "describe", "main", "read_job", "simulate", "summarise"]

_LAZY = {
    "Job": "strategies.job", "Summary": "sim.summary", "Timeline": "sim.timeline", "UserError": "topologies.reading",
    "read_job": "strategies.job", "summarise": "sim.summary",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `shardyard --help` is instant."""
    if name not in _LAZY:
        raise AttributeError(f"module 'shardyard' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def simulate(job: Job, *, fold: bool = True) -> Timeline:
    """Play one training step of `job`. fold=False gives every rank its own actor. Raises UserError for impossible jobs."""
    from sim.run import run
    from strategies.lower import lower

    program = lower(job.model, job.resolve())
    return run(program, job.cluster.topology(), _prices(job), fold=fold)


_PRICES: dict[tuple[str, Gpu], Prices] = {}


def _prices(job: Job) -> Prices:
    """Prices remember what they have worked out, so jobs share them."""
    from sim.prices import Prices

    profile, gpu = _profile(job), job.cluster.node.gpu
    known = _PRICES.get((profile.name, gpu))
    if known is None or known.profile != profile:
        known = _PRICES[profile.name, gpu] = Prices(profile, gpu)
    return known


def _profile(job: Job) -> Profile:
    from calibration.profiles import load_profile, profile_for

    return load_profile(job.profile) if job.profile else profile_for(job.cluster.node.gpu.name)


def describe(job: Job, command: str = "") -> dict[str, Any]:
    """The job's inputs, for people and reports."""
    from calibration.profiles import describe_profile

    plan = job.resolve()
    return {
        "name": job.name,
        "model": job.model.name,
        "parameters": job.model.parameters,
        "cluster": f"{job.cluster.nodes} × {job.cluster.name}",
        "gpu": job.cluster.node.gpu.name,
        "gpus": job.cluster.gpus,
        "gpus_per_node": job.cluster.node.gpus,
        "profile": describe_profile(_profile(job)),
        "plan": {
            **job.plan.model_dump(mode="json"), "dp": plan.dp, "sequence": plan.sequence, "global_batch": plan.global_batch,
            "accumulation": plan.microbatches, "layers_per_stage": list(plan.layers),
        },
        "ignored": list(job.ignored),
        "notes": list(job.notes),
        "hash": job.hash,
        "version": _version(),
        "command": command,
    }  # fmt: skip


def _version() -> str:
    try:
        return version("shardyard")
    except PackageNotFoundError:
        return "unknown"


def _print(renderable: Any) -> None:
    """To the terminal; lines are not broken when it is not one."""
    from rich.console import Console

    console = Console()
    console.width = console.width if console.is_terminal else 1000
    console.print(renderable)


class _Commands(click.Group):
    """A user's mistake is one line on stderr and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line."""
        from topologies.reading import UserError

        try:
            return super().main(*args, **kwargs)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
        except OSError as error:  # a full disk, a closed pipe
            click.echo(f"error: {error.filename or 'output'}: {error.strerror or error}", err=True)
        sys.exit(2)


def _options(command: Any) -> Any:
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="shardyard")
def main() -> None:
    """Simulate distributed training: step time, memory and communication of any plan on any cluster."""


@main.command("simulate")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")
@click.option("--report", metavar="FOLDER", help="Also write an HTML page, figures, CSV and a Perfetto trace.")
@click.option("--unfolded", is_flag=True, help="Give every rank its own actor (same answer, slower).")
def _simulate(job: str | None, as_json: bool, report: str | None, unfolded: bool, **given: Any) -> None:
    """Predict one training step of a job. The exit code is 2 when it runs out of memory."""
    from sim.summary import summarise
    from strategies.fixes import fixes
    from strategies.job import read_job

    asked = read_job(job, **given)
    folder = _folder(report)
    timeline = simulate(asked, fold=not unfolded)
    summary, inputs = summarise(timeline), describe(asked, shlex.join(["shardyard", *sys.argv[1:]]))
    if not summary.fits:
        inputs["fixes"] = [str(fix) for fix in fixes(asked, summary, lambda changed: summarise(simulate(changed)))]
    if as_json:
        click.echo(json.dumps({"job": inputs, **summary.to_dict()}, indent=2))
    else:
        from reports.tables import one_screen

        _print(one_screen(summary, inputs))
        if asked.ignored:
            click.echo(f"not used from the model's file: {', '.join(asked.ignored)}")
        for note in asked.notes:
            click.echo(note)
    if folder:
        from reports.page import write_report

        paths = write_report(folder, timeline, summary, inputs)
        click.echo(f"wrote {', '.join(str(path) for path in paths)}", err=as_json)
    if not summary.fits:
        sys.exit(2)


def _folder(report: str | None) -> Path | None:
    """The folder of a report, refused before any work is done."""
    if report is None:
        return None
    from topologies.reading import UserError

    if not report or (Path(report).exists() and not Path(report).is_dir()):
        raise UserError(f"--report {report!r}: must name a folder, and no file")
    return Path(report)


@main.command("compare")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB.yaml…")
@_options
@click.option(
    "--also", "variants", multiple=True, metavar="FIELD=VALUE[,…]", help="Add a variant of the first job: 'plan.tp=4,plan.pp=2'."
)
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON with stable keys.")
def _compare(jobs: tuple[str, ...], as_json: bool, variants: tuple[str, ...], overrides: tuple[str, ...], **given: Any) -> None:
    """Several jobs side by side: what differs, and what it does. The exit code is 2 when none fits in memory."""
    from sim.summary import summarise
    from strategies.job import read_job

    asked = [read_job(job, overrides, **given) for job in jobs]
    apart = re.compile(r",(?![^\[{]*[\]}])")  # commas, but not those inside a list
    asked += [read_job(jobs[0], (*overrides, *apart.split(variant)), name=variant, **given) for variant in variants]
    rows = [(job.name, summarise(simulate(job)), describe(job)) for job in asked]
    if as_json:
        click.echo(json.dumps([{"job": inputs, **summary.to_dict()} for _, summary, inputs in rows], indent=2))
    else:
        from reports.tables import comparison

        _print(comparison(rows))
    if not any(summary.fits for _, summary, _ in rows):
        sys.exit(2)


@main.command("advise")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the candidates as JSON with stable keys.")
def _advise(job: str | None, as_json: bool, **given: Any) -> None:
    """Which way to train a model on a cluster: the usual candidates simulated, the fastest that fits first."""
    from sim.summary import summarise
    from strategies.advise import advise
    from strategies.job import read_job

    asked = read_job(job, **given)
    found = advise(asked, lambda changed: summarise(simulate(changed)))
    if as_json:
        rows = [{"name": one.name, "changes": one.changes, **one.summary.to_dict()} for one in found.candidates]
        click.echo(json.dumps({"questions": dict(found.questions), "candidates": rows}, indent=2))
    else:
        from reports.advice import advice

        _print(advice(found, asked.model.name, f"{asked.cluster.nodes} × {asked.cluster.name}"))
    if found.best is None:
        sys.exit(2)


@main.command("server")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@_options
@click.option("--servers", type=int, default=1, show_default=True, help="Parameter servers, beside the GPUs of the last nodes.")
@click.option("--staleness", default="sync", show_default=True, help="sync, async, or how many steps workers may run ahead.")
@click.option("--steps", type=int, default=100, show_default=True, help="Steps of every worker.")
@click.option("--jitter", type=float, default=0.1, show_default=True, help="Of compute times: standard deviation over mean.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random compute times.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")
def _server(
    job: str | None, servers: int, staleness: str, steps: int, jitter: float, seed: int, as_json: bool, **given: Any
) -> None:
    """Train with parameter servers for many steps: throughput, staleness of gradients, what limits."""
    from strategies.job import read_job
    from strategies.servers import parameter_servers

    asked = read_job(job, **given)
    answer = parameter_servers(asked, _prices(asked), servers, staleness, steps, jitter, seed)
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=2))
    else:
        from reports.servers import overview

        _print(overview(answer, f"{asked.model.name} on {asked.cluster.nodes} × {asked.cluster.name}"))
    if not answer.fits:
        sys.exit(2)


@main.command("collective")
@click.argument("operation")
@click.option("--cluster", default="dgx-h100", show_default=True, help="Name from the catalogue or YAML.")
@click.option("--nodes", type=int, help="Number of nodes.")
@click.option("--ranks", type=int, help="Only the first so many GPUs.")
@click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU.")
@click.option("--algorithm", default="auto", show_default=True, help="Algorithm and protocol: ring, ring/ll128, auto/simple.")
@click.option("--sizes", default="1KiB:1GiB", show_default=True, metavar="FROM:TO[:FACTOR]", help="Sizes of the full buffer.")
@click.option("--measured", metavar="LOG", help="Compare with a log or JSON of nccl-tests.")
@click.option("--plot", metavar="FILE", help="Draw time and bandwidth against size, as PNG or SVG.")
@click.option("--by-ranks", metavar="FILE", help="Instead draw its time against the number of ranks, up to all of the cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")
def _collective(operation: str, plot: str | None, by_ranks: str | None, as_json: bool, **asked: Any) -> None:
    """Time, algbw and busbw of a collective by algorithm, protocol and size; the cheapest is what a job uses."""
    from calibration.bench import bench

    if by_ranks:
        _growth(operation, by_ranks, as_json, **asked)
        return

    data, notes = bench(operation, **asked)
    if as_json:
        click.echo(json.dumps(data.to_dict() | {"where": data.where, "notes": notes}, indent=2))
    else:
        from reports.busbw import comparison, table

        _print(table(data))
        if data.measured:
            _print(comparison(data))
        for note in notes:
            click.echo(note)
    if plot:
        from reports.busbw import busbw

        click.echo(f"wrote {busbw(data, Path(plot))}", err=as_json)


def _growth(operation: str, file: str, as_json: bool, ranks: int | None, measured: str | None, **asked: Any) -> None:
    from calibration.bench import by_ranks
    from topologies.reading import UserError

    if ranks or measured:
        raise UserError("--by-ranks: takes neither --ranks nor --measured")
    from reports.scaling import Growth, scaling

    title, lines = by_ranks(operation, **asked)
    if as_json:
        click.echo(json.dumps({name: dict(points) for name, points in lines.items()}, indent=2))
    click.echo(f"wrote {scaling(Growth(title, lines), Path(file))}", err=as_json)


@main.command("list")
@click.argument("sort", required=False)
def _list(sort: str | None) -> None:
    """Names that can be used: models, clusters, gpus, wirings, fabrics, readers, profiles, schedules, algorithms, …"""
    catalogues = _catalogues()
    if sort is None:
        for name, names in catalogues.items():
            click.echo(f"{name}: {', '.join(names())}")
        return
    if sort not in catalogues:
        from topologies.reading import UserError, nearest

        raise UserError(f"unknown list '{sort}'{nearest(sort, catalogues)}")
    for name in catalogues[sort]():
        click.echo(name)


def _catalogues() -> dict[str, Any]:
    from calibration.profiles import profile_names
    from reports.metrics import metric_names
    from sim.collectives import algorithms
    from strategies.data_parallel import hooks
    from strategies.model import model_names
    from strategies.schedules import schedules
    from topologies.board import wirings
    from topologies.cluster import cluster_names, gpu_names
    from topologies.fabric import fabrics
    from topologies.readers import readers

    return {
        "models": model_names, "clusters": cluster_names, "gpus": gpu_names, "profiles": profile_names,
        "schedules": lambda: list(schedules), "data_parallel": lambda: list(hooks), "algorithms": lambda: list(algorithms),
        "metrics": metric_names, "wirings": lambda: list(wirings), "fabrics": lambda: list(fabrics),
        "readers": lambda: list(readers),
    }  # fmt: skip


@main.command("schedule")
@click.argument("name", metavar="NAME_OR_CSV")
@click.option("--pp", type=click.IntRange(1), help="Number of pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(1), help="Microbatches in a step.")
@click.option("--chunks", type=click.IntRange(1), help="Virtual stages of each rank, for schedules that interleave.")
@click.option("--csv", "file", metavar="FILE", help="Write it as PyTorch's CSV instead: torch.distributed.pipelining loads it.")
def _schedule(name: str, pp: int | None, microbatches: int | None, chunks: int | None, file: str | None) -> None:
    """The order in which each rank of a pipeline runs its passes: stage, F B I W, microbatch; one line per rank."""
    from strategies.schedule_file import cells, text_table, write_schedule

    rows, notes = cells(name, pp, microbatches, chunks)
    if file:
        click.echo(f"wrote {write_schedule(rows, Path(file), name)}")
    else:
        click.echo(text_table(rows))
    for note in notes:
        click.echo(note)


@main.command("topology")
@click.argument("cluster", metavar="NAME_OR_FILE")
@click.option("--gpu", help="Which GPU it is, where the file does not say: a name from the catalogue.")
@click.option("--nodes", type=int, help="Number of nodes.")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field, e.g. node.nic='400 Gb/s'.")
@click.option("--draw", metavar="FILE", help="Also draw it, as PNG or SVG; at most 64 GPUs.")
def _topology(cluster: str, gpu: str | None, nodes: int | None, overrides: tuple[str, ...], draw: str | None) -> None:
    """What a cluster consists of and how it is wired.

    NAME_OR_FILE is a name from the catalogue, YAML, or the output of `nvidia-smi topo -m`, NCCL's topology dump, Slurm's
    topology.conf; several are joined by "+", as in dgx-h100+topology.conf.
    """
    from reports.topology import overview
    from reports.topology import topology as drawing
    from strategies.job import parse_changes
    from topologies.cluster import load_cluster
    from topologies.reading import UserError

    if draw and not draw.endswith((".png", ".svg")):
        raise UserError(f"--draw {draw}: expected a name that ends in .png or .svg")
    described = load_cluster(cluster, nodes, parse_changes([*([f"node.gpu={gpu}"] if gpu else []), *overrides]))
    _print(overview(described))
    if draw:
        click.echo(f"wrote {drawing(described, Path(draw))}")


@main.command("explain")
@click.argument("name")
def _explain(name: str) -> None:
    """What a metric, a field of a plan, a schedule or a strategy means, with its source."""
    from reports.glossary import explain

    click.echo(explain(name))


@main.command("ranks")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@click.option("--gpus", type=int, default=8, show_default=True, help="GPUs of a node.")
@click.option("--gpus-per-process", type=int, default=1, show_default=True, help="GPUs that one process drives.")
def _ranks(nodes: int, gpus: int, gpus_per_process: int) -> None:
    """Which process has which rank, local rank and GPUs."""
    from topologies.ranks import rank_table

    table = rank_table(nodes, gpus, gpus_per_process)
    click.echo(f"world size {len(table)}\nrank  node  local rank  GPUs")
    for row in table:
        click.echo(f"{row.rank:<5} {row.node:<5} {row.local_rank:<11} {', '.join(map(str, row.gpus))}")


if __name__ == "__main__":
    main()
