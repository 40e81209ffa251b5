"""How much longer a computation takes while all ranks of a node compute than while the others wait.

Imports torch: import this module inside the function that needs it.

Ranks of one machine share its caches and memory, those of GPUs its power and hosts. Prices are measured with all ranks at work,
as in a step; this says what that makes of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from calibration.measure.bench import Action, Bench, Probe, Reading
from calibration.measure.grid import Grid
from calibration.measure.training import piece

TURNS = 3  # all at once, then one after the other
MOST = 30  # repetitions in each


def probes(grid: Grid, bench: Bench) -> list[Probe]:
    """A product and a stream from memory, and a piece of a training step; none of a rank that is alone on its node."""
    if _local(bench) == 1:
        return []
    actions: dict[str, Callable[[Bench], Action]] = {
        "product": lambda bench: _product(grid.side, bench),
        "stream": lambda bench: _stream(max(grid.elements), bench),
        "training": lambda bench: piece(bench, grid.side),
    }
    return [Probe("company", {"kind": kind}, _run(prepared), rounds=1) for kind, prepared in actions.items()]


def _local(bench: Bench) -> int:
    """Ranks of the node that has most."""
    return int(np.unique(bench.host, return_counts=True)[1].max())


def _product(side: int, bench: Bench) -> Action:
    left = torch.randn(side, side, device=bench.device).to(bench.dtype)
    turns = bench.cold(left.clone, left.nbytes)
    return lambda: left @ next(turns)


def _stream(elements: int, bench: Bench) -> Action:
    values = torch.zeros(elements, device=bench.device)
    turns = bench.cold(values.clone, values.nbytes)
    return lambda: next(turns).add_(1.0)


def _run(prepared: Callable[[Bench], Action]) -> Callable[[Bench], Reading]:
    """The factor, the mean over ranks."""

    def run(bench: Bench) -> Reading:
        action = prepared(bench)
        count = min(MOST, bench.repetitions(action)[0])
        together, alone = np.empty((TURNS, count)), np.empty((TURNS, count))
        for turn in range(TURNS):
            bench.barrier()
            together[turn] = bench.times(action, count, clock=bench.clock)
            for rank in range(_local(bench)):
                bench.barrier()
                if bench.place.local_rank == rank:
                    alone[turn] = bench.times(action, count, clock=bench.clock)
        each = bench.gather([float(np.median(together) / np.median(alone))])
        return Reading(float(each.mean()), float(each.min()), count=count)

    return run
