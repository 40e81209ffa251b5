"""`python -m calibration.gpu_day --output FOLDER --minutes N`, which `make gpu` calls."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

from calibration.devices import Kind, device, unseen
from calibration.gpu_day import report, run
from calibration.gpu_day.stages import CLUSTER, refused, sets, stages
from calibration.launch.place import find_device
from calibration.machine import catalogue_gpu, describe, own_part, part_of
from sim.pricing.profile_file import yaml_text
from topologies.documents.writing import write_whole
from topologies.reading import UserError

ENDING = (signal.SIGTERM, signal.SIGHUP)  # of a scheduler whose time is over, and of a connection that is lost
SAID = (("nvidia-smi.txt", ("nvidia-smi", "-q")), ("topology.txt", ("nvidia-smi", "topo", "-m")))


@click.command()
@click.option("--output", default="out/gpu", show_default=True, type=click.Path(path_type=Path), help="The folder.")
@click.option("--minutes", default=30.0, show_default=True, type=click.FloatRange(0.1, 1440), help="How long, at most.")
@click.option("--devices", default=0, help="How many GPUs (or cores); by default all that torch finds.")
@click.option("--cluster", "own", help="YAML of a machine whose GPU, or how many of it are wired, the catalogue does not know.")
def main(output: Path, minutes: float, devices: int, own: str | None) -> None:
    """Measure this machine's GPUs, execute every strategy, and compare with predictions. Interrupted, it goes on."""
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # not with nohup
            signal.signal(number, _end)
    try:
        kind = find_device()
        here = device(kind)
        if not here.ordered and (why := unseen()):
            raise UserError(why)
        if not 0 <= devices <= here.count():
            raise UserError(f"--devices {devices}: this machine has {here.count()}")
        count = devices or here.count()
        output.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = dict(here.facts()) | describe(kind, count) | {"devices": count}
        write_whole(output / "machine.json", json.dumps(facts, indent=1) + "\n")
        without: dict[Path, Collection[str]] = {}
        if here.ordered:
            described = own_part(own, count, kind) if own else part_of(_found(here.facts()), count)
            write_whole(output / CLUSTER, yaml_text(described))
            _ask(output)
            without = _left_out(kind, output / CLUSTER)
        elif own:
            raise UserError(f"--cluster {own}: this machine has no GPUs, and its cores are described by what is measured")
        done = run(stages(kind, count, without), output, 60 * minutes, click.echo)
        write_whole(output / "README.md", report(output, facts, done))
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(f"wrote {output / 'README.md'}")


def _found(facts: Mapping[str, Any]) -> str:
    return catalogue_gpu(str(facts["name"]), float(facts["memory"]))


def _left_out(kind: Kind, cluster: Path) -> dict[Path, Collection[str]]:
    """Variants of each set that this machine cannot execute: said, and left out."""
    result: dict[Path, Collection[str]] = {}
    for path in sets(kind):
        result[path] = reasons = refused(path, kind, cluster)
        for name, why in reasons.items():
            click.echo(f"steps of {path.stem}: {name} is left out: {why}")
    return result


def _end(number: int, _: FrameType | None) -> None:
    """As Ctrl-C does: the stage that runs is ended, and keeps what it has."""
    sys.exit(128 + number)


def _ask(output: Path) -> None:
    """What the driver says of the machine, as it says it."""
    for file, command in SAID:
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            write_whole(output / file, said)


if __name__ == "__main__":
    main()
