"""The stages of a day with a GPU: commands of this program in the order of what they are worth."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from calibration.devices import Kind, class_of
from calibration.execute import room
from calibration.execute.limits import ready
from calibration.validation_set import SHIPPED, read_set, read_variants
from topologies.reading import UserError

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


def sets(kind: Kind) -> list[Path]:
    """Of real models, whose steps are measured."""
    return sorted(SETS.glob(f"{kind}-*.yaml"))


def refused(path: Path, kind: Kind, cluster: Path) -> dict[str, str]:
    """Variants of a set that cannot be executed on this machine, which a cluster file describes, and why not."""
    result = {}
    devices = read_set(str(path), (), cluster=str(cluster))[0].cluster.gpus
    for name in read_variants(str(path), devices):
        try:
            (job,) = read_set(str(path), (), [name], cluster=str(cluster))
            room([ready(job)], kind)
        except UserError as error:
            result[name] = str(error)
    return result


def stages(kind: Kind, devices: int, without: Mapping[Path, Collection[str]] = MappingProxyType({})) -> list[Stage]:
    """For so many devices of this machine: every strategy once, a quick profile, steps of real models beside their predictions, a
    full profile, and the steps by that. without: variants of sets that are left out.
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
    only = {path: _left(path, devices, without.get(path, ())) for path in sets(kind)}
    result += list(_steps(only, quick, cluster, seconds, "by the quick profile"))
    result.append(Stage("calibration", ("calibrate", "--output", PROFILE, *ranks, *calibration), FULL, once=WHOLE))
    return [*result, *_steps(only, PROFILE, cluster, seconds, "by the full profile")]


def _left(path: Path, devices: int, without: Collection[str]) -> list[str] | None:
    """Variants of a set without some; None: all of them."""
    return [name for name in read_variants(str(path), devices) if name not in without] if without else None


def _strategies(priced: tuple[str, ...], devices: int) -> Iterator[Stage]:
    """Each variant of the shipped set that fits so many devices, executed and compared with one process. priced: options by which
    it is, of files of the folder.
    """
    for name in read_variants(None, devices):
        output = f"smoke-{slug(name)}.json"
        command = ("validate", str(SHIPPED), "--only", name, "--seconds", "0.5", "--launches", "1", *priced, "--output", output)
        yield Stage(f"strategy {name}", command, SMOKE, priced[1::2])


def _steps(
    only: Mapping[Path, list[str] | None], profile: str, cluster: tuple[str, str], seconds: float, by: str
) -> Iterator[Stage]:
    """Step times, volumes and peak memory of real models. only: sets, and of those that are not whole the variants."""
    needs = tuple(dict.fromkeys((profile, cluster[1])))
    for path, names in only.items():
        if names == []:
            continue
        model = path.stem.partition("-")[2]
        stem = f"{model}-{Path(profile).stem}"
        files = ("--output", f"steps-{stem}.json", "--plot", f"steps-{stem}.png")
        chosen = tuple(word for name in names or () for word in ("--only", name))
        command = ("validate", str(path), *chosen, "--seconds", f"{seconds:g}", "--launches", "1", *cluster, "--profile", profile)
        yield Stage(f"steps of {model} {by}", (*command, *files), STEPS, needs)
