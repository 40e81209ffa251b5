"""`shardyard calibrate`."""

from __future__ import annotations

import json
import time
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands import end_interrupted
from reports.commands._common import AS_JSON, show, timeout_option
from reports.terminal import echo

if TYPE_CHECKING:
    from calibration.request import Request, Result


@click.command("calibrate", epilog="Example: shardyard calibrate --output mine.yaml --quick")
@click.option("--output", required=True, metavar="PROFILE.yaml", help="The profile to write; its samples and plot lie beside it.")
@click.option("--quick", is_flag=True, help="Two minutes instead of a quarter of an hour: fewer sizes and rounds.")
@click.option(
    "--ranks",
    type=int,
    default=0,
    help="Processes; by default one per GPU, or per core. With --from: of a log that does not say.",
)
@click.option(
    "--cluster",
    help="Hardware that is measured: a name of the catalogue or YAML; by default found by the GPU's name, and a "
    "CPU is described by its best rates, in a file beside the profile.",
)
@click.option("--profile", help="Prices of what is not measured; by default those shipped for this hardware.")
@click.option(
    "--parts", default="", metavar="A,B", help="Only these: gemm, attention, memory, optimizer, launch, copy, collective, …"
)
@click.option("--largest", default="", metavar="SIZE", help="Largest collective, e.g. 64MiB; by default as memory allows.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="When they are over, nothing is measured a second time: what is there is fitted to.",
)
@click.option("--samples", metavar="FILE", help="Where samples are kept and resumed from.")
@click.option(
    "--from",
    "logs",
    multiple=True,
    metavar="LOG",
    help="Measure nothing: fit to logs or JSON of nccl-tests, profiler "
    "traces (one per rank), or a file of samples. May be repeated.",
)
@click.option("--collective", default="", metavar="NAME", help="With --from: of logs that do not name it, e.g. all_reduce.")
@click.option("--print-launch", type=click.Choice(["local", "slurm", "k8s"]), help="Only print how to start this on a cluster.")
@click.option("--nodes", type=int, default=1, show_default=True, help="For --print-launch.")
@AS_JSON
@timeout_option
def command(logs: tuple[str, ...], print_launch: str | None, nodes: int, as_json: bool, **given: Any) -> None:
    """Measure this machine (or read logs) and fit a profile of prices. Under torchrun: all its ranks. Interrupted, it resumes."""
    from calibration.calibrate import calibrate
    from calibration.from_logs import from_logs

    request = _request(given)
    if print_launch:
        echo(_launch(request, print_launch, nodes, _words(given)))
        return
    if nodes != 1:
        from topologies.reading import UserError

        raise UserError("--nodes: only says what --print-launch prints; the ranks of a launcher know their nodes")
    if request.collective and not logs:
        from topologies.reading import UserError

        raise UserError("--collective: says what logs are of; give them with --from")
    if logs:
        _answer(from_logs(request, [Path(path) for path in logs]), request, as_json)
        return
    try:
        with _progress(as_json) as hear:
            result = calibrate(request, hear)
    except KeyboardInterrupt as error:
        end_interrupted(error, f"samples are kept in {request.journal}; the same command goes on from there")
    if result:
        _answer(result, request, as_json)


def _launch(request: Request, how: str, nodes: int, words: list[str]) -> str:
    """How to start this on a cluster; a rank has a GPU unless --cluster has none."""
    from calibration.launch.instructions import launch_text
    from topologies.cluster_files import load_cluster
    from topologies.reading import UserError

    if request.ranks < 1 or nodes < 1:
        raise UserError("--print-launch: needs --ranks, the processes of each node, and at least one of --nodes")
    gpus = request.cluster is None or load_cluster(request.cluster).node.gpu.sms > 0
    return launch_text(how, words, nodes, request.ranks, gpus)


def _words(given: dict[str, Any]) -> list[str]:
    """This command as every rank runs it; how many ranks there are, the launcher says."""
    from calibration.launch.place import PATIENCE, PATIENT

    waits = PATIENCE.get()
    words = ["calibrate", *([] if waits == PATIENT else ["--timeout", f"{waits:g}"])]
    for name, value in given.items():
        if value and name != "ranks":
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def _request(given: dict[str, Any]) -> Request:
    from calibration.request import PARTS, Request
    from topologies.documents.units import size
    from topologies.reading import UserError

    try:
        largest = size(given["largest"]) if given["largest"] else 0.0
    except ValueError as error:
        raise UserError(f"--largest {given['largest']}: {error}") from None
    until = time.monotonic() + 60 * given["minutes"] if given["minutes"] else inf
    parts = tuple(part.strip() for part in given["parts"].split(",")) if given["parts"] else PARTS
    samples = Path(given["samples"]) if given["samples"] else None
    return Request(
        Path(given["output"]),
        given["quick"],
        given["ranks"],
        parts,
        given["cluster"],
        given["profile"],
        samples,
        largest,
        given["collective"],
        until,
    )


def _progress(quiet: bool) -> Any:
    """A bar with the time left; what the session tells moves it."""
    from reports.tables.calibration import progress

    return progress(quiet)


def _answer(result: Result, request: Request, as_json: bool) -> None:
    from reports.figures.calibration import calibration
    from reports.tables.calibration import accuracy, to_dict

    plot = request.output.with_suffix(".png")
    if result.fitted.points:
        calibration(result.fitted, plot)
    if as_json:
        echo(json.dumps(to_dict(result), indent=2))
    else:
        show(accuracy(result))
        for note in result.fitted.notes:
            echo(note)
    files = [*result.files, *([plot] if result.fitted.points else [])]
    echo(f"wrote {', '.join(str(path) for path in files)}", err=as_json)
