"""A few prices of a calibration, measured again right before and after a job: how far the machine has drifted since.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from calibration.drift import ANCHORS, COMPUTE, EXCHANGE
from calibration.launch.place import Place
from calibration.measure import collectives, layer
from calibration.measure.bench import Bench, Probe
from calibration.measure.grid import grid

BUDGET = 0.4  # seconds of repetitions of each


def read(place: Place) -> dict[str, float]:
    """Seconds of each anchor, of all ranks; nothing on devices whose profiles have none."""
    if place.compute.ordered:
        return {}
    bench = Bench(place, BUDGET)
    found: list[Probe] = layer.probes()
    if place.world > 1:
        everybody = [collectives.everyone(bench)]
        found += collectives.probes(grid(place.device, True), everybody, float(4 * ANCHORS[EXCHANGE]["bytes"]))
    result = {}
    for name in (COMPUTE, EXCHANGE):
        case, context = ANCHORS[name], "step" if name == EXCHANGE else "alone"
        probe = next((each for each in found if each.context == context and case.items() <= each.case.items()), None)
        if probe is not None:
            result[name] = probe.run(bench).value
    return result
