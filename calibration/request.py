"""What a calibration is asked for, and its result; requests that cannot work are refused before anything is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

from calibration.devices import Kind, class_of
from calibration.devices import device as compute_device
from calibration.fit.machine.parts import Fitted
from calibration.launch.launcher import under_launcher
from calibration.launch.place import available_cores
from calibration.machine import another_gpu, catalogue_gpu
from calibration.measure.layer_check import Check
from sim.pricing.shipped import load_profile
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.documents.writing import check_writable
from topologies.reading import UserError, nearest

PARTS = (
    "gemm",
    "attention",
    "memory",
    "optimizer",
    "launch",
    "copy",
    "collective",
    "overlap",
    "company",
    "variability",
    "wrapping",
    "footprint",
    "layer",
    "sustained",
)
AMONG = ("collective", "overlap", "company", "variability")  # parts that need more than one rank
NEEDED = "--parts: gemm and memory are needed to describe this machine; or give --cluster"


@dataclass(frozen=True)
class Request:
    """What is asked. cluster: whose hardware the prices are relative to; a CPU without one is described by its best rates.

    profile: where prices come from that are not measured. largest: bytes of a collective, 0: as the memory allows. until: by
    time.monotonic, when a case that was measured once is not measured again.
    """

    output: Path
    quick: bool = False
    ranks: int = 0
    parts: tuple[str, ...] = PARTS
    cluster: str | None = None
    profile: str | None = None
    samples: Path | None = None
    largest: float = 0.0
    collective: str = ""  # of logs that do not say
    until: float = inf

    @property
    def journal(self) -> Path:
        """The file of samples."""
        return self.samples or self.output.with_suffix(".samples.jsonl")

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.until - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether it is then."""
        return self.left <= 0


@dataclass
class Result:
    """What was made: the fit, how a real layer compares, and the files that were written."""

    fitted: Fitted
    cluster: Cluster
    layers: list[Check]
    files: list[Path]
    copies: dict[str, float]  # "pinned to device" -> bytes per second
    company: dict[str, float]  # of a kind of computation: its time while all ranks of a node compute over that while others wait


def check(request: Request) -> None:
    """Refuse what cannot work before anything is measured. Raises UserError."""
    unknown = sorted(set(request.parts) - set(PARTS))
    if unknown:
        raise UserError(f"--parts {','.join(request.parts)}: unknown part '{unknown[0]}'{nearest(unknown[0], PARTS)}")
    if request.output.suffix not in (".yaml", ".yml"):
        raise UserError(f"--output {request.output}: a profile is a .yaml file")
    check_writable("--output", request.output)
    if not request.parts:
        raise UserError("--parts: needs at least one")
    if request.ranks < 0:
        raise UserError(f"--ranks {request.ranks}: must be at least 1")
    if request.profile:
        load_profile(request.profile)
    if request.cluster:
        load_cluster(request.cluster)


def check_parts(request: Request, device: Kind, ranks: int) -> None:
    """Refuse what could be measured and not be fitted to."""
    lone = [part for part in AMONG if part in request.parts]
    if ranks == 1 and set(request.parts) <= set(AMONG):
        raise UserError(f"--parts {','.join(lone)}: needs at least 2 ranks, and there is 1")
    queued = class_of(device).ordered
    if not queued and not request.cluster and not {"gemm", "memory"} <= set(request.parts):
        raise UserError(NEEDED)
    if request.cluster and bool(load_cluster(request.cluster).node.gpu.sms) != queued:
        if not queued:
            raise UserError(f"--cluster {request.cluster}: has GPUs, and torch finds none on this machine")
        raise UserError(f"--cluster {request.cluster}: has no GPUs, and torch finds some here: CUDA_VISIBLE_DEVICES= hides them")
    if not queued:
        return
    if not request.cluster:  # refused now, and not when everything has been measured
        facts = compute_device(device).facts()
        catalogue_gpu(str(facts["name"]), float(facts["memory"]))
    elif another := another_gpu(load_cluster(request.cluster), device):
        raise UserError(f"--cluster {request.cluster}: {another}")


def ranks_of(request: Request, device: Kind) -> int:
    """As many as asked, or the launcher started, or one per GPU or core."""
    import os

    if under_launcher():
        world = os.environ["WORLD_SIZE"]
        if not world.isdecimal():
            raise UserError(f"environment: WORLD_SIZE={world!r}: must be a whole number")
        if request.ranks not in (0, int(world)):
            raise UserError(f"--ranks {request.ranks}: the launcher started WORLD_SIZE={world}")
        return int(world)
    if not class_of(device).ordered:
        return request.ranks or len(available_cores())
    found = compute_device(device).count()
    if request.ranks > found:
        raise UserError(f"--ranks {request.ranks}: this machine has {found} GPUs, and a GPU takes one rank")
    return request.ranks or found
