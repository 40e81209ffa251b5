"""Products without a pause until the clock is the one of training: what a board's power limit and its temperature leave of it.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from calibration.measure.bench import Bench
from calibration.measure.grid import Grid
from calibration.samples import Sample

SIDE = 2  # of the square product, in units of the one between collectives
WINDOW = 0.25  # seconds of a window
EARLY, LATE = 0.05, 0.3  # parts of the time in which the clock is still high, and in which it has settled


def pressed(bench: Bench, grid: Grid) -> list[Sample]:
    """Seconds of a large product at first and after `grid.pressed` seconds of nothing else on all ranks, the slowest rank's; and
    what the device's sensors say at the end. The clock that it has then is the one of long training.
    """
    side = SIDE * grid.side
    left, right = (torch.randn(side, side, device=bench.device).to(bench.dtype) for _ in range(2))

    def product() -> None:
        torch.mm(left, right)

    windows: list[tuple[float, float]] = []  # (when it began, seconds per product)
    _, about = bench.repetitions(product)
    batch = max(1, round(WINDOW / max(about, 1e-7)))
    begun = time.monotonic()
    with bench.place.compute.monitor() as monitor:
        while bench.gather([time.monotonic() - begun]).min() < grid.pressed:
            at = time.monotonic() - begun
            windows.append((at, float(bench.times(product, 1, batch=batch, clock=bench.clock)[0])))
        sensors = monitor.since(LATE * grid.pressed)
    early = min(seconds for at, seconds in windows if at <= max(EARLY * grid.pressed, windows[0][0]))
    late = median(seconds for at, seconds in windows if at >= min((1 - LATE) * grid.pressed, windows[-1][0]))
    worst = bench.gather([early, late]).max(axis=0)
    name = bench.place.compute.precisions()[0]
    values = {"early": float(worst[0]), "late": float(worst[1])}
    values |= {kind: float(value) for kind, value in sensors.items() if isinstance(value, float) and value > 0}
    values |= {reason: 1.0 for reason in str(sensors.get("reasons", "")).split(", ") if reason}  # why the clock is not higher
    return [
        Sample(part="sustained", case={"kind": kind, "dtype": name, "side": float(side)}, value=float(f"{value:.6g}"))
        for kind, value in values.items()
    ]
