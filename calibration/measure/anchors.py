"""Two things that are measured again and again, through a calibration and while a job is timed: how far the machine has drifted.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from calibration.drift import COMPUTE, EXCHANGE
from calibration.launch.place import Place
from calibration.measure import collectives, layer
from calibration.measure.bench import Bench, Probe
from calibration.measure.grid import grid

BUDGET = 0.25  # seconds of repetitions of each at a visit beside a job
BYTES = 2**24  # of the all-reduce: smaller ones scatter more than machines drift
CASES: dict[str, tuple[dict[str, str | float], str]] = {  # and contexts
    COMPUTE: ({"hidden": 512, "tokens": 256, "layers": 1, "passes": "forward"}, "alone"),
    EXCHANGE: ({"operation": "all_reduce", "bytes": BYTES}, "step"),
}


def probes(bench: Bench, largest: float = 0.0) -> list[Probe]:
    """A layer's forward pass, and an all-reduce of all ranks in a step; none on devices with a queue.

    largest: bytes of a collective, 0: any.
    """
    if bench.place.compute.ordered:
        return []
    every = layer.probes()
    if bench.place.world > 1 and not 0 < largest < BYTES:
        every += collectives.probes(grid(bench.place.device, True), [collectives.everyone(bench)], 4.0 * BYTES)
    return [
        Probe("anchor", {"kind": name}, probe.run)
        for name, (case, context) in CASES.items()
        for probe in every
        if probe.context == context and case.items() <= probe.case.items()
    ]


class Readings:
    """What visits to the anchors beside a job read, by all ranks at once."""

    def __init__(self, place: Place) -> None:
        self._bench = Bench(place, BUDGET)
        self._probes: Sequence[Probe] = probes(self._bench)
        self.seconds: list[dict[str, float]] = []

    def visit(self) -> None:
        """Keep seconds of each."""
        if self._probes:
            self.seconds.append({str(probe.case["kind"]): probe.run(self._bench).value for probe in self._probes})
