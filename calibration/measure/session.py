"""One rank's session: every case that is asked for and not there yet, round by round; rank 0 tells each sample at once.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from calibration.drift import PARTS
from calibration.launch.place import Place
from calibration.measure import (
    anchors,
    collectives,
    company,
    kernels,
    layer,
    pipeline_passes,
    side_effects,
    sustained,
    variability,
)
from calibration.measure.bench import Bench, Probe, Watch
from calibration.measure.grid import Grid, grid
from calibration.measure.interference import LIMIT
from calibration.samples import Key, Sample

ROOM = 0.15  # of free memory, shared by the ranks of a machine, that the buffers of a collective may take
FULL = 0.8  # of free memory that a case may take: larger ones are left out
TOUCHED, LARGEST = 0.25, 2.0**30  # part of free memory, and bytes beyond those of one case in turn, that are mapped at first
FEWEST = 0.2  # part of its repetitions that a case gets at least
OFTEN = 15.0  # seconds after which the anchors of drift are visited again, so that they tell how fast the machine was all along
POLL = 0.25  # seconds between looks at a machine that is not quiet


def measure(
    place: Place,
    quick: bool,
    parts: Sequence[str],
    done: Sequence[tuple[int, Key]],
    largest: float,
    extra: int = 0,
    seconds: float = inf,
) -> list[str]:
    """Measure; the machines' names are returned. done: visits to skip, rank 0's count. largest: bytes of a collective, 0: as
    the memory allows. extra: rounds beyond the grid's. seconds: after which only the first round goes on, by rank 0's clock; its
    cases are repeated less where it would take longer. Rank 0 tells {"cases": n}, {"waiting": why}, and samples as dictionaries.
    """
    begun, seconds = time.monotonic(), max(seconds, 1e-3)
    asked = grid(place.device, quick).within(place.compute.precisions())
    usual = asked.rounds
    asked = replace(asked, rounds=usual + extra)
    bench = Bench(place, asked.budget)
    shared: list[Any] = [set(done)]
    dist.broadcast_object_list(shared)
    session = _Session(bench, asked, shared[0])
    session.footprints(parts)
    place.compute.touch(min(TOUCHED * place.compute.free(place.world), bench.room + LARGEST))
    probes = [probe for probe in _probes(bench, asked, largest) if probe.part in parts]
    session.pressed(parts)
    session.tell(
        {
            "cases": sum(min(usual, probe.rounds) + extra for probe in probes),
            "nodes": int(bench.host.max() > 0) and len(set(bench.host.tolist())),
        }
    )
    beside = [probe for probe in anchors.probes(bench, largest) if PARTS[str(probe.case["kind"])] in parts]
    visited = -inf
    for number in range(asked.rounds):
        session.settle(seconds - float(bench.gather([time.monotonic() - begun])[0, 0]))
        for at, probe in enumerate(probes):
            if number < probe.rounds or number >= usual:
                spent = float(bench.gather([time.monotonic() - begun])[0, 0])
                if number and spent >= seconds:
                    return session.hosts
                bench.pace = 1.0 if number else pace(1 - spent / seconds, 1 - at / len(probes))
                if session.visit(probe, number) and spent - visited >= OFTEN:
                    visited = spent
                    for anchor in beside:
                        session.visit(anchor, number)
    return session.hosts


def pace(left: float, cases: float) -> float:
    """Of its usual repetitions, how many a case gets, where such parts of the time and of the cases are left."""
    return min(1.0, max(FEWEST, left / cases))


def _probes(bench: Bench, asked: Grid, largest: float) -> list[Probe]:
    free = bench.place.compute.free(bench.place.world)
    room = float(bench.gather([ROOM * 4 * min(free, 2**36)]).min())
    probes = kernels.on_device(kernels.probes(asked), bench)
    if bench.place.world > 1:
        within = min(room, 4 * largest) if largest else room
        probes += collectives.probes(asked, collectives.groups(bench), within, not bench.place.compute.ordered)
        probes += pipeline_passes.probes() + variability.probes(asked)
    probes += side_effects.probes(asked, bench) + company.probes(asked, bench) + layer.probes()
    least = float(bench.gather([free]).min()) * FULL
    return [probe for probe in probes if probe.takes + bench.room <= least]


class _Session:
    def __init__(self, bench: Bench, asked: Grid, done: set[tuple[int, Key]]) -> None:
        self.bench, self.asked, self.done = bench, asked, done
        self.watch, self.patience = Watch(bench), asked.calm

    @property
    def hosts(self) -> list[str]:
        """One number per machine."""
        return sorted({str(host) for host in self.bench.host})

    def tell(self, message: Any) -> None:
        if self.bench.place.rank == 0:
            self.bench.place.tell(message)

    def footprints(self, parts: Sequence[str]) -> None:
        """Memory, before anything else takes some."""
        sample = Sample(part="footprint", case={"kind": "context"}, value=0)
        if "footprint" not in parts or (0, sample.key) in self.done:
            return
        for kind, value in side_effects.footprints(self.bench):
            self._keep(Sample(part="footprint", case={"kind": kind}, value=value))

    def pressed(self, parts: Sequence[str]) -> None:
        """Warm the device up as training does, and tell what is left of its clock."""
        if "sustained" in parts and not any(key[0] == "sustained" for _, key in self.done):
            for sample in sustained.pressed(self.bench, self.asked):
                self._keep(sample)

    def settle(self, left: float) -> None:
        """Wait for a quiet machine, as long as patience lasts, which the whole round shares, and the seconds that are left."""
        self.patience = min(self.asked.calm, left)
        self._wait()

    def _wait(self) -> None:
        while self.patience > 0:
            self.watch = Watch(self.bench)
            time.sleep(2 * POLL)
            foreign = self.watch.foreign()
            if foreign <= 0.8 * LIMIT:
                return
            self.tell({"waiting": f"others use {foreign:.0%} of the CPU"})
            self.patience -= 2 * POLL

    def visit(self, probe: Probe, number: int) -> bool:
        """Measure a case, and once more when somebody disturbed it; whether it was still to be measured."""
        key = Sample(part=probe.part, case=dict(probe.case), context=probe.context, value=0).key
        if probe.part != "anchor" and (number, key) in self.done:
            self.tell({"skipped": 1})
            return False
        try:
            sample = self._once(probe, number)
            if sample.foreign > LIMIT and self.patience > 0:
                self._wait()
                again = self._once(probe, number)
                sample = min(sample, again, key=lambda reading: reading.foreign)
        except torch.OutOfMemoryError:
            if self.bench.place.world > 1:  # others wait in the middle of the case
                raise
            self.bench.place.compute.give_back()
            self.tell(
                {"note": f"{probe.part}, {', '.join(map(str, probe.case.values()))}: no memory is left for it: not measured"}
            )
            return False
        self._keep(sample)
        return True

    def _once(self, probe: Probe, number: int) -> Sample:
        self.bench.barrier()
        self.watch.look()
        start = time.perf_counter()
        reading = probe.run(self.bench)
        foreign = self.watch.foreign()
        gc.collect(0)
        self.bench.place.compute.give_back()
        self.patience -= float(self.bench.gather([time.perf_counter() - start]).max()) if foreign > LIMIT else 0.0
        numbers: dict[str, Any] = {name: float(f"{value:.6g}") for name, value in asdict(reading).items()}
        return Sample(
            part=probe.part, case=dict(probe.case), context=probe.context, round=number, foreign=round(foreign, 4), **numbers
        )

    def _keep(self, sample: Sample) -> None:
        self.tell({"sample": sample.model_dump(exclude_defaults=True)})
