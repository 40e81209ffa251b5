"""`shardyard trace`."""

from __future__ import annotations

from typing import Any

import click

from reports.commands._common import job_options, job_with_found_plan, report_folder
from reports.terminal import echo

FORMATS = {
    "perfetto": "one file for ui.perfetto.dev",
    "kineto": "a file of each rank, as PyTorch's profiler writes them, for HTA",
    "chakra": "execution traces of every rank, for ASTRA-sim",
}


@click.command("trace", epilog="Example: shardyard trace --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --output out")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="perfetto",
    show_default=True,
    help="; ".join(f"{name}: {about}" for name, about in FORMATS.items()) + ".",
)
@click.option("--output", metavar="FOLDER", required=True, help="Where the files go.")
def command(job: str | None, form: str, output: str, **given: Any) -> None:
    """A simulated step as a trace for tools that read traces of real jobs; of ranks that are alike the first one's."""
    from reports.chakra import write_chakra
    from reports.kineto import write_kineto
    from reports.trace import write_trace
    from strategies.predict import simulate

    folder = report_folder(output, "--output")
    assert folder is not None
    read = job_with_found_plan(job, **given)
    timeline = simulate(read, fold=form != "chakra")
    if form == "chakra":
        paths = write_chakra(timeline, folder)
        echo(f"wrote {paths[0]} to {paths[-2].name}, and {paths[-1].name}")
        return
    if form == "kineto":
        for path in write_kineto(timeline, folder, "Half" if read.plan.precision == "fp16" else "BFloat16"):
            echo(f"wrote {path}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    echo(f"wrote {write_trace(timeline, folder / 'trace.json.gz')}")
