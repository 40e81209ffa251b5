"""The stages of a day with a GPU: commands of this program in the order of what they are worth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from calibration.devices import Kind, class_of
from calibration.validation_set import SHIPPED, read_variants

SETS = Path(__file__).parent
CLUSTER = "cluster.yaml"  # the machine as a cluster, in the folder
PROFILE = "profile.yaml"
SMOKE, FULL, STEPS = 150.0, 900.0, 400.0  # seconds that a strategy, a calibration and a set of steps may take
QUICK, WHOLE = 240.0, 600.0  # seconds after which a calibration measures nothing a second time


@dataclass(frozen=True)
class Stage:
    """A command, and how long it may take. needs: files of the folder without which it cannot begin; once: seconds after which a
    calibration measures nothing a second time, less where less is left (`command` does not say it: it is the same stage).
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    once: float = 0.0

    @property
    def slug(self) -> str:
        """Its name as the name of a file."""
        return slug(self.name)


def slug(name: str) -> str:
    """A name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def stages(kind: Kind, devices: int) -> list[Stage]:
    """For so many devices of this machine: every strategy once, a quick profile, steps of real models beside their predictions, a
    full profile, and the steps by that.
    """
    gpus = class_of(kind).ordered
    seconds = 10.0 if gpus else 0.5
    quick = "quick-profile.yaml"
    cluster = ("--cluster", CLUSTER) if gpus else ("--cluster", "quick-profile.cluster.yaml")
    calibration = ("--cluster", CLUSTER) if gpus else ()
    ranks = ("--ranks", str(devices))
    first = Stage("quick calibration", ("calibrate", "--quick", "--output", quick, *ranks, *calibration), FULL, once=QUICK)
    strategies = list(_strategies((*cluster, *(() if gpus else ("--profile", quick))), devices))
    result = [*strategies, first] if gpus else [first, *strategies]  # cores are described by what is measured
    result += list(_steps(kind, quick, cluster, seconds, "by the quick profile"))
    result.append(Stage("calibration", ("calibrate", "--output", PROFILE, *ranks, *calibration), FULL, once=WHOLE))
    return [*result, *_steps(kind, PROFILE, cluster, seconds, "by the full profile")]


def _strategies(priced: tuple[str, ...], devices: int) -> Iterator[Stage]:
    """Each variant of the shipped set that fits so many devices, executed and compared with one process. priced: options by which
    it is, of files of the folder.
    """
    for name in read_variants(None, devices):
        output = f"smoke-{slug(name)}.json"
        command = ("validate", str(SHIPPED), "--only", name, "--seconds", "0.5", "--launches", "1", *priced, "--output", output)
        yield Stage(f"strategy {name}", command, SMOKE, priced[1::2])


def _steps(kind: Kind, profile: str, cluster: tuple[str, str], seconds: float, by: str) -> Iterator[Stage]:
    """Step times, volumes and peak memory of real models."""
    needs = tuple(dict.fromkeys((profile, cluster[1])))
    for path in sorted(SETS.glob(f"{kind}-*.yaml")):
        stem = f"{path.stem.partition('-')[2]}-{Path(profile).stem}"
        files = ("--output", f"steps-{stem}.json", "--plot", f"steps-{stem}.png")
        command = ("validate", str(path), "--seconds", f"{seconds:g}", "--launches", "1", *cluster, "--profile", profile, *files)
        yield Stage(f"steps of {path.stem.partition('-')[2]} {by}", command, STEPS, needs)
